"""Named points at which a test can stop the process or raise. Standard library only; costs nothing unless armed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

ENVIRONMENT_VARIABLE = "TRAINMASTER_FAILPOINT"

_armed: Callable[[str], None] | None = None


def reach(point: str) -> None:
    """Say that the code has come to a point."""
    if _armed is not None:
        _armed(point)


def arm(action: Callable[[str], None] | None) -> None:
    """Have an action called with the name of each point that is reached; None disarms."""
    global _armed
    _armed = action


def arm_from_environment() -> None:
    """Arm what `TRAINMASTER_FAILPOINT="point:n"` says: kill this process when it reaches the point for the n-th time.

    Raises:
        ValueError: the variable has another form.
    """
    setting = os.environ.get(ENVIRONMENT_VARIABLE)
    if not setting:
        return
    wanted, _, count = setting.rpartition(":")
    if not wanted or not count.isdecimal() or int(count) == 0:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must look like 'point:n', not {setting!r}")
    remaining = int(count)

    def kill_in_time(point: str) -> None:
        nonlocal remaining
        if point == wanted:
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    arm(kill_in_time)
