# SPDX-License-Identifier: GPL-2.0-or-later
"""Waits in every way while the device process goes; each wait must end with an error. Then sockets must work again.

restart.py MARK: on the console, MARK-NOW says that everything waits and the process is to go, MARK-GONE that all waits
have ended and a new device may come. restart.py UNBOUND: instead, the guest's devices are unbound from the driver, and
bound again."""
import errno
import os
import select
import socket
import sys
import threading
import time

DRIVER = "/sys/bus/virtio/drivers/ontime"
mark = sys.argv[1]
devices = []
ended = {}


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def device_goes():
    if mark != "UNBOUND":
        return write("/dev/console", mark + "-NOW\n")
    devices.extend(sorted(name for name in os.listdir(DRIVER) if name.startswith("virtio")))
    assert devices, "no device is bound"
    for name in devices:
        write(DRIVER + "/unbind", name)


def device_comes():
    if mark != "UNBOUND":
        return write("/dev/console", mark + "-GONE\n")
    for name in devices:
        write(DRIVER + "/bind", name)


def waits(name, call):
    def run():
        try:
            call()
            ended[name] = "no error"
        except OSError as error:
            ended[name] = errno.errorcode.get(error.errno, str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def epoll(sock):
    poll = select.epoll()
    poll.register(sock, select.EPOLLIN | select.EPOLLET)
    poll.poll(0)
    events = poll.poll(120)
    assert events, "epoll told nothing"
    raise OSError(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.EBADMSG, "")


listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
watched = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
timed = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
timed.bind(("127.0.0.1", 0))
timed.settimeout(100)
threads = [
    waits("recv", lambda: server.recv(100)),
    waits("large send", lambda: client.sendall(b"x" * (64 << 20))),
    waits("accept", listener.accept),
    waits("recvfrom", lambda: udp.recvfrom(100)),
    waits("recvfrom with a time-out", lambda: timed.recvfrom(100)),
    waits("epoll", lambda: epoll(watched)),
]
server.setblocking(True)
time.sleep(2)
start = time.monotonic()
device_goes()
for thread in threads:
    thread.join(max(0.1, 100 - (time.monotonic() - start)))
print(f"all ended after {time.monotonic() - start:.0f} s: {ended}", flush=True)
for name in ("recv", "large send", "accept", "recvfrom", "recvfrom with a time-out", "epoll"):
    if name == "recv":  # it got data of the large send
        continue
    assert ended.get(name) == "ECONNRESET", f"{name}: {ended.get(name, 'it still waits')}"
for sock in (listener, client, server, watched, udp):
    try:
        sock.getsockname()
        raise SystemExit("a socket of the old device answers")
    except OSError as error:
        assert error.errno == errno.ECONNRESET, error
    sock.close()


def outsourced():
    """A socket that is not in the guest's own table."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = "%04X" % sock.getsockname()[1]
        return not any(f":{port} " in line for line in open("/proc/net/tcp"))


assert not outsourced(), "without a device sockets are the guest's own"
device_comes()
while not outsourced():
    assert time.monotonic() - start < 400, "no new device was picked up"
    time.sleep(0.5)
print(f"a new device after {time.monotonic() - start:.0f} s", flush=True)
with socket.create_server(("127.0.0.1", 0)) as again, socket.create_connection(again.getsockname()) as one:
    two, _ = again.accept()
    one.sendall(b"y" * 1000000)
    one.shutdown(socket.SHUT_WR)
    assert len(b"".join(iter(lambda: two.recv(65536), b""))) == 1000000
