"""Runs a job class: in the foreground for `trainmaster run`; inside a job as `python -m trainmaster.jobs.runner`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.jobs import ambient, report
from trainmaster.jobs.basic_job import BasicJob, UnknownJobClassError, completed_document, job_class, make_job
from trainmaster.jobs.checkpoint import CorruptCheckpointError, check_path
from trainmaster.jobs.checkpoint_reader import LATEST, InexactResumeError, find, pointed
from trainmaster.jobs.config_document import ConfigurationError, differences, overlaid, overridden, to_yaml
from trainmaster.jobs.lock import Lock, LockedError
from trainmaster.jobs.objects import AccessRefusedError, ObjectStoreError
from trainmaster.jobs.process import Process, call_on_first, connected, current_process
from trainmaster.jobs.restoreable_job import RestoreableJob, identity_and_configuration
from trainmaster.jobs.roots import Root, open_root
from trainmaster.jobs.spec import DEFAULT_GROUP, DEFAULT_PROJECT, Cluster, ExecutionSpec, HardwareRequest
from trainmaster.jobs.tracker import NONE, TrackerMissingError
from trainmaster.protocol import environment
from trainmaster.protocol.documents import from_json
from trainmaster.protocol.launch import RUN_FILE
from trainmaster.protocol.reasons import Reason


class RunError(Exception):
    """A job class cannot be run as requested; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A job class to run, and its identity."""

    target: str
    """`module:Class`, or a registered name."""
    name: str
    project: str = DEFAULT_PROJECT
    group: str = DEFAULT_GROUP
    module: str | None = None
    """Imported first, so that a registered name is known."""
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    """`key=value` settings over the configuration."""
    restore: str | None = None
    """Another run's checkpoint to start from, while this run has none of its own."""
    overlay: bool = False
    """Continue with another configuration than the checkpoint's."""
    elastic: bool = False
    """Continue from a checkpoint of another number of processes, without its random-number generators."""
    checkpoints: str | None = None
    """The root of its checkpoints if it is not the job's: `s3://bucket/prefix`."""
    tracker: str = NONE
    nodes: int = 1
    hardware: HardwareRequest | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    document: Mapping[str, Any]
    own: tuple[str, ...] = ()
    """Its own checkpoints to continue from: the first that is not corrupt."""
    other: str | None = None
    """Another run's checkpoint to start from, as it was named."""
    other_place: str | None = None
    """The place of that checkpoint: the newest save to its path."""
    notes: tuple[str, ...] = ()


def plan_run(cls: type[BasicJob[Any]], spec: ExecutionSpec, root: Root, request: RunRequest) -> RunPlan:
    """Decide how a class starts under this identity."""
    given = overridden(request.config, request.overrides)
    if not issubclass(cls, RestoreableJob):
        if request.restore is not None:
            raise RunError(f"{request.target} is no RestoreableJob: it cannot start from {request.restore}")
        return RunPlan(document=completed_document(cls, given))
    own, other = _starting_points(spec, root, request)
    if own:
        return _continue_run(cls, spec, root, request, own, other=other, given=given)
    document = completed_document(cls, given)
    if other is None:
        return RunPlan(document=document)
    try:
        # What the server chose is this very checkpoint, whatever was saved to its path since.
        place = find(root, other) if request.restore is not None or root.manifest(other) is None else other
    except FileNotFoundError:
        raise RunError(f"there is no checkpoint {other} below {root.uri}") from None
    return RunPlan(document=document, other=other, other_place=place, notes=(f"starts from {other}",))


def next_after(own: Sequence[str], error: CorruptCheckpointError) -> str:
    """The message that the first of some checkpoints is damaged and the second is used; RunError if there is none."""
    if len(own) == 1:
        raise RunError(f"{own[0]} is damaged, and there is none before it: {error}") from error
    return f"{own[0]} is damaged, and {own[1]} is used instead: {error}"


