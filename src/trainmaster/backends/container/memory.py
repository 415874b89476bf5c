"""Whether a container ended for want of memory. Some engines tell; of the others the kernel is asked.

It counts what it kills in the container's group, which is gone a moment after the container. So the count is read when
the container's first process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import threading
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


class KernelKills:
    """Waits for the end of a container by its first process, in a thread of its own."""

    def __init__(self, pid: int | None) -> None:
        self.count = 0
        """How many processes the kernel killed for want of memory, once it has ended."""
        self._thread: threading.Thread | None = None
        # It may have ended already.
        with contextlib.suppress(OSError):
            if pid is not None and (counter := _counter(pid)) is not None:
                self._thread = threading.Thread(target=self._run, args=(os.pidfd_open(pid), counter), daemon=True)
                self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the count is known, if it ever will be."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, process: int, counter: Path) -> None:
        try:
            # Of any number, where `select` takes none beyond 1023.
            ended = select.poll()
            ended.register(process, select.POLLIN)
            ended.poll()
        finally:
            os.close(process)
        with contextlib.suppress(OSError):
            found = _COUNT.search(counter.read_bytes())
            self.count = int(found[1]) if found else 0


def _counter(pid: int) -> Path | None:
    """Where the kernel counts for the group of a process; None where that is not to be seen."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        if not controllers and (found := _GROUPS / path.lstrip("/") / "memory.events").exists():
            return found
    return None
