"""Runs the worker of a node for the actor that is responsible for it, and ends everything of it.

Run as `python -c SOURCE` by the actor, on Ray's Python; so without newer syntax. The first line of standard input is
JSON: command, environment, grace_s, lost_grace_s, detach. The line `stop` asks the worker to end. The end of standard
input means that the actor is gone. The answer on standard output is one line of JSON: exit, tail.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import time
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TAIL = 2000


def main() -> None:
    spec = json.loads(read_line())
    # Ray kills the children of an actor that ends: it does not see a grandchild.
    if spec["detach"] and os.fork():
        os._exit(0)
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    stopping: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append("signal"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output, inlet = os.pipe()
    try:
        worker = subprocess.Popen(
            spec["command"],
            env=spec["environment"],
            stdin=subprocess.DEVNULL,
            stdout=inlet,
            stderr=inlet,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    except OSError as error:
        answer(126 if isinstance(error, PermissionError) else 127, str(error).encode())
        return
    os.close(inlet)
    answer(*watch(worker, spec, output, stopping))


def watch(worker: subprocess.Popen[bytes], spec: dict[str, Any], output: int, stopping: list[str]) -> tuple[int, bytes]:
    """The exit code of the worker, and the last of what it said."""
    tail, sources = b"", {0, output}
    deadline: float | None = None
    while worker.poll() is None:
        ready = select.select(list(sources), [], [], 0.2)[0]
        if output in ready:
            said = os.read(output, 65536)
            tail = (tail + said)[-TAIL:]
            forward(said)
            if not said:
                sources.discard(output)
        if 0 in ready:
            asked = os.read(0, 65536)
            if asked:
                stopping.append("asked")
            else:
                sources.discard(0)
                stopping.append("lost")
        if stopping:
            grace_s = spec["lost_grace_s"] if "lost" in stopping else spec["grace_s"]
            if deadline is None:
                worker.terminate()
                deadline = time.monotonic() + grace_s
            deadline = min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                kill_group(worker.pid)
    kill_group(worker.pid)
    kill_children()
    os.set_blocking(output, False)
    try:
        while True:
            said = os.read(output, 65536)
            if not said:
                break
            tail = (tail + said)[-TAIL:]
            forward(said)
    except BlockingIOError:
        pass
    return worker.returncode, tail


def forward(said: bytes) -> None:
    """To Ray's log of the actor."""
    with contextlib.suppress(OSError):
        os.write(2, said)


def kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def kill_children() -> None:
    """Whatever the worker left, in sessions of its own: the system hands it to this process."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = children()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = file.read().rpartition(b")")[2].split()[1]
            except (OSError, IndexError):
                continue
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


def answer(code: int, tail: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"exit": code, "tail": tail.decode("utf-8", "replace")}).encode() + b"\n")


def read_line() -> bytes:
    """Byte by byte: what follows is for `select`."""
    line: list[bytes] = []
    while not line or line[-1] not in (b"\n", b""):
        line.append(os.read(0, 1))
    return b"".join(line)


if __name__ == "__main__":
    main()
