"""A port that a web application listens on, which can be closed and opened again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # They are for the whole process.
        yield


class Listener:
    def __init__(self, app: Any, certificate: Path | None = None, key: Path | None = None) -> None:
        self._config: dict[str, Any] = {
            "app": app,
            "lifespan": "off",
            "log_config": None,
            "access_log": False,
            "ws": "none",
            "timeout_keep_alive": 600,
            "timeout_graceful_shutdown": 1,
            "ssl_certfile": certificate,
            "ssl_keyfile": key,
        }
        self.port = 0
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self, port: int = 0) -> None:
        """Listen on a port (by default the same as before, or any)."""
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port or self.port))
        self.port = bound.getsockname()[1]
        self._server = _Server(uvicorn.Config(**self._config))
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        while not self._server.started:
            await asyncio.sleep(0.005)
            if self._serving.done():
                self._serving.result()

    async def close(self) -> None:
        """Refuse connections, and break the ones there are."""
        if self._server is None or self._serving is None:
            return
        for each in self._server.servers:
            each.close()
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        self._server = self._serving = None
