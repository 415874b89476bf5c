"""The jobs of a server and their logs, by name, in the types of TrainerClient."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from trainmaster import client as api
from trainmaster.client import Client
from trainmaster.client.event_stream import OpenLineStates
from trainmaster.client.types import TERMINAL, Job
from trainmaster.trainer.errors import NotFoundError, translated
from trainmaster.trainer.foreign_jobs import ForeignJobs, foreign_train_job, refusal
from trainmaster.trainer.foreign_jobs import failure as foreign_failure
from trainmaster.trainer.job_document import RUNTIME_LABEL, successors
from trainmaster.trainer.job_view import event, failure, log_filter, name_of, preparing_steps, train_job
from trainmaster.trainer.runtimes import RuntimeCatalog
from trainmaster.trainer.types import Event, Listing, Runtime, TrainJob

LAST_LINES = 20
"""Of a job's log, in the error of one that failed."""
EVENTS_PER_PAGE = 1000
RESULT_FILE = "result.json"
"""In the output of a job: what its function returned."""
DELETE_PATIENCE_S = 120.0
"""Longer than a job is given to stop by default."""
DELETE_POLL_S = 0.05
_IMPOSSIBLE = "IMPOSSIBLE"
_CONFLICT, _HANDLE_TAKEN = "CONFLICT", "HANDLE_TAKEN"
_log = logging.getLogger(__name__)


class Jobs:
    """What a server says of jobs, and of those that others made on a cluster. Errors are those that `translated`
    promises."""

    def __init__(self, client: api.Client, catalog: RuntimeCatalog, foreign: ForeignJobs) -> None:
        self._client = client
        self._catalog = catalog
        self._foreign = foreign
        self._runtimes: Mapping[str, Runtime] | None = None

    def shown(self, name: str) -> TrainJob:
        """A job, or a TrainJob of others that has the name."""
        with translated(name):
            try:
                job = self._client.get(named(name))
            except api.NotFoundError:
                if (foreign := self._foreign.get(name)) is None:
                    raise
                return foreign_train_job(foreign, self._known_runtimes())
            return train_job(job, self._known_runtimes(), current_step=self._current_step(job))

    def list(self, runtime: str | None) -> Listing[TrainJob]:
        labels = None if runtime is None else {RUNTIME_LABEL: runtime}
        with translated():
            known = self._known_runtimes()
            jobs = [train_job(job, known) for job in self._client.list(labels=labels)]
            others = [foreign_train_job(each, known) for each in self._foreign.list()]
        others = [each for each in others if runtime in (None, each.runtime.name)]
        if others:
            jobs = sorted([*jobs, *others], key=lambda job: job.creation_timestamp, reverse=True)
        return Listing(jobs)

    def log(
        self, name: str, step: str, *, follow: bool, tail: int | None, since: datetime | str | None
    ) -> Iterator[str]:
        """The lines of a step. Raises ValueError, at once, for a step that the job does not have."""
        try:
            job = self._get(name)
        except NotFoundError:
            with translated():
                if self._foreign.get(name) is None:
                    raise
            if since is not None:
                raise ValueError(
                    f"{name} is a TrainJob of others: `tail` works for its log, and `since` does not"
                ) from None
            return self._foreign.lines(name, step, follow=follow, tail=checked_tail(tail))
        chosen = log_filter(job, step)
        if chosen is None:
            steps = ", ".join(each.name for each in self.shown(name).steps)
            raise ValueError(f"job {name} has no step {step!r}; its steps are {steps}")
        return log_lines(self._client, name, chosen, follow=follow, tail=tail, since=since)

    def forget_runtimes(self) -> None:
        self._runtimes = None

    def events(self, name: str) -> Listing[Event]:
        found: Listing[Event] = Listing()
        after: int | None = None
        with self._own(name):
            while True:
                page = self._client.events(named(name), after=after, limit=EVENTS_PER_PAGE)
                found += [event(each, name) for each in page["events"]]
                if len(page["events"]) < EVENTS_PER_PAGE:
                    return found
                after = page["next_cursor"]

    def result(self, name: str) -> Any:
        with self._own(name):
            job = self._get(name)
        if job["status"] != "COMPLETED":
            if job["status"] in TERMINAL:
                raise self._failure(job)
            raise RuntimeError(f"job {name} has no result yet: it is {job['status']}")
        with translated(name), tempfile.TemporaryDirectory() as directory:
            self._client.results.download(job["job_id"], directory, patterns=[RESULT_FILE])
            result = Path(directory, RESULT_FILE)
            if result.exists():
                return json.loads(result.read_text("utf-8"))
        if job["kind"] == "function":
            raise RuntimeError(
                f"job {name} has no result: its function did not return, as after sys.exit(), or JSON cannot hold what "
                "it returned, and then its log says so"
            )
        return None

    def warn(self, name: str) -> None:
        """Tell of a job that no node can ever run, where the server knows that at once."""
        with contextlib.suppress(api.ClientError):
            pending = self._client.get(name)["pending"]
            if pending is not None and pending["code"] == _IMPOSSIBLE:
                _log.warning("job %s %s; it waits until that changes", name, pending["message"])

    def suspend(self, name: str, *, save_checkpoint: bool) -> None:
        with self._own(name):
            try:
                self._client.pause(named(name), save_checkpoint=save_checkpoint)
            except api.ConflictError as error:
                if error.code != _CONFLICT or not save_checkpoint or self._client.get(name)["can_save"]:
                    raise
                raise RuntimeError(
                    f"job {name} has not shown that it can save; suspend_job({name!r}, save_checkpoint=False) stops it "
                    "as it is, and it resumes from its last checkpoint, or restarts"
                ) from error

    def resume(self, name: str) -> None:
        with self._own(name):
            self._client.resume(named(name))

    def cancel(self, name: str) -> None:
        with self._own(name):
            self._client.cancel(named(name))

    def retry(self, name: str) -> str:
        with self._own(name):
            job = self._get(name)
            for handle in successors(job["handle"], is_retry=job["parent_job_id"] is not None):
                try:
                    return name_of(self._client.retry(job["job_id"], handle=handle))
                except api.ConflictError as error:
                    if handle is None or error.code != _HANDLE_TAKEN:
                        raise
        raise AssertionError("there is always a next name")

    def delete(self, name: str) -> None:
        with self._own(name):
            job_id = self._client.delete(named(name))["job_id"]
            deadline = time.monotonic() + DELETE_PATIENCE_S
            while time.monotonic() < deadline:
                try:
                    self._client.get(job_id)
                except api.NotFoundError:
                    return
                time.sleep(DELETE_POLL_S)
        raise TimeoutError(f"job {name} has not stopped after {DELETE_PATIENCE_S:g} s; it goes when it has")

    def failure(self, shown: TrainJob) -> RuntimeError:
        """Of one that has failed."""
        try:
            return self._failure(self._get(shown.name))
        except NotFoundError:
            return foreign_failure(shown)

    def _get(self, name: str) -> Job:
        with translated(name):
            return self._client.get(named(name))

    @contextlib.contextmanager
    def _own(self, name: str) -> Iterator[None]:
        """For what works on jobs of this server alone."""
        try:
            with translated(name):
                yield
        except NotFoundError:
            with translated(name):
                if self._foreign.get(name) is not None:
                    raise refusal(name) from None
            raise

    def _failure(self, job: Job) -> RuntimeError:
        lines: list[str] = []
        with contextlib.suppress(api.ClientError):
            lines = [line["message"] for line in self._client.logs(job["job_id"], tail=LAST_LINES)["lines"]]
        return RuntimeError(failure(job, lines))

    def _known_runtimes(self) -> Mapping[str, Runtime]:
        """Those of the last look; jobs are shown more often than runtimes change."""
        if self._runtimes is None:
            try:
                self._runtimes = {runtime.name: runtime for runtime in self._catalog.list()}
            except api.UnavailableError as error:
                _log.warning("jobs are shown without their runtimes: %s", error)
                return {}
        return self._runtimes

    def _current_step(self, job: Job) -> str | None:
        if job["status"] != "PREPARING" or len(preparing_steps(job)) < 2:
            return None
        lines = self._client.logs(job["job_id"], tail=1)["lines"]
        return lines[-1]["step"] if lines else None