def _starting_points(spec: ExecutionSpec, root: Root, request: RunRequest) -> tuple[list[str], str | None]:
    """The run's own checkpoints that it may continue from, the newest first; and another's to start from."""
    own = []
    if (latest := pointed(root, spec.path, LATEST)) is not None:
        committed = root.committed(spec.path)
        own = committed[: committed.index(latest) + 1][::-1]
    chosen = _chosen_by_server(spec, root)
    if chosen in own:
        own = own[own.index(chosen) :]
    # A run never continues from a checkpoint of its own that was not registered, whoever names it.
    foreign = chosen if chosen and not chosen.startswith(f"{spec.path}/") else None
    return own, request.restore or foreign


def _chosen_by_server(spec: ExecutionSpec, root: Root) -> str | None:
    if not (path := os.environ.get(environment.RESUME_FROM)):
        return None
    if not path.startswith(f"{root.uri}/"):
        raise RunError(f"{path} is no checkpoint of a job class: {spec.path} cannot continue from it")
    return path.removeprefix(f"{root.uri}/")


def _continue_run(
    cls: type[BasicJob[Any]],
    spec: ExecutionSpec,
    root: Root,
    request: RunRequest,
    own: list[str],
    *,
    other: str | None,
    given: Mapping[str, Any],
) -> RunPlan:
    notes = []
    while True:
        try:
            started_from, before = _saved_configuration(cls, root, own[0])
            break
        except CorruptCheckpointError as error:
            notes.append(next_after(own, error))
            own = own[1:]
    if other not in (None, started_from):
        raise RunError(
            f"{spec.path} has checkpoints of its own and started from {started_from or 'nothing'}; "
            f"give another name to start from {other}"
        )
    manifest = root.manifest(own[0])
    where = f"{own[0]} (step {manifest.step})" if manifest is not None else own[0]
    document = completed_document(cls, overlaid(before, given) if request.overlay else given)
    changed = differences(before, document)
    if changed and not request.overlay:
        raise RunError(
            f"{where} has another configuration:\n  "
            + "\n  ".join(changed)
            + "\nset `overlay` (--overlay) to continue with the new one, or give another name to start a new run"
        )
    notes.append(f"continues from {where}")
    if changed:
        notes.append("continues with another configuration: " + "; ".join(changed))
    return RunPlan(document=document, own=tuple(own), notes=tuple(notes))


def _saved_configuration(cls: type[BasicJob[Any]], root: Root, place: str) -> tuple[str | None, dict[str, Any]]:
    """The checkpoint that a run started from, and its configuration, completed if it still fits the class."""
    saved, document = identity_and_configuration(root, place)
    if ambient.declares(cls):
        # Code may have added to it while it ran.
        document = ambient.known_part(document, ambient.defaults(ambient.declared(cls)))
    with contextlib.suppress(ConfigurationError):
        document = completed_document(cls, document)
    return saved.get("restored_from"), document


LOCK_WAIT_S = 10.0
"""For a run that is just ending; one that still works takes much longer."""

_PROBLEMS = (RunError, ObjectStoreError, AccessRefusedError)


def run(request: RunRequest, cluster: Cluster, *, shows_progress: bool = False) -> None:
    """Run a job class to its end, from its latest checkpoint; raises RunError, or the store's ObjectStoreError."""
    try:
        cls = job_class(request.target, module=request.module)
    except UnknownJobClassError as error:
        raise RunError(str(error)) from error
    with connected():
        process = current_process()
        spec, root = _place_run(request, cluster)
        with _locked(root, spec, process) as lock:
            plan = _agreed_plan(cls, spec, root, request, process)
            if process.index == 0:
                sys.stdout.write(f"# {spec.path}\n{to_yaml(plan.document)}")
                sys.stdout.flush()
                _notify(*plan.notes)
            try:
                job = _restored(cls, spec, plan, process, elastic=request.elastic)
            except ConfigurationError as error:
                raise RunError(str(error)) from error
            job.hold(lock)
            job.shows_progress = shows_progress
            if request.tracker != NONE:
                job.tracker = request.tracker
            try:
                job()
            except TrackerMissingError as error:
                raise RunError(str(error)) from error


