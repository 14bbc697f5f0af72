# SPDX-License-Identifier: GPL-2.0-or-later
"""reserve.py SOCKETS: as an ordinary user, makes a listener, a connection to it and that many other sockets, then says
"made" and waits for a line. It accepts the connection, which fails while the sockets that are left are root's, and again
after it has closed one; then it waits for another line."""
import errno
import resource
import socket
import sys

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
listener = socket.create_server(("127.0.0.1", 5201))
client = socket.create_connection(("127.0.0.1", 5201))
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(int(sys.argv[1]))]
print("made", flush=True)
sys.stdin.readline()
try:
    listener.accept()
    raise AssertionError("a socket that is root's")
except OSError as error:
    assert error.errno == errno.EMFILE, error
sockets.pop(0).close()
listener.accept()[0].close()
print("accepted", flush=True)
sys.stdin.readline()
