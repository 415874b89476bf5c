"""Admission: the checks that need the outside, done once before a job is queued."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainmaster.core.errors import TrainmasterError
from trainmaster.core.job import Change, Job
from trainmaster.core.observations import admit, reject
from trainmaster.core.spec import SubmitJobRequest, load_stored
from trainmaster.core.workloads import WorkloadSpec, effective_workload
from trainmaster.core.workloads.script import ScriptSpec


class Admission:
    """Lets jobs in, or says why not."""

    def __init__(self, *, data_roots: Sequence[Path] = ()) -> None:
        self._data_roots = tuple(root.resolve() for root in data_roots or (Path.home(),))

    def at_once(self, job: Job, request: SubmitJobRequest) -> Change | None:
        """Queue a job that names nothing which has to be looked up; None when it has to wait for `decide`."""
        workload = effective_workload(request)
        if workload.working_directory is not None or self._server_script(workload) is not None:
            return None
        return admit(job, now=job.created_at)

    def decide(self, job: Job, *, now: float) -> Change | None:
        """Queue a job, or fail it with the reason."""
        try:
            problem = self._problem(job)
        except TrainmasterError as error:
            problem = error.message
        except (OSError, ValueError) as error:
            problem = f"what it names on the server cannot be looked at: {error}"
        return reject(job, now=now, message=problem) if problem else admit(job, now=now)

    def _problem(self, job: Job) -> str | None:
        workload = effective_workload(load_stored(job.spec_version, job.spec))
        if workload.working_directory is not None:
            problem = self._outside(workload.working_directory, "working directory")
            if problem:
                return problem
        script = self._server_script(workload)
        if script is None:
            return None
        if not script.is_absolute():
            return (
                f"script {script} is a relative path, and the server cannot know to what; "
                "name it absolutely, or make it the path of a script workload, which `trainmaster submit` ships"
            )
        return self._outside(str(script), "script") or (
            None if script.is_file() else f"there is no script {script} on the server; ship it, or check the path"
        )

    def _server_script(self, workload: WorkloadSpec) -> Path | None:
        """The script on the server that a workload names; None when it ships it, or is no script."""
        if not isinstance(workload, ScriptSpec) or workload.path in {file.path for file in workload.files}:
            return None
        return Path(workload.working_directory or "", workload.path)

    def _outside(self, path: str, what: str) -> str | None:
        resolved = Path(path).resolve()
        if any(resolved.is_relative_to(root) for root in self._data_roots):
            return None
        roots = ", ".join(map(str, self._data_roots))
        return (
            f"{what} {path} lies outside the directories that this server allows ({roots}); "
            "ship the files, or start the server with a --data-root that holds it"
        )