def named(name: object) -> str:
    """Check that a job's name is not empty: the URL without it is that of the list."""
    if not isinstance(name, str) or not name:
        raise NotFoundError("job", str(name))
    return name


LONGEST_TAIL = 10_000
"""The server begins no further back by itself; with more, the log is read from its beginning."""


def log_lines(
    client: Client,
    job: str,
    chosen: Mapping[str, Any],
    *,
    follow: bool,
    tail: int | None,
    since: datetime | str | None,
) -> Iterator[str]:
    """The lines that a filter of the server's chooses. Raises ValueError, at once, if `tail` or `since` is wrong."""
    return _lines(client, job, chosen, checked_tail(tail), _moment(since), follow=follow)


def checked_tail(tail: int | None) -> int | None:
    if tail is not None and (isinstance(tail, bool) or not isinstance(tail, int) or tail < 0):
        raise ValueError(f"tail must be a number of lines, not {tail!r}")
    return tail


def _lines(
    client: Client, job: str, chosen: Mapping[str, Any], tail: int | None, since: str | None, *, follow: bool
) -> Iterator[str]:
    cursor = None
    last: deque[str] | None = None
    if tail is not None and (since is not None or tail > LONGEST_TAIL):
        last, tail = deque(maxlen=tail), None  # the server cannot cut these
    with translated(job):
        for part in client.log_texts(job, **chosen, tail=tail, since=since):
            if last is None:
                yield from part.lines()
            else:
                last.extend(part.lines())
            cursor = part.cursor
        yield from last or ()
        if follow:
            with contextlib.closing(client.follow_logs(job, **chosen, cursor=cursor)) as following:
                shown = OpenLineStates()
                yield from (line["message"] for line in following if shown.is_new(line))


def _moment(since: datetime | str | None) -> str | None:
    if since is None:
        return None
    try:
        moment = datetime.fromisoformat(since) if isinstance(since, str) else since
        return moment.astimezone().isoformat()  # one without a time zone is of the local one
    except (AttributeError, ValueError):
        raise ValueError(f"since must be a datetime, or a time such as 2026-01-31T12:00:00Z, not {since!r}") from None
