"""Mirrors metrics to an experiment tracker.

The server's metrics are the record; a mirror is a convenience. So a tracker that fails is dropped with a warning, and
training goes on.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
WANDB = "wandb"
TRACKERS = (NONE, TRACKIO, WANDB)


class TrackerMissingError(ImportError):
    """The package of an experiment tracker is not installed."""


class Tracker(Protocol):
    """An experiment tracker, used by one rank of a job."""

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Start a run, or continue the one with `run_id`; returns the run's id, None if there is none."""

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        pass

    def finish(self) -> None:
        """Write everything out; a later `start` with the run's id continues it."""


class TrackioTracker:
    """Trackio, in `TRACKIO_DIR`, else the given directory, else Trackio's own.

    Trackio finds a run by its name, so the id of a run is its name there, with a random part.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._run: Any = None

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Start or continue a run, without the network and without Trackio's own system metrics."""
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
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # type: ignore[no-untyped-call]


class WandbTracker:
    """Weights & Biases: online with credentials, else offline in a local directory, for `wandb sync`.

    Its own variables apply: `WANDB_MODE`, `WANDB_API_KEY`, `WANDB_DIR`, `WANDB_BASE_URL`.
    """

    def __init__(self, directory: Path | None = None, group: str | None = None) -> None:
        self._directory = directory
        self._group = group
        self._run: Any = None

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        import wandb

        options: dict[str, Any] = {
            "project": project,
            "group": self._group,
            "name": name,
            "id": run_id or secrets.token_hex(4),
            "resume": "allow",
            "config": dict(config),
            # The log of a rank is the server's to keep.
            "settings": wandb.Settings(console="off", silent=True),
        }
        if self._directory is not None and "WANDB_DIR" not in os.environ:
            self._directory.mkdir(parents=True, exist_ok=True)
            options["dir"] = str(self._directory)
        try:
            self._run = wandb.init(**options)
        except wandb.errors.UsageError as error:
            sys.stderr.write(f"trainmaster: {error}; metrics go to an offline run below {options.get('dir', '.')}\n")
            self._run = wandb.init(**options, mode="offline")
        return str(self._run.id)

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()


class ProgressLines:
    """Prints metrics for a person to watch: the first ones at once, then one line a second."""

    EVERY_S = 1.0

    def __init__(self) -> None:
        self._due = 0.0

    def show(self, values: Mapping[str, float], step: int | None, total_steps: int | None) -> None:
        if time.monotonic() < self._due and (step is None or step != total_steps):
            return
        self._due = time.monotonic() + self.EVERY_S
        where = [] if step is None else [f"step {step}" + (f"/{total_steps}" if total_steps else "")]
        sys.stdout.write("  ".join([*where, *(f"{name} {float(value):.5g}" for name, value in values.items())]) + "\n")
        sys.stdout.flush()


class Mirror:
    """A tracker whose first failure disables it; without a tracker it does nothing."""

    def __init__(self, tracker: Tracker | None) -> None:
        self._tracker = tracker
        self._started = False

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Start or continue a run; if that fails, returns the given id."""
        if self._tracker is None or self._started:
            return run_id
        try:
            found = self._tracker.start(name, project, config, run_id)
        except Exception as error:
            self._drop("started", error)
            return run_id
        self._started = True
        return found

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        if self._tracker is not None and self._started:
            try:
                self._tracker.log(values, step)
            except Exception as error:
                self._drop("written to", error)

    def finish(self) -> None:
        if self._tracker is not None and self._started:
            self._started = False
            try:
                self._tracker.finish()
            except Exception as error:
                self._drop("finished", error)

    def _drop(self, what: str, error: Exception) -> None:
        self._tracker = None
        sys.stderr.write(f"trainmaster: the tracker could not be {what} and is disabled from now on: {error!r}\n")


def tracker_for(kind: str, *, directory: Path | None = None, group: str | None = None) -> Mirror:
    """The tracker `none`, `trackio` or `wandb`.

    Args:
        kind: its name.
        directory: for its files, unless its own variables name one.
        group: the group of its runs.

    Raises:
        ValueError: there is no such tracker.
        TrackerMissingError: its package is not installed.
    """
    if kind not in TRACKERS:
        raise ValueError(f"unknown tracker {kind!r}; there are: {', '.join(TRACKERS)}")
    if kind == NONE:
        return Mirror(None)
    if importlib.util.find_spec(kind) is None:
        raise TrackerMissingError(f"the tracker {kind} needs one more package: pip install 'trainmaster[{kind}]'")
    return Mirror(TrackioTracker(directory) if kind == TRACKIO else WandbTracker(directory, group))
