# SPDX-License-Identifier: GPL-2.0-or-later
"""faults.py CYCLES: what fails, and what is left of it: nothing. Sockets and pinned pages are counted before and after each."""
import errno
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time

HERE = "127.0.0.1"
RESET = struct.pack("ii", 1, 0)


def left():
    """Outsourced sockets, and pages that are pinned."""
    stat = dict(line.split() for line in open("/proc/vmstat"))
    pinned = int(stat.get("nr_foll_pin_acquired", 0)) - int(stat.get("nr_foll_pin_released", 0))
    return sum(int(line.split()[2]) for line in open("/proc/net/protocols") if line.startswith("ONTIME")), pinned


def pair():
    with socket.create_server((HERE, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def child(run):
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
    finally:
        os._exit(1)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def killed_while_connected(cycles):
    listener = socket.create_server((HERE, 0), backlog=128)
    listener.setblocking(False)
    data = b"x" * (1 << 20)

    def connect():
        sock = socket.create_connection(listener.getsockname())
        while True:
            sock.sendall(data)

    def accept():
        own = socket.create_server((HERE, 0))
        other = socket.socket()
        other.setblocking(False)
        other.connect_ex(own.getsockname())
        while True:
            own.accept()

    def receive():
        one, two = pair()
        threading.Thread(target=lambda: [one.sendall(data) for _ in iter(int, 1)], daemon=True).start()
        while True:
            two.recv(1 << 20, socket.MSG_WAITALL)

    random.seed(1)
    for number in range(cycles):
        pid = child((connect, connect, accept, receive)[number % 4])
        time.sleep(random.choice((0, 0.001, 0.005, 0.02, 0.05)))
        kill(pid)
        while select.select([listener], [], [], 0)[0]:
            try:
                peer, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            (reset if number % 3 else socket.socket.close)(peer)


def killed_during_a_large_copy():
    def copy():
        one, _ = pair()
        one.sendall(b"x" * (64 << 20))

    for _ in range(10):
        pid = child(copy)
        time.sleep(0.2)
        kill(pid)


def reset_mid_transfer():
    for _ in range(5):
        one, two = pair()
        told = []

        def send():
            try:
                one.sendall(b"x" * (64 << 20))
            except OSError as error:
                told.append(error.errno)

        sender = threading.Thread(target=send)
        sender.start()
        two.recv(300000)
        reset(two)
        sender.join(20)
        assert told and told[0] in (errno.ECONNRESET, errno.EPIPE), told
        one.close()
    # The other way round: what came before the reset is read, then comes the error.
    for _ in range(20):
        one, two = pair()
        one.sendall(b"y" * 1000)
        two.recv(500, socket.MSG_WAITALL)
        reset(one)
        try:
            while two.recv(300):
                pass
            raise AssertionError("the end instead of an error")
        except ConnectionResetError:
            pass
        two.close()


def out_of_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    for _ in range(3):
        have = []
        with socket.create_server((HERE, 0), backlog=16) as listener:
            client = socket.create_connection(listener.getsockname())
            try:
                while True:
                    have.append(socket.socket())
            except OSError as error:
                assert error.errno == errno.EMFILE, error
            try:
                listener.accept()
                raise AssertionError("more descriptors than allowed")
            except OSError as error:
                assert error.errno == errno.EMFILE, error
            have.pop().close()
            listener.accept()[0].close()  # the connection was not lost
            client.close()
        for sock in have:
            sock.close()
    # The VM's own limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    for _ in range(2):
        have = []
        try:
            while len(have) < 900:
                have.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            print("no limit in the VM (its own stack)")
        except OSError as error:
            assert error.errno == errno.EMFILE and len(have) > 500, (error, len(have))
        for sock in have:
            sock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def buffers_full():
    one, two = pair()
    one.setblocking(False)
    sent = 0
    try:
        while True:
            sent += one.send(b"z" * 65536)
    except BlockingIOError:
        pass
    assert not select.select([], [one], [], 0.2)[1], "full, and writable"
    one.settimeout(0.5)
    start = time.monotonic()
    try:
        while True:
            sent += one.send(b"z" * 65536)
    except TimeoutError:
        assert time.monotonic() - start >= 0.4
    got = 0
    two.settimeout(20)
    while got < sent:
        got += len(two.recv(1 << 20))
    assert got == sent and select.select([], [one], [], 20)[1]
    one.close()
    two.close()
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind((HERE, 0))
    for _ in range(2000):
        udp.sendto(b"u" * 1000, udp.getsockname())
    udp.setblocking(False)
    got = 0
    try:
        while udp.recv(2000):
            got += 1
    except BlockingIOError:
        assert 0 < got < 2000, got
    udp.close()


def more_waiters_than_places():
    """Beyond half of the queue's places calls wait for readiness, not in the device."""
    socks = []
    got = []
    threading.stack_size(65536)
    for _ in range(300):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((HERE, 0))
        socks.append(sock)
    threads = [threading.Thread(target=lambda sock=sock: got.append(sock.recv(10))) for sock in socks]
    for thread in threads:
        thread.start()
    time.sleep(2)
    one, two = pair()
    one.sendall(b"others go on")
    assert two.recv(100) == b"others go on"
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for sock in reversed(socks):
        sender.sendto(b"wake", sock.getsockname())
    for thread in threads:
        thread.join(30)
    assert len(got) == 300, len(got)
    for sock in [*socks, one, two, sender]:
        sock.close()


def settled(before):
    for _ in range(100):
        if left() == before:
            return True
        time.sleep(0.1)
    return False


failed = 0
for test, arguments in [
    (killed_while_connected, [int(sys.argv[1])]), (killed_during_a_large_copy, []), (reset_mid_transfer, []),
    (out_of_descriptors, []), (buffers_full, []), (more_waiters_than_places, []),
]:
    before = left()
    start = time.monotonic()
    try:
        test(*arguments)
        assert settled(before), f"left over: {left()} after {before} (sockets, pinned pages)"
        print(f"ok {test.__name__} {time.monotonic() - start:.0f} s", flush=True)
    except Exception as error:  # each is told, the others still run
        print("FAILED", test.__name__, repr(error), flush=True)
        failed += 1
sys.exit(failed)
