"""What a GPU does for a while: its longest kernels, how long it has nothing to do, and what the host asks of it."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONGEST = 15
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cpu_op"}
_CALLS = {"cuda_runtime", "cuda_driver"}
"""Categories of a trace's events: what the device does, what is profiled where there is none, and calls of CUDA."""
_TOLD_CALLS = ("Launch", "Synchronize", "Memcpy", "Malloc", "Free")
"""Parts of the names of calls that are worth telling: a GPU waits for launches, the host waits for it, both wait for
memory."""
_NAME = 96


@dataclass(frozen=True, slots=True)
class Spent:
    """All that goes by one name."""

    name: str
    times: int
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time went."""

    on: str
    """`GPU`; `CPU`, where there is none: then operations count within those that call them, too."""
    span_ms: float
    """From the first kernel to the end of the last."""
    idle: float
    """The share of it in which none ran."""
    kernels: int
    longest: list[Spent]
    calls: list[Spent]
    """Of the host, such as launches and waits."""


@contextlib.contextmanager
def profiled(*, cuda: bool, trace: str | None = None) -> Iterator[Callable[[], Profile]]:
    """Profile the block; what it gives is called afterwards.

    Args:
        cuda: What the GPU does, without what PyTorch does on the host: to note that would slow the host down.
        trace: Where the trace is kept, for `chrome://tracing` and its like; a name that ends in `.json.gz`.
    """
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
    with profiler:
        yield lambda: _read(profiler, cuda=cuda, trace=trace)


def _read(profiler: Any, *, cuda: bool, trace: str | None) -> Profile:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(trace) if trace else Path(scratch) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        with gzip.open(path, "rt") as file:
            return summed(json.load(file)["traceEvents"], on="GPU" if cuda else "CPU")


def summed(events: Iterable[Mapping[str, Any]], *, on: str) -> Profile:
    """A trace's events, added up."""
    timed = [event for event in events if event.get("ph") == "X"]
    wanted = _ON_DEVICE if on == "GPU" else _ON_HOST
    ran = [event for event in timed if event.get("cat") in wanted]
    calls = [event for event in timed if event.get("cat") in _CALLS and any(x in event["name"] for x in _TOLD_CALLS)]
    spans = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in ran)
    span = max((end for _, end in spans), default=0.0) - (spans[0][0] if spans else 0.0)
    return Profile(
        on=on,
        span_ms=span / 1000,
        idle=1 - _covered(spans) / span if span else 1.0,
        kernels=len(ran),
        longest=_by_name(ran)[:LONGEST],
        calls=_by_name(calls),
    )


def told(profile: Profile, title: str) -> str:
    """As lines."""
    lines = [
        f"{title}: {profile.span_ms:,.1f} ms on the {profile.on}, idle for {profile.idle:.1%} of it,"
        f" {profile.kernels:,} kernels"
    ]
    rows = [(f"{each.ms:9.1f} ms", f"{each.times:7,} x", each.name[:_NAME]) for each in profile.longest]
    rows += [(f"{each.ms:9.1f} ms", f"{each.times:7,} x", f"host: {each.name}") for each in profile.calls]
    return "\n".join(lines + ["  ".join(("   ", *row)) for row in rows])


def _by_name(events: Iterable[Mapping[str, Any]]) -> list[Spent]:
    found: dict[str, list[float]] = defaultdict(list)
    for event in events:
        found[event["name"]].append(float(event["dur"]) / 1000)
    spent = [Spent(name, len(times), sum(times)) for name, times in found.items()]
    return sorted(spent, key=lambda each: -each.ms)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """What is within any of some spans, in order of their beginnings."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