def main() -> None:
    request = from_json(RunRequest, json.loads(Path(os.environ[environment.INPUTS_DIR], RUN_FILE).read_text()))
    cluster = Cluster(
        name="trainmaster",
        root=os.environ.get(environment.CACHE_DIR) or os.getcwd(),
        work=os.getcwd(),
        checkpoints=request.checkpoints or os.environ[environment.CHECKPOINT_DIR],
        results=os.environ[environment.OUTPUT_DIR],
    )
    try:
        run(request, cluster)
    except RunError as error:
        report.fail(Reason.BAD_INPUT, str(error))
    except AccessRefusedError as error:
        report.fail(Reason.CREDENTIALS_REFUSED, f"{error}; give the AWS_* variables in workload.environment")
    except ObjectStoreError as error:
        report.fail(Reason.STORAGE_UNAVAILABLE, str(error))


def _place_run(request: RunRequest, cluster: Cluster) -> tuple[ExecutionSpec, Root]:
    try:
        if request.restore is not None:
            check_path(request.restore)
        spec = ExecutionSpec.on(
            cluster,
            name=request.name,
            project=request.project,
            group=request.group,
            nodes=request.nodes,
            # Elsewhere, others may have set it who count other nodes.
            node=int(os.environ.get("NODE_RANK", "0")) if request.nodes > 1 else 0,
            requested=request.hardware,
        )
        return spec, open_root(cluster.checkpoints_uri)
    except (ImportError, ValueError) as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def _locked(root: Root, spec: ExecutionSpec, process: Process) -> Iterator[Lock | None]:
    """The lock on the identity, which process 0 holds for all."""
    held: list[Lock] = []
    with contextlib.ExitStack() as stack:

        def take() -> None:
            owner = os.environ.get(environment.ATTEMPT_ID) or f"process {os.getpid()}"
            try:
                held.append(stack.enter_context(root.lock(spec.path, owner, wait_s=LOCK_WAIT_S)))
            except LockedError as error:
                raise RunError(f"{spec.path} runs already: {error}") from error

        call_on_first(process, f"lock {spec.path}", take, errors=_PROBLEMS)
        yield held[0] if held else None


def _agreed_plan(
    cls: type[BasicJob[Any]], spec: ExecutionSpec, root: Root, request: RunRequest, process: Process
) -> RunPlan:
    def make() -> dict[str, Any]:
        try:
            return asdict(plan_run(cls, spec, root, request))
        except (ConfigurationError, CorruptCheckpointError) as error:
            raise RunError(str(error)) from error

    return from_json(RunPlan, call_on_first(process, f"plan {spec.path}", make, errors=_PROBLEMS))


def _restored(
    cls: type[BasicJob[Any]], spec: ExecutionSpec, plan: RunPlan, process: Process, *, elastic: bool
) -> BasicJob[Any]:
    if not issubclass(cls, RestoreableJob) or not (plan.own or plan.other_place):
        return make_job(cls, spec, plan.document)
    if plan.other_place is not None:
        job = make_job(cls, spec, plan.document)
        job.restored_from = plan.other
        try:
            job._restore_from_place(plan.other_place)
        except CorruptCheckpointError as error:
            raise RunError(f"{plan.other} is damaged: {error}") from error
        return job
    own = plan.own
    while True:
        try:
            return cls._from_place(own[0], spec, plan.document, True, elastic=elastic)[0]
        except InexactResumeError as error:
            raise RunError(
                f"{error}; use as many processes as before, or set `elastic` (--elastic) to continue with other random "
                "numbers"
            ) from error
        except CorruptCheckpointError as error:
            message = next_after(own, error)
            if process.index == 0:
                _notify(message)
            own = own[1:]


def _notify(*messages: str) -> None:
    for message in messages:
        sys.stderr.write(f"trainmaster: {message}\n")
        report.note(message)


if __name__ == "__main__":
    main()
