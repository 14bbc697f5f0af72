# SPDX-License-Identifier: GPL-2.0-or-later
"""An asyncio echo server (epoll), 40 clients at once, each with messages small and large."""
import asyncio
import hashlib


async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def client(port, number):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for size in (1, 100, 1536, 1537, 60000):
        message = hashlib.sha256(b"%d" % number).digest() * (size // 32 + 1)
        writer.write(message)
        assert await asyncio.wait_for(reader.readexactly(len(message)), 60) == message
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await asyncio.gather(*(client(port, number) for number in range(40)))


asyncio.run(main())
