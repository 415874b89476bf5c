"""Probes and hooks: commands in a container, and connections to it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Any

from kubernetes_server.objects import Object

_NSENTER = ("nsenter", "--mount", "--uts", "--pid", "--root", "--wd", "--target")


async def run_command(pid: int, command: list[str], environment: dict[str, str], timeout_s: float) -> bool:
    """Run a command in a container; whether it ended well in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_NSENTER,
            str(pid),
            "--",
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return False
    try:
        return await asyncio.wait_for(process.wait(), timeout_s) == 0
    except TimeoutError:
        return False
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def is_well(probe: Object, *, pid: int, address: str, environment: dict[str, str], container: Object) -> bool:
    """Whether a container passes a probe."""
    timeout_s = max(float(probe.get("timeoutSeconds", 1)), 1.0)
    if "exec" in probe:
        return await run_command(pid, probe["exec"].get("command") or [], environment, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            if "httpGet" in probe:
                return await _http_get(probe["httpGet"], address, container)
            if "tcpSocket" in probe:
                _, writer = await asyncio.open_connection(
                    probe["tcpSocket"].get("host") or address, _port(probe["tcpSocket"]["port"], container)
                )
                writer.close()
                return True
    except (OSError, TimeoutError):
        return False
    return True


async def _http_get(wanted: Object, address: str, container: Object) -> bool:
    port = _port(wanted["port"], container)
    reader, writer = await asyncio.open_connection(wanted.get("host") or address, port)
    try:
        writer.write(f"GET {wanted['path']} HTTP/1.0\r\nHost: {address}:{port}\r\n\r\n".encode())
        line = await reader.readline()
    finally:
        writer.close()
    words = line.split()
    return len(words) > 1 and 200 <= int(words[1]) < 400


def _port(port: Any, container: Object) -> int:
    if isinstance(port, str) and not port.isdigit():
        named = (each["containerPort"] for each in container.get("ports") or () if each.get("name") == port)
        return int(next(named, 0))
    return int(port)
