# SPDX-License-Identifier: GPL-2.0-or-later
"""Threads that wait and copy until the process is killed."""
import socket
import threading

listener = socket.create_server(("127.0.0.1", 0))
data = b"x" * (4 << 20)


def serve():
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=lambda: [peer.recv(1 << 20) for _ in iter(int, 1)], daemon=True).start()


def flood():
    while True:
        client = socket.create_connection(listener.getsockname())
        client.sendall(data)
        client.close()


idle = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
idle.bind(("127.0.0.1", 0))
threading.Thread(target=serve, daemon=True).start()
for _ in range(3):
    threading.Thread(target=flood, daemon=True).start()
idle.recv(100)
