"""Mirrors metrics to an experiment tracker. If that fails, training continues: the server's metrics are the record."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

NONE = "none"
TRACKIO = "trackio"
WANDB = "wandb"
TRACKERS = (NONE, TRACKIO, WANDB)


class TrackerMissingError(ImportError):
    """The package of an experiment tracker is not installed."""


class TrackerRun(NamedTuple):
    id: str
    log: Callable[..., object]
    """Called with the values, and with `step`."""
    finish: Callable[[], object]
    """Writes everything out; a later start with the run's id continues it."""


def _start_trackio(
    directory: Path | None, name: str, project: str, config: Mapping[str, Any], run_id: str | None
) -> TrackerRun:
    """Start or continue a run of Trackio, without the network and without Trackio's own system metrics.

    Its files are in `TRACKIO_DIR`, else the given directory, else Trackio's own. Trackio finds a run by its name, so
    the id of a run is its name there, with a random part.
    """
    if directory is not None and "trackio" not in sys.modules:
        os.environ.setdefault("TRACKIO_DIR", str(directory))
    import trackio

    run_id = run_id or f"{name}-{secrets.token_hex(4)}"
    with contextlib.redirect_stdout(io.StringIO()):  # a rank's log is the user's
        run = trackio.init(
            project=project,
            name=run_id,
            resume="allow",
            config={key: value for key, value in config.items() if not key.startswith("_")},
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def finish() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            trackio.finish()  # type: ignore[no-untyped-call]

    return TrackerRun(run_id, run.log, finish)


def _start_wandb(
    directory: Path | None, group: str | None, name: str, project: str, config: Mapping[str, Any], run_id: str | None
) -> TrackerRun:
    """Start or continue a run of Weights & Biases, by its variables: online with credentials, else for `wandb sync`."""
    import wandb

    options: dict[str, Any] = {
        "project": project,
        "group": group,
        "name": name,
        "id": run_id or secrets.token_hex(4),
        "resume": "allow",
        "config": dict(config),
        # The log of a rank is the server's to keep.
        "settings": wandb.Settings(console="off", silent=True),
    }
    if directory is not None and "WANDB_DIR" not in os.environ:
        directory.mkdir(parents=True, exist_ok=True)
        options["dir"] = str(directory)
    try:
        run = wandb.init(**options)
    except wandb.errors.UsageError as error:
        sys.stderr.write(f"trainmaster: {error}; metrics go to an offline run below {options.get('dir', '.')}\n")
        run = wandb.init(**options, mode="offline")
    return TrackerRun(str(run.id), run.log, run.finish)


class Mirror:
    """A tracker whose first failure disables it; without a tracker it does nothing. Used by one rank of a job."""

    def __init__(self, start: Callable[[str, str, Mapping[str, Any], str | None], TrackerRun] | None) -> None:
        self._start = start
        self._run: TrackerRun | None = None

    def start(self, name: str, project: str, config: Mapping[str, Any], run_id: str | None = None) -> str | None:
        """Start a run, or continue the one with `run_id`; returns the run's id, or the given id if that fails."""
        if self._start is not None and self._run is None:
            with self._disabled_by_failure("started"):
                self._run = self._start(name, project, config, run_id)
                return self._run.id
        return run_id

    def log(self, values: Mapping[str, float], step: int | None = None) -> None:
        if self._run is not None:
            with self._disabled_by_failure("written to"):
                self._run.log(dict(values), step=step)

    def finish(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            with self._disabled_by_failure("finished"):
                run.finish()

    @contextlib.contextmanager
    def _disabled_by_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._start = self._run = None
            sys.stderr.write(f"trainmaster: the tracker could not be {what} and is disabled from now on: {error!r}\n")


def tracker_for(kind: str, *, directory: Path | None = None, group: str | None = None) -> Mirror:
    """The tracker `none`, `trackio` or `wandb`. Its files go to `directory`, unless its own variables name one."""
    if kind not in TRACKERS:
        raise ValueError(f"unknown tracker {kind!r}; there are: {', '.join(TRACKERS)}")
    if kind == NONE:
        return Mirror(None)
    if importlib.util.find_spec(kind) is None:
        raise TrackerMissingError(f"the tracker {kind} needs one more package: pip install 'trainmaster[{kind}]'")
    if kind == TRACKIO:
        return Mirror(functools.partial(_start_trackio, directory))
    return Mirror(functools.partial(_start_wandb, directory, group))


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
