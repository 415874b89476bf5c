"""Runs cases of `engine_tokens` in processes of their own, and gives what came of each as soon as it is known."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CASE_TIMEOUT_S = 240.0
GRACE_S = 60.0
"""A case that has begun may go on for so long after the run's time is up."""
_LOOK_EVERY_S = 0.1
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
"""As trainer services have it: threads that spin while they wait crawl on a CPU that has other work."""
NO_TIME = "there was no time left for it"


def run_cases(
    cases: Sequence[tuple[str, str, Mapping[str, Any]]], setting: Mapping[str, Any], scratch: Path, *, until: float
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """What each case gave, or why it gave nothing. A case that ends its process leaves the others to another one.

    Args:
        cases: Their keys, programs of `engine_cases`, and options.
        setting: What all have in common.
        scratch: Where files of the processes are, for a while.
        until: By `time.monotonic`, when no case begins any more.
    """
    left = list(cases)
    while left:
        if time.monotonic() >= until:
            yield from ((key, NO_TIME) for key, _, _ in left)
            return
        done = 0
        for found in _of_one_process(left, setting, scratch, until=until):
            yield found
            done += 1
        left = left[done:]


def _of_one_process(
    cases: Sequence[tuple[str, str, Mapping[str, Any]]], setting: Mapping[str, Any], scratch: Path, *, until: float
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Of all cases, or of those up to the one that failed: of one at least."""
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        outcomes, log = Path(own) / "outcomes", Path(own) / "log"
        outcomes.touch()
        listed = [{"key": key, "program": program, "options": options} for key, program, options in cases]
        document = json.dumps({"setting": setting, "cases": listed})
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_cases", document, str(outcomes)],
                stdout=output,
                stderr=output,
                cwd=Path(__file__).parents[1],
                env={**_PASSIVE, **os.environ},
            )
        try:
            for number, (key, _, _) in enumerate(cases):
                found = _next_outcome(process, outcomes, number, until=until)
                if isinstance(found, str):
                    yield key, found or _last_words(process, log, key)
                    return
                yield key, found.get("outcome") or found["error"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _next_outcome(
    process: subprocess.Popen[bytes], outcomes: Path, number: int, *, until: float
) -> dict[str, Any] | str:
    """The line of that number; empty when the process ended without it, else why it was not waited for."""
    began = time.monotonic()
    limit_s = min(CASE_TIMEOUT_S, max(0.0, until - began) + GRACE_S)
    if number and began >= until:
        return NO_TIME
    while True:
        ended = process.poll() is not None
        lines = outcomes.read_text().splitlines(keepends=True)
        if len(lines) > number and lines[number].endswith("\n"):
            found: dict[str, Any] = json.loads(lines[number])
            return found
        if ended:
            return ""
        if time.monotonic() - began > limit_s:
            return f"not done after {limit_s:.0f} s"
        time.sleep(_LOOK_EVERY_S)


def _last_words(process: subprocess.Popen[bytes], log: Path, key: str) -> str:
    said = log.read_text(errors="replace").strip()
    print(f"--- {key} failed ({process.returncode}); its last words:\n{said[-3000:]}\n---", file=sys.stderr)
    lines = [line for line in said.splitlines() if line and not line.startswith(" ")]
    return (lines[-1] if lines else f"exit code {process.returncode}")[:200]
