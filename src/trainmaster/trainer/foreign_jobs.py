"""TrainJobs that others made on the Kubernetes cluster of a client: they are shown, and never touched."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime

from trainmaster import client as api
from trainmaster.client.types import ForeignJob
from trainmaster.trainer import types
from trainmaster.trainer.constants import TRAINJOB_FAILED, UNKNOWN
from trainmaster.trainer.errors import translated
from trainmaster.trainer.job_view import STATUSES
from trainmaster.trainer.place import Place

_LOOK_AGAIN_S = 0.5
_log = logging.getLogger(__name__)


class ForeignJobs:
    """None, where jobs do not run on Kubernetes."""

    def __init__(self, client: api.Client, place: Place) -> None:
        self._client = client
        self._place = place

    def list(self) -> list[ForeignJob]:
        """The newest first. A cluster that does not answer has none to show."""
        cluster = self._place.cluster
        if cluster is None:
            return []
        try:
            return list(self._client.cluster.foreign_jobs(cluster))
        except api.UnavailableError as error:
            _log.warning("the TrainJobs of others are not shown: %s", error)
            return []

    def get(self, name: str) -> ForeignJob | None:
        cluster = self._place.cluster
        if cluster is None:
            return None
        try:
            return self._client.cluster.foreign_job(cluster, name)
        except (api.NotFoundError, api.InvalidError):
            return None

    def lines(self, name: str, step: str, *, follow: bool, tail: int | None) -> Iterator[str]:
        """What a step has written, as long as Kubernetes has it."""
        last: deque[str] = deque(maxlen=tail)
        cluster, cursor = self._place.cluster or "", ""
        with translated(name):
            while True:
                part = self._client.cluster.foreign_log(cluster, name, step, cursor=cursor)
                cursor = part["next_cursor"]
                if tail is None:
                    yield from part["lines"]
                else:
                    last.extend(part["lines"])
                if part["lines"]:
                    continue
                yield from last
                last, tail = deque(), None  # what follows comes as it is written
                if part["complete"] or not follow:
                    return
                time.sleep(_LOOK_AGAIN_S)


def refusal(name: str) -> RuntimeError:
    """Of what can be done to our own jobs alone."""
    return RuntimeError(
        f"{name} is a TrainJob that somebody else made on the cluster: it is shown here, and not changed; use the "
        f"client that made it, or `kubectl`, such as `kubectl delete trainjob {name}`"
    )


def failure(job: types.TrainJob) -> RuntimeError:
    return RuntimeError(f"job {job.name} is {TRAINJOB_FAILED}" + (f": {job.message}" if job.message else ""))


def foreign_train_job(job: ForeignJob, runtimes: Mapping[str, types.Runtime]) -> types.TrainJob:
    return types.TrainJob(
        name=job["name"],
        runtime=runtimes.get(job["runtime"]) or _unknown_runtime(job),
        steps=[
            types.Step(
                name=step["name"],
                status=STATUSES.get(step["status"], UNKNOWN),
                pod_name=step["pod"],
                device=step["device"] or UNKNOWN,
                device_count=step["device_count"] or UNKNOWN,
            )
            for step in job["steps"]
        ],
        num_nodes=job["node_count"],
        creation_timestamp=datetime.fromisoformat(job["created_at"]),
        status=STATUSES.get(job["status"], UNKNOWN),
        state=job["status"],
        message=job["message"] or None,
        labels=dict(job["labels"]),
    )


def _unknown_runtime(job: ForeignJob) -> types.Runtime:
    """One that is gone, or that this client cannot read."""
    return types.Runtime(
        name=job["runtime"],
        trainer=types.RuntimeTrainer(
            trainer_type=types.TrainerType.CUSTOM_TRAINER,
            framework=UNKNOWN,
            image="",
            num_nodes=job["node_count"],
        ),
        kind=types.RuntimeKind.CLUSTER_TRAINING_RUNTIME,
    )
