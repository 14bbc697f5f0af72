# SPDX-License-Identifier: GPL-2.0-or-later
"""Exchanges messages in every way while the device process is stopped for some seconds, fewer than the module's patience, and goes on:
nothing fails, is lost, or comes twice.

paused.py MARK: on the console, MARK-NOW says that messages are exchanged and the process is to be stopped."""
import select
import socket
import sys
import threading
import time

HERE = "127.0.0.1"
STOPPED = 3  # seconds without a message: that was it
AFTER = 30  # exchanges of each kind from then on
over = threading.Event()
counts = {}
failed = []


def exchanges(name, step):
    def run():
        try:
            while not over.is_set():
                step(counts[name])
                counts[name] += 1
        except Exception as error:
            failed.append(f"{name}, after {counts[name]}: {error!r}")

    counts[name] = 0
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def serve(run):
    threading.Thread(target=run, daemon=True).start()


def exactly(sock, count):
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, "the end"
        data += part
    return data


listener = socket.create_server((HERE, 0), backlog=64)
stream = socket.create_connection(listener.getsockname())
echo, _ = listener.accept()
polled = socket.create_connection(listener.getsockname())
polling, _ = listener.accept()
polling.setblocking(False)
bulk = socket.create_connection(listener.getsockname())
sink, _ = listener.accept()
udp, datagrams = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
datagrams.bind((HERE, 0))
udp.connect(datagrams.getsockname())


def blocking_server():
    while True:
        echo.sendall(exactly(echo, 8))


def polling_server():
    poll = select.epoll()
    poll.register(polling, select.EPOLLIN | select.EPOLLET)
    while True:
        poll.poll()
        try:
            while data := polling.recv(100):
                polling.send(data)
        except BlockingIOError:
            pass


def datagram_server():
    while True:
        data, sender = datagrams.recvfrom(100)
        datagrams.sendto(data, sender)


def accepting_server():
    while True:
        peer, _ = listener.accept()
        peer.sendall(exactly(peer, 8))
        peer.close()


def message(number):
    return number.to_bytes(8, "little")


def through(sock):
    def step(number):
        sock.sendall(message(number))
        assert exactly(sock, 8) == message(number)

    return step


def by_udp(number):
    udp.send(message(number))
    assert udp.recv(100) == message(number)


def connected(number):
    with socket.create_connection(listener.getsockname()) as sock:
        through(sock)(number)


def large(number):
    data = message(number) * 32768
    sender = threading.Thread(target=bulk.sendall, args=(data,), daemon=True)
    sender.start()
    assert exactly(sink, len(data)) == data
    sender.join()


for server in (blocking_server, polling_server, datagram_server, accepting_server):
    serve(server)
threads = [
    exchanges("stream", through(stream)), exchanges("epoll", through(polled)), exchanges("datagram", by_udp),
    exchanges("connect", connected), exchanges("large", large),
]
start = time.monotonic()
while min(counts.values()) < 3 and not failed:
    assert time.monotonic() - start < 100, counts
    time.sleep(0.1)
open("/dev/console", "w").write(sys.argv[1] + "-NOW\n")
# While the process is stopped no count goes on, and all do afterwards.
before, since, gap = dict(counts), time.monotonic(), 0
stood = None
start = time.monotonic()
while not failed and not (stood and all(counts[name] >= stood[name] + AFTER for name in counts)):
    assert time.monotonic() - start < 200, (stood, counts)
    time.sleep(0.05)
    if counts != before:
        if stood is None and time.monotonic() - since > STOPPED:
            gap, stood = time.monotonic() - since, before
        before, since = dict(counts), time.monotonic()
over.set()
for thread in threads:
    thread.join(60)
    assert not thread.is_alive(), "one still waits"
print(f"stood for {gap:.1f} s at {stood}, went on to {counts}")
assert not failed, failed
