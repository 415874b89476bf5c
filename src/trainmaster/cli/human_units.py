"""Numbers, times and sizes as people read them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import datetime

_BARS = "▁▂▃▄▅▆▇█"


def seconds_between(earlier: str, later: str | None = None) -> float:
    """How long after one timestamp another is; without a second one, until now."""
    start = datetime.fromisoformat(earlier)
    end = datetime.fromisoformat(later) if later else datetime.now(start.tzinfo)
    return max((end - start).total_seconds(), 0.0)


def duration(seconds: float | None) -> str:
    """The two largest units of a duration.

    >>> duration(0.25), duration(59), duration(61), duration(7_260), duration(200_000), duration(None)
    ('0.2s', '59s', '1m 01s', '2h 01m', '2d 07h', '')
    """
    if seconds is None:
        return ""
    if seconds < 10 and seconds != int(seconds):
        return f"{math.floor(seconds * 10) / 10:.1f}s"
    whole = int(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller:02d}{small_unit}"
    return f"{whole}s"


def about(seconds: float) -> str:
    """A time that is not known to the second.

    >>> about(4), about(100), about(2400), about(9000), about(400_000)
    ('4 s', '2 min', '40 min', '2.5 h', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} days"


def age(timestamp: str | None) -> str:
    """How long ago something was, in its largest unit.

    >>> age(None)
    ''
    """
    return duration(int(seconds_between(timestamp))).partition(" ")[0] if timestamp else ""


def clock(timestamp: str | None) -> str:
    """A timestamp in the reader's own time."""
    return datetime.fromisoformat(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S") if timestamp else ""


def size(count: float) -> str:
    """Bytes.

    >>> size(0), size(999), size(2048), size(3.5 * 2**30)
    ('0 B', '999 B', '2.0 KiB', '3.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(value: float | None) -> str:
    """A metric: four significant digits, whole numbers whole. None stands for what is no finite number.

    >>> number(3.0), number(0.123456), number(1.5e-05), number(12345.6), number(None)
    ('3', '0.1235', '1.5e-05', '12346', 'nan')
    """
    if value is None:
        return "nan"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A series as a line of bars, averaged down to a width.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([])
    ('▁▃▆█', '▄▄', '')
    """
    if not values:
        return ""
    groups = min(width, len(values))
    edges = [len(values) * index // groups for index in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return _BARS[3] * groups
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)
