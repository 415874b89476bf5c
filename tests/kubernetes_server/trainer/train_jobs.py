"""The TrainJob controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubernetes_server.controllers.loop import Controller
from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.objects import (
    Key,
    Object,
    age_s,
    clone,
    condition_of,
    controller_of,
    has_condition,
    is_deleting,
    set_condition,
)
from kubernetes_server.store import Change
from kubernetes_server.trainer.definitions import JOB_SETS, TRAIN_JOBS
from kubernetes_server.trainer.job_set_of import job_set_of
from kubernetes_server.trainer.webhooks import Webhooks

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

_ENDS = {"Completed": "Complete", "Failed": "Failed"}
"""Condition of a JobSet -> the one of its TrainJob."""


class TrainJobController(Controller):
    def __init__(self, cluster: Cluster, webhooks: Webhooks) -> None:
        super().__init__(cluster)
        self._webhooks = webhooks
        self.store.subscribe(TRAIN_JOBS.store_key, self.enqueue_change)
        self.store.subscribe(JOB_SETS.store_key, self._job_set_changed)

    def _job_set_changed(self, change: Change) -> None:
        owner = controller_of(change.record.object)
        if owner and owner["kind"] == TRAIN_JOBS.kind:
            self.enqueue((change.record.key[0], owner["name"]))

    def sync(self, key: Key) -> None:
        train_job = self.store.get(TRAIN_JOBS.store_key, key)
        if train_job is None or is_deleting(train_job):
            return
        if has_condition(train_job, "Complete") or has_condition(train_job, "Failed"):
            return
        job_set = self.store.get(JOB_SETS.store_key, key)
        runtime = self._webhooks.runtime_of(train_job)
        if job_set is None and runtime is not None:
            job_set = self.operations.create(JOB_SETS, key[0], job_set_of(train_job, runtime))
        suspend = train_job["spec"]["suspend"]
        if job_set is not None and job_set["spec"]["suspend"] != suspend:
            job_set = self.operations.modify(JOB_SETS, key, lambda each: each["spec"].update(suspend=suspend))
        changed = clone(train_job)
        self._set_status(changed, job_set)
        failed = self._fail_when_late(changed)
        self.operations.commit(TRAIN_JOBS, train_job, changed)
        if failed and job_set is not None:
            self.operations.deletion.delete(JOB_SETS, key, DeleteOptions(propagation="Background"))

    @staticmethod
    def _set_status(train_job: Object, job_set: Object | None) -> None:
        status = train_job.setdefault("status", {})
        conditions = status.get("conditions") or []
        if train_job["spec"]["suspend"]:
            set_condition(conditions, "Suspended", "True", reason="Suspended", message="TrainJob is suspended")
        elif has_condition(train_job, "Suspended"):
            set_condition(conditions, "Suspended", "False", reason="Resumed", message="TrainJob is resumed")
        for theirs, ours in _ENDS.items():
            ended = condition_of(job_set, theirs) if job_set is not None else None
            if ended is not None and ended["status"] == "True":
                set_condition(conditions, ours, "True", reason=ended["reason"], message=ended["message"])
        if conditions:
            status["conditions"] = conditions
        if job_set is not None and (counts := (job_set.get("status") or {}).get("replicatedJobsStatus")):
            status["jobsStatus"] = clone(counts)

    def _fail_when_late(self, train_job: Object) -> bool:
        deadline_s = train_job["spec"].get("activeDeadlineSeconds")
        if deadline_s is None or train_job["spec"]["suspend"] or has_condition(train_job, "Complete"):
            return False
        resumed = condition_of(train_job, "Suspended")
        since = resumed["lastTransitionTime"] if resumed else train_job["metadata"]["creationTimestamp"]
        left_s = deadline_s - age_s(since)
        if left_s > 0:
            metadata = train_job["metadata"]
            self.enqueue_after((metadata["namespace"], metadata["name"]), left_s)
            return False
        text = "TrainJob was active longer than the specified deadline"
        conditions = train_job["status"].setdefault("conditions", [])
        return set_condition(conditions, "Failed", "True", reason="DeadlineExceeded", message=text)
