"""Memory limits of containers: cgroups, version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import time

_V1 = "/sys/fs/cgroup/memory"
_V2 = "/sys/fs/cgroup"


def make(name: str, limit: int) -> str:
    """A cgroup with a limit; empty where this machine lets us make none, so that nothing is limited."""
    v1 = os.path.exists(f"{_V1}/memory.limit_in_bytes")
    folder = f"{_V1 if v1 else _V2}/{name}"
    try:
        os.mkdir(folder)
        with open(f"{folder}/{'memory.limit_in_bytes' if v1 else 'memory.max'}", "w") as file:
            file.write(str(limit))
    except OSError:
        remove(folder)
        return ""
    # A container that may swap would only get slow.
    with (
        contextlib.suppress(OSError),
        open(f"{folder}/{'memory.swappiness' if v1 else 'memory.swap.max'}", "w") as file,
    ):
        file.write("0")
    return folder


def has_killed(folder: str) -> bool:
    """Whether a process in it was killed for want of memory."""
    if not folder:
        return False
    for name in ("memory.oom_control", "memory.events"):
        with contextlib.suppress(OSError), open(f"{folder}/{name}") as file:
            return any(line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in file)
    return False


def remove(folder: str) -> None:
    if not folder:
        return
    for _ in range(50):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:
            # Its last process is still on its way out.
            time.sleep(0.01)
        else:
            return
