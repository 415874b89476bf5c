"""Reports of this process to the server, and requests of the server: `from trainmaster.jobs import report`.

    start = verify(path).step if (path := report.resume_path()) else 0
    for step in range(start + 1, total + 1):
        loss = train_one_step()
        report.metrics(step=step, loss=loss)
        stop = report.stop_requested()
        if report.save_requested() or (stop and stop.save) or step % 100 == 0:
            with report.checkpoint(step=step, metrics={"loss": loss}) as directory:
                save(directory)
        if stop:
            report.exit_stopped()
    report.finished()

Outside a job the same code runs: reports go nowhere and checkpoints are in `./checkpoints`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat, SupportsInt

from trainmaster.jobs.attempt import ControlReader, RecordStream, Stop, require_ownership
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.roots import Root, commit_beside, open_checkpoint, open_root
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import EXIT_STOPPED, REPORTABLE_REASONS, Phase, Reason, StopCause

MAX_NOTE = 10_000
MAX_METRIC_NAME = 200
MAX_CHECKPOINT_METRICS = 200
"""The server ignores a report of more than 1 MiB, and must never ignore a checkpoint."""

_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Reporter:
    """Reports of one rank, thread-safe. A report that cannot be written is dropped, with one warning on stderr.

    Each rank reports into its own streams; one rank, usually rank 0, should announce phases and commit checkpoints.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._events = RecordStream(environ.get(environment.EVENTS_FILE))
        self._metrics = RecordStream(environ.get(environment.METRICS_FILE))
        self._control = ControlReader(environ.get(environment.CONTROL_FILE))
        self._phase = Phase.TRAINING
        self._shown = Phase.TRAINING
        self._saves = 0
        self._last_size = 0
        self._resume_path: Path | None = None
        self._save_announced = False
        self._terminated = False
        self._warned = False
        self._not_finite: set[str] = set()
        self._lock = threading.RLock()

    def progress(
        self, step: SupportsInt, *, total_steps: SupportsInt | None = None, epoch: SupportsFloat | None = None
    ) -> None:
        """Report the current step, and of how many."""
        self.metrics(step=step, epoch=epoch, total_steps=total_steps)

    def metrics(
        self,
        values: Mapping[str, SupportsFloat] | None = None,
        *,
        step: SupportsInt | None = None,
        epoch: SupportsFloat | None = None,
        total_steps: SupportsInt | None = None,
        **more: SupportsFloat,
    ) -> None:
        """Report metrics and progress: `metrics({"loss": 0.1}, step=3)` or `metrics(loss=0.1, step=3)`.

        Values that are no numbers are left out. The first NaN or infinity of each name becomes a note instead.
        """
        position, finite = _position(step, epoch, total_steps), self._finite({**(values or {}), **more}, step)
        if position or finite:
            self._write(self._metrics, {**position, "values": finite})

    def phase(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Announce what the rank does from now on, a value of `Phase`; as a context manager, only for the block."""
        with self._lock:
            before, self._phase = self._phase, Phase(phase)
            self._show_phase(again=True)
        return self._return_to(before, Phase(phase))

    @contextlib.contextmanager
    def _return_to(self, before: Phase, phase: Phase) -> Iterator[None]:
        try:
            yield
        finally:
            # Nothing comes after an export but the end.
            if phase is not Phase.EXPORTING:
                self.phase(before)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Show the phase CHECKPOINTING during a save in the background, while the rank's own phase is TRAINING."""
        with self._lock:
            self._saves += 1
            self._show_phase()
        try:
            yield
        finally:
            with self._lock:
                self._saves -= 1
                self._show_phase()

    def note(self, message: str) -> None:
        """Add a note to the job's events; a very long one is cut."""
        self._write_event({"type": "note", "message": str(message)[:MAX_NOTE]})

    def doing(self, message: str) -> None:
        """Set the status message of a job that is still preparing."""
        self._write_event({"type": "doing", "message": str(message)[:MAX_NOTE]})

    def finished(self) -> None:
        """Report that the work is complete: exit code 0 is then a success, even if a stop was requested."""
        self._write_event({"type": "finished"})

    def fail(self, reason: str, message: str) -> NoReturn:
        """Exit with a reason: BAD_INPUT, CREDENTIALS_REFUSED, STORAGE_UNAVAILABLE or OUT_OF_MEMORY; the last two may be
        retried."""
        if reason not in REPORTABLE_REASONS:
            raise ValueError(f"{reason!r} is not among {', '.join(sorted(REPORTABLE_REASONS))}")
        self._write_event({"type": "failed", "reason": Reason(reason), "message": str(message)[:MAX_NOTE]})
        raise SystemExit(f"{reason}: {message}")

    def stop_requested(self) -> Stop | None:
        """The requested stop, if any. Cheap enough for every step.

        The first call also tells the server that this job saves and exits by itself on request.
        """
        with self._lock:
            self._announce_save()
            if (stop := self._control.stop()) is not None or not self._terminated:
                return stop
            return Stop(cause=StopCause.ENGINE, save=True, deadline=math.inf)

    def save_requested(self) -> bool:
        """Whether a checkpoint was requested while training continues; true once per request."""
        with self._lock:
            self._announce_save()
            return self._control.take_save()

    def exit_stopped(self) -> NoReturn:
        """Exit with the code of an obeyed stop."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):
                stream.flush()
        raise SystemExit(EXIT_STOPPED)

    @contextlib.contextmanager
    def checkpoint(
        self,
        *,
        step: SupportsInt,
        epoch: SupportsFloat | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        name: str | None = None,
    ) -> Iterator[Path]:
        """Write a checkpoint: `with report.checkpoint(step=10) as directory:` and save plain files below `directory`.

        At the end of the block all files are flushed, listed in a manifest and renamed to the final name, which never
        replaces an older checkpoint, and reported to the server. An exception in the block removes the files. Call it
        on one rank only, usually rank 0. Raises NotOwnerError if another attempt owns the job; nothing is committed.
        """
        at = int(step)
        name = name if name is not None else f"checkpoint-{at}"
        if not _CHECKPOINT_NAME.fullmatch(name):
            raise ValueError(f"a checkpoint's name is made of letters, digits, dots and dashes: {name!r}")
        manifest = self.new_manifest(step=at, epoch=epoch, metrics=metrics)
        root = self.checkpoint_root()
        began = time.monotonic()
        with (
            self.phase(Phase.CHECKPOINTING),
            root.draft(
                name, job_id=manifest.job_id, attempt=manifest.attempt, expected_bytes=self._last_size
            ) as directory,
        ):
            yield directory
            rel_path, manifest = commit_beside(root, directory, name, manifest, check_owner=self.require_ownership)
            self.committed(manifest, root.locate(rel_path), took_s=time.monotonic() - began)

    def new_manifest(
        self,
        *,
        step: SupportsInt,
        epoch: SupportsFloat | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
    ) -> Manifest:
        job_id, attempt, at = self.job_id() or "local", self.attempt(), int(step)
        return Manifest(
            checkpoint_id=f"{job_id}-{attempt}-{at}-{os.urandom(3).hex()}",
            job_id=job_id,
            attempt=attempt,
            step=at,
            epoch=_finite_epoch(epoch),
            metrics=dict(itertools.islice(self._finite(metrics or {}, step).items(), MAX_CHECKPOINT_METRICS)),
            world_size=int(self._environ.get("WORLD_SIZE", "1")),
            created_at=time.time(),
        )

    def committed(self, manifest: Manifest, where: str, *, took_s: float, is_best: bool = False) -> None:
        """Tell the server of a checkpoint that was committed at an absolute path or URI.

        Unlike other reports this one is not dropped on failure, but raises OSError: an attempt that relies on a
        checkpoint that the server does not know would lose more than this step.
        """
        self._last_size = manifest.size_bytes
        event: dict[str, Any] = {
            "type": "checkpoint",
            "checkpoint_id": manifest.checkpoint_id,
            "step": manifest.step,
            "epoch": manifest.epoch,
            "metrics": dict(manifest.metrics),
            "path": where,
            "size_bytes": manifest.size_bytes,
            "duration_s": round(took_s, 3),
        }
        if manifest.name:
            event |= {"kind": manifest.kind, "name": manifest.name, "attributes": dict(manifest.attributes)}
        if is_best:
            event["is_best"] = True
        with self._lock:
            self._events.append(event, sync=True)

    def require_ownership(self) -> None:
        """Raise NotOwnerError if another attempt owns the job; called before every commit."""
        require_ownership(self._environ)

    def checkpoint_root(self) -> Root:
        return open_root(self._environ.get(environment.CHECKPOINT_DIR) or "checkpoints")

    def resume_from(self) -> str | None:
        """The absolute path or URI of the committed checkpoint to continue from; None on a fresh start."""
        return self._environ.get(environment.RESUME_FROM) or None

    def resume_path(self) -> Path | None:
        """The committed checkpoint to continue from, downloaded if need be, as a directory; None on a fresh start."""
        with self._lock:
            if (where := self.resume_from()) is None:
                return None
            if self._resume_path is None:
                root, rel_path = open_checkpoint(where)
                if root.is_directory:
                    return Path(where)
                kept = contextlib.ExitStack()
                self._resume_path = kept.enter_context(root.fetch(rel_path))
                atexit.register(kept.close)
            return self._resume_path

    def output_dir(self) -> Path:
        """The existing directory for results."""
        path = Path(self._environ.get(environment.OUTPUT_DIR) or "output").absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path

    def job_id(self) -> str | None:
        """The id of the job that this process belongs to; None outside a job."""
        return self._environ.get(environment.JOB_ID)

    def attempt(self) -> int:
        """The number of the attempt; 0 outside a job."""
        return int(self._environ.get(environment.ATTEMPT, "0"))

    def rank(self) -> int:
        """The rank of this process; 0 outside a job."""
        return int(self._environ.get("RANK", "0"))

    def offer_stacks(self) -> None:
        """Inside a job: print all threads' stacks to stderr on SIGUSR1, and tell the worker that it may send it."""
        if environment.EVENTS_FILE not in self._environ or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
            self._write_event({"type": "capable", "stacks": True})

    def offer_stop(self) -> None:
        """On a cluster whose engine may send SIGTERM: take it for a request to stop, if this process asks for those."""
        if environment.ENGINE_STOPS not in self._environ or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True
        if not self._save_announced:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def renew_lock(self) -> None:
        """For a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def _show_phase(self, *, again: bool = False) -> None:
        shown = Phase.CHECKPOINTING if self._saves and self._phase is Phase.TRAINING else self._phase
        if again or shown is not self._shown:
            self._shown = shown
            self._write_event({"type": "phase", "phase": shown})

    def _announce_save(self) -> None:
        if not self._save_announced:
            self._save_announced = True
            self._write_event({"type": "capable", "save": True})

    def _write_event(self, event: Mapping[str, Any]) -> None:
        self._write(self._events, event)

    def _write(self, journal: RecordStream, record: Mapping[str, Any]) -> None:
        try:
            with self._lock:
                journal.append(record)
        except OSError as error:
            self._warn(f"a report was dropped, and others may be: {error}")

    def _finite(self, values: Mapping[str, SupportsFloat], step: SupportsInt | None) -> dict[str, float]:
        finite = {}
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                self._warn(f"metric {name!r} is left out, and others may be: {type(value).__name__} is no number")
                continue
            if math.isfinite(number):
                finite[str(name)[:MAX_METRIC_NAME]] = number
            elif name not in self._not_finite:
                self._not_finite.add(name)
                self.note(f"{name} is {number}" + ("" if step is None else f" at step {int(step)}"))
        return finite

    def _warn(self, message: str) -> None:
        if self._warned:
            return
        self._warned = True
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(f"trainmaster: {message}\n")


def _position(
    step: SupportsInt | None, epoch: SupportsFloat | None, total_steps: SupportsInt | None
) -> dict[str, float]:
    position = {
        "step": None if step is None else int(step),
        "epoch": _finite_epoch(epoch),
        "total_steps": None if total_steps is None else int(total_steps),
    }
    return {name: value for name, value in position.items() if value is not None}


def _finite_epoch(epoch: SupportsFloat | None) -> float | None:
    """None if an epoch is not finite: JSON cannot hold it, and no checkpoint may be lost over it."""
    return None if epoch is None or not math.isfinite(number := float(epoch)) else number


reporter = Reporter(os.environ)
"""The reporter of this process, whose methods are the functions of this module."""
reporter.offer_stacks()
reporter.offer_stop()
os.register_at_fork(after_in_child=reporter.renew_lock)

checkpoint = reporter.checkpoint
doing = reporter.doing
exit_stopped = reporter.exit_stopped
fail = reporter.fail
finished = reporter.finished
job_id = reporter.job_id
metrics = reporter.metrics
note = reporter.note
output_dir = reporter.output_dir
phase = reporter.phase
progress = reporter.progress
rank = reporter.rank
resume_from = reporter.resume_from
resume_path = reporter.resume_path
save_requested = reporter.save_requested
stop_requested = reporter.stop_requested
