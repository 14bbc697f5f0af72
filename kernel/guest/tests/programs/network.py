# SPDX-License-Identifier: GPL-2.0-or-later
"""The network that the sockets are in goes down and comes back: calls say so at once, connections go on afterwards.

On the console, NETWORK-DOWN says that it is to go, NETWORK-UP that it is to come back."""
import errno
import socket
import time

HERE = "127.0.0.1"
LIMIT = 200


def console(word):
    with open("/dev/console", "w") as out:
        out.write(word + "\n")


def error_of(call):
    try:
        call()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
    return None


def until(what, found):
    start = time.monotonic()
    while not found():
        assert time.monotonic() - start < LIMIT, f"not in {LIMIT} s: {what}"
        time.sleep(0.2)


def connects():
    with socket.create_server((HERE, 0)) as again, socket.create_connection(again.getsockname()) as one:
        two, _ = again.accept()
        one.sendall(b"anew")
        assert two.recv(100) == b"anew"
        two.close()


def lost():
    """A datagram to this host does not arrive: what is sent to a loopback that is down is dropped without a word."""
    udp.settimeout(1)
    udp.sendto(b"lost", address)
    return error_of(lambda: udp.recv(100)) is not None


# On the same interface, by a route that goes with it.
ELSEWHERE = ("192.0.2.2", 9)
listener = socket.create_server((HERE, 0))
client = socket.create_connection(listener.getsockname())
server, _ = listener.accept()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((HERE, 0))
address = udp.getsockname()
outside = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
assert (found := error_of(lambda: outside.sendto(b"out", ELSEWHERE))) is None, found

console("NETWORK-DOWN")
until("datagrams are lost", lost)
assert (found := error_of(lambda: outside.sendto(b"out", ELSEWHERE))) == "ENETUNREACH", found
refused = socket.socket()
assert (found := error_of(lambda: refused.connect(ELSEWHERE))) == "ENETUNREACH", found
unanswered = socket.socket()
unanswered.settimeout(1)
assert error_of(lambda: unanswered.connect(listener.getsockname())) is not None, "connected without a network"
unanswered.close()
client.sendall(b"while it is down")
server.settimeout(1)
assert error_of(lambda: server.recv(100)) is not None, "data came through a network that is down"

console("NETWORK-UP")
until("a datagram arrives", lambda: not lost())
until("there is a route again", lambda: error_of(lambda: outside.sendto(b"out", ELSEWHERE)) is None)
server.settimeout(LIMIT)
assert server.recv(100) == b"while it is down"
server.sendall(b"answer")
client.settimeout(LIMIT)
assert client.recv(100) == b"answer"
connects()
