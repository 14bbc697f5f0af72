# SPDX-License-Identifier: GPL-2.0-or-later
"""A thread that computes at a real-time priority on the vCPU of a real-time receiver. Below the receiver's priority it keeps nothing from it;
at the same or above it may, for as long as it computes. The receiver blocks on datagrams or polls a stream; its vCPU is the one whose channel, where
there is one, its sockets are moved to, and takes the devices' interrupts as well."""
import os
import select
import signal
import socket
import time

HERE = "127.0.0.1"
LIMIT = 100
CPU = 0
RECEIVER, ASKER = 80, 90


def place(cpu, priority):
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))


def take_interrupts():
    names = [name + "-config" for name in os.listdir("/sys/bus/virtio/drivers/ontime") if name.startswith("virtio")]
    with open("/proc/interrupts") as lines:
        numbers = [line.split()[0].rstrip(":") for line in lines if line.split()[-1] in names]
    assert len(numbers) == len(names), (names, numbers)
    for number in numbers:
        with open(f"/proc/irq/{number}/smp_affinity_list", "w") as out:
            out.write(str(CPU))


def child(function, *arguments):
    """A process that runs this; its number, once it says that it begins."""
    begun, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function(lambda: os.write(says, b"x"), *arguments)
        finally:
            os._exit(1)
    os.close(says)
    assert os.read(begun, 1) == b"x"
    os.close(begun)
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def computes(begins, priority):
    place(CPU, priority)
    begins()
    # Should the test be killed, it ends all the same.
    until = time.monotonic() + 3 * LIMIT
    while time.monotonic() < until:
        pass


def receives_datagrams(begins, sock):
    place(CPU, RECEIVER)
    begins()
    while True:
        data, peer = sock.recvfrom(100)
        sock.sendto(data, peer)


def polls_stream(begins, sock):
    place(CPU, RECEIVER)
    begins()
    conn, _ = sock.accept()
    with select.epoll() as poller:
        poller.register(conn, select.EPOLLIN)
        while True:
            poller.poll()
            conn.sendall(conn.recv(100))


def answered(asker, message, seconds):
    if not select.select([asker], [], [], seconds)[0]:
        return False
    data = asker.recv(100)
    assert data == message, (data, message)
    return True


def ask_beside(asker, priority):
    spinner = child(computes, priority)
    try:
        for number in range(20):
            message = b"%d %d" % (priority, number)
            asker.send(message)
            if priority < RECEIVER:
                assert answered(asker, message, LIMIT), f"a spinner at {priority} keeps {message} from a receiver at {RECEIVER}"
            elif not answered(asker, message, 0.5):
                break
        else:
            message = None
    finally:
        end(spinner)
    return message is None or answered(asker, message, LIMIT)


take_interrupts()
for receiver in receives_datagrams, polls_stream:
    stream = receiver is polls_stream
    sock = socket.create_server((HERE, 0)) if stream else socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    if not stream:
        sock.bind((HERE, 0))
    pid = child(receiver, sock)
    # Its own calls wait for main's interrupt, on the same vCPU.
    place(os.cpu_count() - 1, ASKER)
    try:
        asker = socket.socket(socket.AF_INET, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM)
        asker.connect(sock.getsockname())
        for number in range(10):
            asker.send(b"%d" % number)
            assert answered(asker, b"%d" % number, LIMIT)
        for priority in RECEIVER - 20, RECEIVER - 1, RECEIVER, RECEIVER + 5:
            assert ask_beside(asker, priority), f"lost beside a spinner at {priority}"
            print(receiver.__name__, priority, "answered", flush=True)
    finally:
        end(pid)
