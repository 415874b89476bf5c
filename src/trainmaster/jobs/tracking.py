"""The one hook through which metrics are mirrored to an experiment tracker.

A mirror is a convenience: what the server has is what counts. So a tracker that fails is dropped with a warning, and
training goes on.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

NONE = "none"
TRACKIO = "trackio"
TRACKERS = (NONE, TRACKIO)


class Tracker(Protocol):
    """An experiment tracker, as far as a job needs one. It is used by one rank of a job."""

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Begin a run, or join the one with `run_id` again; returns the run's id, None when there is none."""

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Take numbers in."""

    def finish(self) -> None:
        """Write everything out; a later `start` with the run's id joins it again."""


class NoTracker:
    """Mirrors nothing."""

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:  # noqa: ARG002
        """Keep the id that is there: a later run with a tracker joins it."""
        return run_id

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Nothing happens."""

    def finish(self) -> None:
        """Nothing happens."""


class TrackioTracker:
    """Trackio, in a local directory: `TRACKIO_DIR` if it is set, else the one that was given, else Trackio's own.

    Trackio finds a run by its name. So the id of a run is its name there, which has something random in it.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._run: Any = None

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Begin or join a run; without the network, and without measurements of Trackio's own."""
        if self._directory is not None and "trackio" not in sys.modules:
            os.environ.setdefault("TRACKIO_DIR", str(self._directory))
        import trackio

        run_id = run_id or f"{name}-{secrets.token_hex(4)}"
        with contextlib.redirect_stdout(io.StringIO()):  # a rank's log is the user's
            self._run = trackio.init(
                project=project,
                name=run_id,
                resume="allow",
                config={key: value for key, value in config.items() if not key.startswith("_")},
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        return run_id

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Queue numbers for Trackio's own thread."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Write out what is queued."""
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # type: ignore[no-untyped-call]


class Lines:
    """Metrics as lines for a person to watch: the first ones at once, then one a second."""

    EVERY_S = 1.0

    def __init__(self) -> None:
        self._due = 0.0

    def show(self, values: Mapping[str, float], step: int | None, total_steps: int | None) -> None:
        """Print a line, if it is time for one or this is the last step."""
        if time.monotonic() < self._due and (step is None or step != total_steps):
            return
        self._due = time.monotonic() + self.EVERY_S
        where = [] if step is None else [f"step {step}" + (f"/{total_steps}" if total_steps else "")]
        sys.stdout.write("  ".join([*where, *(f"{name} {float(value):.5g}" for name, value in values.items())]) + "\n")
        sys.stdout.flush()


class Mirror:
    """A tracker that cannot harm: after its first failure it is left alone."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker | None = tracker
        self._started = False

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Begin or join a run; the id that was given, when that fails."""
        if self._tracker is None or self._started:
            return run_id
        try:
            found = self._tracker.start(name, project, config, run_id)
        except Exception as error:
            self._drop("begun", error)
            return run_id
        self._started = True
        return found

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Pass numbers on."""
        if self._tracker is not None and self._started:
            try:
                self._tracker.log(values, step)
            except Exception as error:
                self._drop("written to", error)

    def finish(self) -> None:
        """Have everything written out."""
        if self._tracker is not None and self._started:
            self._started = False
            try:
                self._tracker.finish()
            except Exception as error:
                self._drop("finished", error)

    def _drop(self, what: str, error: Exception) -> None:
        self._tracker = None
        sys.stderr.write(f"trainmaster: the tracker could not be {what} and is left alone from now on: {error!r}\n")


def tracker_for(kind: str, *, directory: Path | None = None) -> Mirror:
    """The tracker of a name: `none` or `trackio`, whose files lie in `directory` unless `TRACKIO_DIR` says otherwise.

    Raises:
        ValueError: there is none of that name.
    """
    if kind == NONE:
        return Mirror(NoTracker())
    if kind == TRACKIO:
        return Mirror(TrackioTracker(directory))
    raise ValueError(f"unknown tracker {kind!r}; there are: {', '.join(TRACKERS)}")
