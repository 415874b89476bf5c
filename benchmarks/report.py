"""What a benchmark answers with, and the table that shows it."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]
"""Tells whoever waits what is being done."""


class WrongResultError(Exception):
    """The server was not merely slow: something was lost, doubled or never came."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a user would do instead, measured in the same run."""

    name: str
    value: float
    ours: float
    """What is set against it: the figure itself, unless that is a difference."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number."""

    name: str
    measured: float
    unit: str
    target: float | None = None
    """None: it is only told."""
    at_least: bool = False
    """The target is a lower bound; otherwise it is an upper one."""
    peer: Peer | None = None
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the target was reached, where there is one."""
        if self.target is None:
            return True
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    @property
    def verdict(self) -> str:
        """`met`, or by how much it was missed."""
        if self.target is None:
            return ""
        if self.met:
            return "met"
        missed = (self.target - self.measured if self.at_least else self.measured - self.target) / self.target
        return f"MISSED by {missed:.0%}"

    @property
    def ratio(self) -> str:
        """Ours over the peer's."""
        if self.peer is None:
            return ""
        times = number(self.peer.ours / self.peer.value)
        return f"{times} x {self.peer.name} ({number(self.peer.value)} {self.unit})"

    def to_json(self) -> dict[str, Any]:
        """The figure for `--json`."""
        return dataclasses.asdict(self) | {"met": self.met}


def table(figures: Iterable[Figure]) -> str:
    """All figures, one a line."""
    rows = [("figure", "measured", "target", "", "ratio to a peer", "note")]
    for figure in figures:
        bound = ">=" if figure.at_least else "<="
        rows.append(
            (
                figure.name,
                f"{number(figure.measured)} {figure.unit}",
                "" if figure.target is None else f"{bound} {number(figure.target)} {figure.unit}",
                figure.verdict,
                figure.ratio,
                figure.note,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def machine(directory: Path) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "fsync_ms": round(_fsync_s(directory) * 1000, 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _fsync_s(directory: Path) -> float:
    """What it takes to have a page on disk: nothing durable can be faster."""
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(50):
            began = time.perf_counter()
            os.write(file.fileno(), b"." * 4096)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def number(value: float) -> str:
    """As tables show it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
