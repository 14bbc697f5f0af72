# SPDX-License-Identifier: GPL-2.0-or-later
"""More connections of a real-time server than receives ahead: one that is busy among idle ones has a place, and the doorbells of the server are counted
by a probe. Then a random load on all, of which nothing is lost or comes twice."""
import os
import random
import select
import signal
import socket
import subprocess

HERE = "127.0.0.1"
BUFFER = 16384
LIMIT = 100
# Places: a quarter of a channel's calls.
PLACES, CONNECTIONS = 64, 90
TRACING = "/sys/kernel/tracing"


def serve(listener):
    """Echoes; with a receive more behind each message, as one that polls by edges makes it."""
    os.sched_setaffinity(0, {0})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
    conns = {listener.fileno(): listener}
    poller = select.epoll()
    poller.register(listener, select.EPOLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == listener.fileno():
                conn = listener.accept()[0]
                conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                conns[conn.fileno()] = conn
                poller.register(conn, select.EPOLLIN)
                continue
            try:
                while data := conns[fd].recv(BUFFER, socket.MSG_DONTWAIT):
                    conns[fd].sendall(data)
                conns.pop(fd).close()
            except BlockingIOError:
                pass


def receive(conn, length):
    received = b""
    while len(received) < length:
        data = conn.recv(BUFFER)
        assert data, "the server has ended"
        received += data
    return received


def ask(conn, times):
    for number in range(times):
        message = b"request %d" % number
        conn.sendall(message)
        assert receive(conn, len(message)) == message


def write(name, text):
    with open(f"{TRACING}/{name}", "w") as out:
        out.write(text)


def doorbells(pid, function, *arguments):
    """How often this process rings while that is done."""
    write("trace", "")
    write("events/kprobes/ontime_rings/filter", f"common_pid == {pid}")
    write("events/kprobes/ontime_rings/enable", "1")
    function(*arguments)
    write("events/kprobes/ontime_rings/enable", "0")
    with open(f"{TRACING}/trace") as lines:
        return sum("ontime_rings:" in line for line in lines)


def busy_among_idle(pid, conns):
    for conn in conns:
        ask(conn, 12)
    # Those that came first, that came last, and that have been idle longest now.
    for index in 0, CONNECTIONS - 1, PLACES // 2, 1:
        ask(conns[index], 12)
        rung = doorbells(pid, ask, conns[index], 100)
        print(f"connection {index}: 100 requests, {rung} doorbells", flush=True)
        # The answer's; without a place it is three a request.
        assert rung <= 120


def in_turn(pid, conns):
    """With all of them in turn the places stay where they are: nobody's next receive ahead is called off."""
    def turn():
        for conn in conns:
            ask(conn, 1)

    for _ in range(3):
        turn()
    rung = doorbells(pid, turn)
    print(f"{CONNECTIONS} connections in turn, {rung} doorbells", flush=True)
    assert rung <= PLACES + 3 * (CONNECTIONS - PLACES) + 20


def nothing_is_lost(conns):
    dice = random.Random(1)
    sent, received, busy = [b""] * len(conns), [b""] * len(conns), []
    for step in range(3000):
        # A few are busy for a while, and the others send something now and then.
        if step % 60 == 0:
            busy = dice.sample(range(CONNECTIONS), 4)
        index = dice.choice(busy) if dice.random() < 0.8 else dice.randrange(CONNECTIONS)
        message = b"%d %d;" % (index, step) * dice.choice((1, 1, 1, 40, 400))
        conns[index].sendall(message)
        sent[index] += message
        # At times the answer is left for later, so that others' messages come beside it.
        if dice.random() < 0.7:
            received[index] += receive(conns[index], len(sent[index]) - len(received[index]))
    for index, conn in enumerate(conns):
        received[index] += receive(conn, len(sent[index]) - len(received[index]))
        assert received[index] == sent[index], index
    print(f"{sum(len(data) for data in received)} bytes of {CONNECTIONS} connections as they were sent", flush=True)


if not os.path.exists(f"{TRACING}/kprobe_events"):
    subprocess.run(["mount", "-t", "tracefs", "tracefs", TRACING], check=True)
write("kprobe_events", "p:ontime_rings ontime:ontime_ring\n")
listener = socket.create_server((HERE, 0), backlog=CONNECTIONS)
pid = os.fork()
if pid == 0:
    try:
        serve(listener)
    finally:
        os._exit(1)
try:
    conns = [socket.create_connection(listener.getsockname()) for _ in range(CONNECTIONS)]
    for conn in conns:
        conn.settimeout(LIMIT)
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    busy_among_idle(pid, conns)
    in_turn(pid, conns)
    nothing_is_lost(conns)
finally:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    write("events/kprobes/ontime_rings/enable", "0")
    write("kprobe_events", "")
