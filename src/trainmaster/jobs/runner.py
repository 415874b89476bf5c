"""Runs a job class: in the foreground for `trainmaster run`, and as `python -m trainmaster.jobs.runner` inside a job.

The same class under the same identity goes on where it was. Process 0 looks and decides, and tells the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainmaster.jobs import report
from trainmaster.jobs.basic_job import BasicJob, UnknownJobClassError, job_class, make_job
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.checkpoint_reader import InexactResumeError
from trainmaster.jobs.config_document import ConfigurationError, to_yaml
from trainmaster.jobs.hardware import Cluster
from trainmaster.jobs.lock import Lock, LockedError
from trainmaster.jobs.objects import AccessRefusedError, ObjectStoreError
from trainmaster.jobs.process import Process, connected, current_process
from trainmaster.jobs.restoreable_job import RestoreableJob
from trainmaster.jobs.roots import Root, checked, open_root
from trainmaster.jobs.run_plan import Plan, RunError, RunRequest, next_after, plan_run
from trainmaster.jobs.spec import ExecutionSpec
from trainmaster.jobs.tracker import NONE, TrackerMissingError
from trainmaster.protocol import environment
from trainmaster.protocol.launch import RUN_FILE
from trainmaster.protocol.reasons import Reason

LOCK_WAIT_S = 10.0
"""For somebody who is just leaving; whoever still works does so for much longer."""

_PROBLEMS = {kind.__name__: kind for kind in (RunError, ObjectStoreError, AccessRefusedError)}


def run(request: RunRequest, cluster: Cluster, *, shows_progress: bool = False) -> None:
    """Run a job class until it is through, from its latest checkpoint if it has one.

    Args:
        request: what to run, and as whom.
        cluster: where its files lie.
        shows_progress: print a line about it every now and then.

    Raises:
        RunError: it cannot be run like this.
        ObjectStoreError: its checkpoints lie on a store that cannot be reached, or refuses.
        SystemExit: it was asked to stop, and has.
    """
    try:
        cls = job_class(request.target, module=request.module)
    except UnknownJobClassError as error:
        raise RunError(str(error)) from error
    with connected():
        process = current_process()
        spec, root = _spec(request, cluster), _root(cluster)
        with _locked(root, spec, process) as lock:
            plan = _agreed_plan(cls, spec, root, request, process)
            if process.index == 0:
                sys.stdout.write(f"# {spec.path}\n{to_yaml(plan.document)}")
                sys.stdout.flush()
                _tell(*plan.notes)
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
    """What runs inside a job of kind `job_class`."""
    request = RunRequest.from_json(json.loads(Path(os.environ[environment.INPUTS_DIR], RUN_FILE).read_text()))
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


def _spec(request: RunRequest, cluster: Cluster) -> ExecutionSpec:
    try:
        if request.restore is not None:
            checked(request.restore)
        return ExecutionSpec.on(
            cluster,
            name=request.name,
            project=request.project,
            group=request.group,
            nodes=request.nodes,
            # Elsewhere, others may have set it who count other nodes.
            node=int(os.environ.get("NODE_RANK", "0")) if request.nodes > 1 else 0,
            requested=request.hardware,
        )
    except ValueError as error:
        raise RunError(str(error)) from error


def _root(cluster: Cluster) -> Root:
    try:
        return open_root(cluster.checkpoints_uri)
    except (ImportError, ValueError) as error:
        raise RunError(str(error)) from error


@contextlib.contextmanager
def _locked(root: Root, spec: ExecutionSpec, process: Process) -> Iterator[Lock | None]:
    """The identity's lock, held by process 0 for all."""
    held: list[Lock] = []
    with contextlib.ExitStack() as stack:

        def take() -> None:
            owner = os.environ.get(environment.ATTEMPT_ID) or f"process {os.getpid()}"
            try:
                held.append(stack.enter_context(root.lock(spec.path, owner, wait_s=LOCK_WAIT_S)))
            except LockedError as error:
                raise RunError(f"{spec.path} runs already: {error}") from error

        _on_first(process, f"{spec.path}:lock", take)
        yield held[0] if held else None


def _agreed_plan(
    cls: type[BasicJob[Any]], spec: ExecutionSpec, root: Root, request: RunRequest, process: Process
) -> Plan:
    """The plan that process 0 makes, on all of them."""

    def make() -> dict[str, Any]:
        try:
            return asdict(plan_run(cls, spec, root, request))
        except (ConfigurationError, CorruptCheckpointError) as error:
            raise RunError(str(error)) from error

    told = _on_first(process, f"{spec.path}:plan", make)
    return Plan(**{**told, "own": tuple(told["own"]), "notes": tuple(told["notes"])})


def _on_first(process: Process, name: str, work: Callable[[], Any]) -> Any:
    """What process 0 finds, as JSON, on all of them; what stops it there, stops all, for the same reason."""
    said: dict[str, Any] = {}
    problem: Exception | None = None
    if process.index == 0:
        try:
            said = {"found": work()}
        except tuple(_PROBLEMS.values()) as error:
            problem, said = error, {"problem": type(error).__name__, "message": str(error)}
    said = process.broadcast(said, name)
    if "problem" in said:
        raise problem if problem is not None else _PROBLEMS[said["problem"]](said["message"])
    return said["found"]


def _restored(
    cls: type[BasicJob[Any]], spec: ExecutionSpec, plan: Plan, process: Process, *, elastic: bool
) -> BasicJob[Any]:
    """The job as the plan says."""
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
                f"{error}; run as many as before, or set `elastic` (--elastic) to go on with other random numbers"
            ) from error
        except CorruptCheckpointError as error:
            said = next_after(own, error)
            if process.index == 0:
                _tell(said)
            own = own[1:]


def _tell(*messages: str) -> None:
    for message in messages:
        sys.stderr.write(f"trainmaster: {message}\n")
        report.note(message)


if __name__ == "__main__":
    main()
