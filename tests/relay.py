"""A relay of connections: `python relay.py LISTEN CONNECT`, each `unix:PATH` or `tcp:HOST:PORT`.

Containers have no way to this machine's loopback address. A pair of these makes one for tests: one here, from a socket
in a directory to a server on the loopback address; and one in a container that has the directory mounted, from a port
of its own to that socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def _relay(listens: str, connects: str) -> None:
    kind, _, place = connects.partition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if kind == "unix":
            far_reader, far_writer = await asyncio.open_unix_connection(place)
        else:
            host, _, port = place.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        for each in (far_writer, writer):
            each.close()

    if listens.startswith("unix:"):
        listener = await asyncio.start_unix_server(serve, listens.removeprefix("unix:"))
    else:
        host, _, port = listens.removeprefix("tcp:").rpartition(":")
        listener = await asyncio.start_server(serve, host, int(port))
    await listener.serve_forever()


if __name__ == "__main__":
    asyncio.run(_relay(*sys.argv[1:]))
