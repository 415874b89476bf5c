"""A way to a server over TCP that can be cut: nothing arrives any more, and nobody is told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from local_servers import quiet_port


class CuttableLink:
    """Listens on a port of its own, in a thread of its own."""

    def __init__(self, target_port: int, address: str = "127.0.0.1") -> None:
        self.address = address
        self.port = quiet_port()
        self._target_port = target_port
        self._open = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        """Connections from before are gone."""

        def mend() -> None:
            for writer in self._writers:
                writer.transport.abort()
            self._open.set()

        self._loop.call_soon_threadsafe(mend)

    @contextlib.contextmanager
    def running(self) -> Iterator[CuttableLink]:
        self._loop.call_soon(self._open.set)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, self.address, self.port), self._loop
        )
        listener = started.result()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._end(listener), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self, listener: asyncio.Server) -> None:
        listener.close()
        for writer in list(self._writers):
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        far: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            far_reader, far = await asyncio.open_connection(self.address, self._target_port)
            await asyncio.gather(self._copy(reader, far), self._copy(far_reader, writer))
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            for each in (far, writer):
                if each is not None:
                    each.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
