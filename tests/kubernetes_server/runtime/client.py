"""The cluster's side of the container runtime."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ContainerStartError(Exception):
    """The runtime could not start a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    code: int
    oom: bool


class RuntimeClient:
    def __init__(self, memory_folder: Path) -> None:
        self._memory_folder = memory_folder
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._exits: dict[str, Callable[[Exit], None]] = {}

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            tests = Path(__file__).parents[2]
            # In a user namespace, anybody may make the other namespaces. Then the runtime does not know the pids that
            # others see, so that commands in containers (probes, hooks) fail, and memory is not limited.
            own = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
            command = own if os.geteuid() else []
            self._process = subprocess.Popen(
                [
                    *command,
                    sys.executable,
                    "-S",
                    "-m",
                    "kubernetes_server.runtime",
                    str(theirs.fileno()),
                    str(self._memory_folder),
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(tests)},
                start_new_session=True,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """End all containers."""
        assert self._process is not None
        assert self._writer is not None
        assert self._reading is not None
        self._writer.close()
        await self._reading
        await asyncio.to_thread(self._process.wait)

    async def start(self, identity: str, spec: dict[str, Any], ended: Callable[[Exit], None]) -> int:
        """Start a container; returns its pid.

        Raises:
            ContainerStartError: it did not start.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starting[identity] = future
        self._exits[identity] = ended
        self._send({"op": "start", "id": identity, **spec})
        return await future

    def signal(self, identity: str, number: int) -> None:
        self._send({"op": "signal", "id": identity, "signal": number})

    def _send(self, document: dict[str, Any]) -> None:
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(json.dumps(document).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await reader.readline()
            except ConnectionError:
                return
            if not line:
                return
            document = json.loads(line)
            identity = document["id"]
            match document["event"]:
                case "started":
                    self._starting.pop(identity).set_result(document["pid"])
                case "failed":
                    self._exits.pop(identity)
                    self._starting.pop(identity).set_exception(ContainerStartError(document["message"]))
                case "exited":
                    self._exits.pop(identity)(Exit(code=document["code"], oom=document["oom"]))
