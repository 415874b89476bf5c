"""Saves checkpoints in forked children that die by SIGKILL between any two lines. Reads orders, a JSON line each.

An order: `root`, `step`, `attempt`, `owner` (a file that must name the attempt), and how the child dies: `line` (when
it is about to execute so many lines of the library), `after_s`, or neither. The answer: `killed`, and `lines` when it
lived.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import trainmaster.jobs
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.roots import open_root

with contextlib.suppress(ImportError):
    import obstore.store  # noqa: F401 - loaded here once; used by the children alone, as it has threads

TRACED = (str(Path(trainmaster.jobs.__file__).parent), __file__, shutil.__file__)
SIZES = {"weights/0.bin": 50_000, "weights/1.bin": 10, "state.json": 20, "empty": 0}


class Executioner:
    """Counts the lines that all threads execute, and ends the process before one of them."""

    def __init__(self, line: int | None) -> None:
        self.lines = 0
        self._line = line
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        # The frames that run already have no tracer of their own yet.
        sys._getframe(1).f_trace = self._step

    def stop(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename.startswith(TRACED) else None

    def _step(self, frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            with self._lock:
                self.lines += 1
                if self.lines == self._line:
                    os.kill(os.getpid(), signal.SIGKILL)
        return self._step


def content(name: str, step: int) -> bytes:
    return bytes([step % 256]) * SIZES[name]


def save(order: dict[str, Any]) -> None:
    root = open_root(order["root"])
    step, attempt = order["step"], order["attempt"]
    rel_path = f"run/{step}"
    manifest = Manifest(
        checkpoint_id=f"job-{attempt}-{step}",
        job_id="job",
        attempt=attempt,
        step=step,
        epoch=None,
        metrics={},
        world_size=1,
        created_at=float(step),
    )

    def check_owner() -> None:
        if Path(order["owner"]).read_text() != str(attempt):
            raise NotOwnerError("another attempt owns the job")

    with root.draft(rel_path, job_id="job", attempt=attempt, expected_bytes=sum(SIZES.values())) as draft:
        for name in SIZES:
            (draft / name).parent.mkdir(exist_ok=True)
            with open(draft / name, "wb") as file:
                data = content(name, step)
                file.write(data[: len(data) // 2])
                file.flush()
                file.write(data[len(data) // 2 :])
        root.commit(draft, rel_path, manifest, check_owner=check_owner)
    root.point("run", "latest", rel_path)
    if order.get("remove"):
        root.remove(f"run/{order['remove']}")


def child(order: dict[str, Any]) -> int:
    executioner = Executioner(order.get("line"))
    if after_s := order.get("after_s"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        executioner.start()
        save(order)
    finally:
        executioner.stop()
    return executioner.lines


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reading)
                os.write(writing, str(child(order)).encode())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        with open(reading, "rb") as pipe:
            lines = pipe.read()
        _, status = os.waitpid(pid, 0)
        answer = {"killed": os.WIFSIGNALED(status), "lines": int(lines or 0), "failed": os.WEXITSTATUS(status)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
