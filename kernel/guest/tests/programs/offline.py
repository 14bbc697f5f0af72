# SPDX-License-Identifier: GPL-2.0-or-later
"""A real-time server's vCPU goes offline and comes back, three times: every request is answered. The server is on vCPU 1, whose
channel, where there is one, its sockets are moved to."""
import os
import select
import signal
import socket
import time

HERE = "127.0.0.1"
LIMIT = 100
CPU = 1


def online(state):
    with open(f"/sys/devices/system/cpu/cpu{CPU}/online", "w") as out:
        out.write(state)


def place():
    """Of a thread whose only CPU goes, the kernel widens the affinity."""
    try:
        os.sched_setaffinity(0, {CPU})
    except OSError:
        pass


def serve(udp, listener):
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(40))
    place()
    conn, _ = listener.accept()
    poll = select.epoll()
    poll.register(udp, select.EPOLLIN)
    poll.register(conn, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == udp.fileno():
                data, peer = udp.recvfrom(100)
                udp.sendto(data, peer)
                if data == b"place":
                    place()
            else:
                conn.sendall(conn.recv(100))


udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((HERE, 0))
listener = socket.create_server((HERE, 0))
pid = os.fork()
if pid == 0:
    try:
        serve(udp, listener)
    finally:
        os._exit(1)
asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asker.connect(udp.getsockname())
asker.settimeout(LIMIT)
stream = socket.create_connection(listener.getsockname())
stream.settimeout(LIMIT)
asked = 0


def ask(times):
    global asked
    for _ in range(times):
        asked += 1
        data = b"%d" % asked
        asker.send(data)
        assert asker.recv(100) == data
        stream.sendall(data)
        assert stream.recv(100) == data
        time.sleep(0.01)


try:
    ask(20)
    for _ in range(3):
        online("0")
        ask(20)
        online("1")
        asker.send(b"place")
        assert asker.recv(100) == b"place"
        ask(20)
finally:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(f"{asked} requests of each kind answered", flush=True)
