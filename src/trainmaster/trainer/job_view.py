"""A job of the server as the user of `TrainerClient` sees it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from trainmaster.client import types as api
from trainmaster.trainer import types
from trainmaster.trainer.constants import (
    DATASET_INITIALIZER,
    MODEL_INITIALIZER,
    NODE,
    TRAINJOB_COMPLETE,
    TRAINJOB_CREATED,
    TRAINJOB_FAILED,
    TRAINJOB_KIND,
    TRAINJOB_RUNNING,
    UNKNOWN,
)
from trainmaster.trainer.job_document import FRAMEWORK_LABEL, RUNTIME_LABEL

STATUSES: Mapping[str, str] = {
    **dict.fromkeys(("PENDING", "QUEUED", "SCHEDULING", "PREPARING", "PAUSED"), TRAINJOB_CREATED),
    **dict.fromkeys(("TRAINING", "CHECKPOINTING", "EVALUATING", "EXPORTING"), TRAINJOB_RUNNING),
    "COMPLETED": TRAINJOB_COMPLETE,
    **dict.fromkeys(("FAILED", "CANCELLED", "PREEMPTED"), TRAINJOB_FAILED),
}
"""The server's statuses, in the four words that programs for Kubeflow know. One that was preempted and is to go on is
QUEUED."""
ALL_STATUSES = frozenset(STATUSES.values())
ENVIRONMENT, PREPARE = "environment", "prepare"
"""The steps that install packages, and that fetch for a built-in trainer."""
WORKING_STEPS: Mapping[str, str] = {"function": "node", "container": "node", "trainer": "train"}
"""What the step that does a job's work is called in its log, by kind; `main` of the others."""
_PACKAGES = {"PIL": "pillow", "cv2": "opencv-python", "mlx": "mlx[cpu]", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Modules whose package is called otherwise."""
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^'.]+)")


def name_of(job: api.JobSummary | api.Submitted) -> str:
    return job["handle"] or job["job_id"]


def train_job(
    job: api.JobSummary, runtimes: Mapping[str, types.Runtime], *, current_step: str | None = None
) -> types.TrainJob:
    """A job, with what the server said of it: of one from a list, only its nodes' steps and no checkpoints.

    `runtimes` are those that are known, by name; `current_step` is what a job that prepares is at.
    """
    whole = cast(api.Job, job) if "workload" in job else None
    return types.TrainJob(
        name=name_of(job),
        runtime=_runtime(job, runtimes),
        steps=list(_steps(job, whole, current_step)),
        num_nodes=job["node_count"],
        creation_timestamp=datetime.fromisoformat(job["created_at"]),
        status=STATUSES.get(job["status"], UNKNOWN),
        state=job["status"],
        message=(whole["pending_reason"] if whole else None) or job["status_message"],
        progress=types.Progress(**job["progress"]),
        metrics=dict(job["metrics"]),
        checkpoints=[_checkpoint(each) for each in whole["checkpoints"]] if whole else [],
        labels=dict(job["labels"]),
        started_at=_moment(job["started_at"]),
        finished_at=_moment(job["finished_at"]),
    )


def preparing_steps(job: api.Job) -> list[str]:
    workload: Mapping[str, Any] = job["workload"] or {}
    initializers = workload.get("initializers") or {}
    found = [
        (DATASET_INITIALIZER, initializers.get("dataset")),
        (MODEL_INITIALIZER, initializers.get("model")),
        (ENVIRONMENT, workload.get("packages")),
        (PREPARE, job["kind"] == "trainer"),
    ]
    return [name for name, there in found if there]


def log_filter(job: api.Job, step: str) -> dict[str, Any] | None:
    """Which lines of a job's log are a step's; None where it has no such step.

    A built-in trainer fetches model and data in one step, which both initializers of Kubeflow's stand for.
    """
    if step in (DATASET_INITIALIZER, MODEL_INITIALIZER) and job["kind"] == "trainer":
        return {"step": PREPARE}
    if step in preparing_steps(job):
        return {"step": step}
    kind, _, number = step.rpartition("-")
    if kind != NODE or not number.isdecimal() or int(number) >= job["node_count"]:
        return None
    return {"step": WORKING_STEPS.get(job["kind"], "main"), "node": int(number)}


def event(each: api.Event, name: str) -> types.Event:
    return types.Event(
        involved_object_kind=TRAINJOB_KIND,
        involved_object_name=name,
        message=each["message"],
        reason=each["reason"] or each["to"] or each["type"].upper(),
        event_time=datetime.fromisoformat(each["ts"]),
    )


def failure(job: api.Job, lines: Sequence[str]) -> str:
    error = job["error"]
    reason = job["status_reason"] or job["status"]
    said = [f"job {name_of(job)} is {STATUSES[job['status']]} ({job['status']}, {reason})"]
    if job["status_message"]:
        said[0] += f": {job['status_message']}"
    if error is not None:
        if error["exit_code"] is not None:
            said.append(f"exit code {error['exit_code']}" + _where(error))
        elif error["signal"]:
            said.append(f"killed by {error['signal']}" + _where(error))
        lines = error["last_lines"] or lines
        if advice := _advice(job, lines) or error["advice"]:
            said.append(advice)
    if lines:
        said += ["its last lines:", *(f"  {line}" for line in lines)]
    return "\n".join(said)


def _advice(job: api.Job, lines: Sequence[str]) -> str | None:
    """What to do about a module that was not there, by the name that Python gives."""
    missing = next((found[1] for line in reversed(lines) if (found := _NO_MODULE.search(line))), None)
    if missing is None or job["kind"] not in ("function", "script"):
        return None
    package = _PACKAGES.get(missing, missing)
    return (
        f"where it ran, there is no module {missing}: add the package that has it, such as "
        f'packages_to_install=["{package}"], or send it along if it is your own (ScriptTrainer\'s directory)'
    )


def _where(error: api.Failure) -> str:
    step = f" in the step {error['step']}" if error["step"] else ""
    return f" of rank {error['rank']}{step}" if error["rank"] is not None else step


def _steps(job: api.JobSummary, whole: api.Job | None, current: str | None) -> Iterator[types.Step]:
    device, count = _device(job, whole)
    failed_step = whole["error"]["step"] if whole and whole["error"] else None
    preparing = preparing_steps(whole) if whole else []
    for place, name in enumerate(preparing):
        yield types.Step(name=name, status=_prepared(job, preparing, place, current, failed_step), pod_name="")
    status = STATUSES.get(job["status"], UNKNOWN)
    if failed_step in preparing:
        status = TRAINJOB_CREATED  # nothing of it ever ran
    for node in range(job["node_count"]):
        yield types.Step(name=f"{NODE}-{node}", status=status, pod_name="", device=device, device_count=count)


def _prepared(job: api.JobSummary, steps: Sequence[str], place: int, current: str | None, failed: str | None) -> str:
    """The status of a preparing step: those before the one that the job is at, or failed in, are done."""
    at = steps.index(failed) if failed in steps else None
    if at is not None:
        return (TRAINJOB_COMPLETE, TRAINJOB_FAILED, TRAINJOB_CREATED)[(place >= at) + (place > at)]
    if job["status"] == "PREPARING":
        at = steps.index(current) if current in steps else 0
        return (TRAINJOB_COMPLETE, TRAINJOB_RUNNING, TRAINJOB_CREATED)[(place >= at) + (place > at)]
    return TRAINJOB_COMPLETE if job["started_at"] is not None else TRAINJOB_CREATED


def _device(job: api.JobSummary, whole: api.Job | None) -> tuple[str, str]:
    resources: Mapping[str, Any] = whole["resource_config"] if whole else {}
    placement, nodes = job["placement"], job["node_count"]
    if placement is None and whole and whole["attempts"]:
        placement = whole["attempts"][-1]["placement"]
    gpus = len(placement["gpus"]) if placement else resources.get("gpu_count")
    if gpus:
        kind = str(resources.get("gpu_type") or "")
        return kind if kind.startswith("mig-") else "gpu", str(gpus // nodes)
    cores = resources.get("cpu_cores")
    if gpus == 0 or cores:
        return "cpu", str(cores) if cores else UNKNOWN
    return UNKNOWN, UNKNOWN


def _runtime(job: api.JobSummary, runtimes: Mapping[str, types.Runtime]) -> types.Runtime:
    """The runtime that the job was made with; as much of it as the job says where it is not there any more."""
    name = job["labels"].get(RUNTIME_LABEL)
    if name is not None and name in runtimes:
        return runtimes[name]
    built_in = job["kind"] == "trainer"
    return types.Runtime(
        name=name or UNKNOWN,
        trainer=types.RuntimeTrainer(
            trainer_type=types.TrainerType.BUILTIN_TRAINER if built_in else types.TrainerType.CUSTOM_TRAINER,
            framework=job["labels"].get(FRAMEWORK_LABEL, UNKNOWN),
            image="",
            num_nodes=job["node_count"],
        ),
        kind=types.RuntimeKind.TRAINING_RUNTIME,
    )


def _checkpoint(each: api.Checkpoint) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=each["checkpoint_id"],
        step=each["step"],
        created_at=datetime.fromisoformat(each["created_at"]),
        uri=each["uri"],
        size_bytes=each["size_bytes"],
        metrics=dict(each["metrics"]),
        is_best=each["is_best"],
        is_latest=each["is_latest"],
    )


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
