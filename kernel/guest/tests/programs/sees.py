# SPDX-License-Identifier: GPL-2.0-or-later
"""sees.py COMMAND...: makes sockets in several states and prints what the command shows of them: `ss` of the guest's own
sockets, `ontime-ss` of outsourced ones. Both have to show the same. Without the module inet_diag, ss does not know the
backlog of listeners and IPV6_V6ONLY: these are printed with RAW=1 in the environment only."""
import os
import re
import socket
import subprocess
import sys
import time

HERE = "127.0.0.1"
kept = []


def keep(sock):
    kept.append(sock)
    return sock


def bound(family, kind, address, port):
    sock = keep(socket.socket(family, kind))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    return sock


def client(port, to):
    sock = bound(socket.AF_INET, socket.SOCK_STREAM, HERE, port)
    sock.connect((HERE, to))
    return sock


listener = bound(socket.AF_INET, socket.SOCK_STREAM, HERE, 5101)
listener.listen(7)
unread = client(5102, 5101)
server, _ = listener.accept()
keep(server).sendall(b"hello")
ended = client(5103, 5101)
keep(listener.accept()[0]).shutdown(socket.SHUT_WR)
# ss counts the end of a stream as a byte until it is read.
ended.recv(1)
waiting = [client(port, 5101) for port in (5104, 5105)]
both = bound(socket.AF_INET6, socket.SOCK_STREAM, "::", 5106)
both.listen(5)
only = keep(socket.socket(socket.AF_INET6, socket.SOCK_STREAM))
only.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
only.bind(("::", 5107))
only.listen(5)
bound(socket.AF_INET, socket.SOCK_DGRAM, HERE, 5108)
bound(socket.AF_INET, socket.SOCK_DGRAM, "0.0.0.0", 5109).connect((HERE, 5108))
bound(socket.AF_INET6, socket.SOCK_DGRAM, "::", 5110)
bound(socket.AF_INET6, socket.SOCK_DGRAM, "::1", 5111)
# Of sockets without a name nothing is shown.
keep(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
keep(socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
time.sleep(0.2)
for words in ("-Htuanp", "-Htan4", "-Htn", "-Htln", "-Huap", "-tunlp"):
    shown = subprocess.run([*sys.argv[1:], words], stdout=subprocess.PIPE, check=True, text=True).stdout
    print(words)
    lines = []
    for line in shown.splitlines():
        # Other programs' sockets, connections that nobody has accepted; and what differs from run to run.
        if not re.search(r":51\d\d\b|^Netid", line) or re.search(r":5101 +127.0.0.1:510[45]\b", line):
            continue
        # ss leaves no space in its header where the column is as wide.
        line = line.replace("PortProcess", "Port Process").replace(f"pid={os.getpid()},", "pid=N,")
        line = " ".join(line.split())
        if "RAW" not in os.environ:
            line = re.sub(r"(LISTEN \d+) \d+", r"\1 N", line).replace("[::]:", "*:")
        lines.append(line)
    print("\n".join(sorted(lines)))
print("end")
