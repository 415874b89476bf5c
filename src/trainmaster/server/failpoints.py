"""Named points at which a test can stop the process or raise. Standard library only; costs nothing unless armed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

ENVIRONMENT_VARIABLE = "TRAINMASTER_FAILPOINT"
ELSEWHERE_VARIABLE = "TRAINMASTER_HERE_AS_ELSEWHERE"
"""Set by tests: workers of this machine that report over HTTP send checkpoints and results, too, as others do."""

_SETTING = re.compile(r"(?P<point>.+?):(?P<count>[1-9]\d*)(?::(?P<signal>SIG(?:KILL|STOP)))?")

_armed: Callable[[str], None] | None = None


def reach(point: str) -> None:
    if _armed is not None:
        _armed(point)


def arm(action: Callable[[str], None] | None) -> None:
    """Call an action with the name of each point that is reached; None disarms."""
    global _armed
    _armed = action


def arm_from_environment() -> None:
    """Kill or stop this process when it reaches the point of `TRAINMASTER_FAILPOINT="point:n[:SIGSTOP]"` n times."""
    setting = os.environ.get(ENVIRONMENT_VARIABLE)
    if not setting:
        return
    match = _SETTING.fullmatch(setting)
    if match is None:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must look like 'point:n' or 'point:n:SIGNAL', not {setting!r}")
    wanted, remaining = match["point"], int(match["count"])
    number = signal.Signals[match["signal"] or "SIGKILL"]

    def strike_in_time(point: str) -> None:
        nonlocal remaining
        if point == wanted:
            remaining -= 1
            if remaining == 0:
                os.kill(os.getpid(), number)

    arm(strike_in_time)
