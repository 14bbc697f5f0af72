# SPDX-License-Identifier: GPL-2.0-or-later
"""A UDP echo server in a thread, clients of both families."""
import socket
import threading

for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    server = socket.socket(family, socket.SOCK_DGRAM)
    server.bind((address, 0))

    def echo():
        while True:
            data, peer = server.recvfrom(65536)
            if not data:
                return
            server.sendto(data, peer)

    thread = threading.Thread(target=echo)
    thread.start()
    client = socket.socket(family, socket.SOCK_DGRAM)
    client.settimeout(20)
    for size in [1, 10, 1400, 1536, 1537, 20000, 60000] * 10:
        message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        client.sendto(message, server.getsockname())
        data, peer = client.recvfrom(65536)
        assert data == message and peer[1] == server.getsockname()[1]
    client.sendto(b"", server.getsockname())
    thread.join()
