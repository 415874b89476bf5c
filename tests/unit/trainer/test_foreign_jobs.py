"""TrainJobs of others, and the runtimes of a cluster, as `TrainerClient` shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime_documents import runtime

from trainmaster import client as api
from trainmaster.trainer import NotFoundError
from trainmaster.trainer.foreign_jobs import ForeignJobs, foreign_train_job
from trainmaster.trainer.jobs import Jobs
from trainmaster.trainer.place import Place
from trainmaster.trainer.runtimes import RuntimeCatalog

AWAY = api.UnavailableError(503, "UNAVAILABLE", "the cluster does not answer")
ABSENT = api.NotFoundError(404, "NOT_FOUND", "no")


def foreign(name: str = "theirs", **changes: Any) -> Any:
    step = {"name": "node-0", "status": "TRAINING", "pod": f"{name}-node-0-0-x", "device": "gpu", "device_count": "2"}
    return {
        "name": name,
        "status": "TRAINING",
        "created_at": "2026-01-31T12:00:00Z",
        "node_count": 1,
        "runtime": "wide",
        "message": "",
        "labels": {"team": "a"},
        "steps": [step],
        **changes,
    }


class Cluster:
    """What a server answers about its one backend."""

    def __init__(self, *jobs: Any, kind: str = "kubernetes", logs: Any = ()) -> None:
        self.jobs = {job["name"]: job for job in jobs}
        self.kind = kind
        self.logs = list(logs)
        self.is_away = False

    def backends(self) -> Any:
        return [{"name": "k8s", "default": True, "images": True, "kind": self.kind}]

    def runtimes(self, name: str) -> Any:
        document = runtime("wide", kind="ClusterTrainingRuntime", image="wide:1")
        own = {"name": "wide", "kind": "ClusterTrainingRuntime", "file": name, "document": document}
        return {"runtimes": self._answer([own]), "problems": []}

    def foreign_jobs(self, name: str) -> Any:
        return self._answer(list(self.jobs.values()))

    def foreign_job(self, name: str, job: str) -> Any:
        if job not in self.jobs:
            raise ABSENT
        return self._answer(self.jobs[job])

    def foreign_log(self, name: str, job: str, step: str, *, cursor: str) -> Any:
        lines, complete = self.logs.pop(0)
        return {"lines": lines, "next_cursor": "c", "complete": complete}

    def _answer(self, answer: Any) -> Any:
        if self.is_away:
            raise AWAY
        return answer


class Runtimes:
    def list(self) -> Any:
        return {"runtimes": [], "problems": []}


class Server:
    """It has no jobs and no runtimes of its own."""

    url = "http://127.0.0.1:1"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.runtimes = Runtimes()

    def list(self, labels: Any = None) -> Any:
        return []

    def get(self, name: str, **_: Any) -> Any:
        raise ABSENT

    pause = cancel = resume = delete = events = get


def jobs_of(cluster: Cluster) -> tuple[Jobs, RuntimeCatalog]:
    server: Any = Server(cluster)
    place = Place(server, None)
    catalog = RuntimeCatalog(server, place=place)
    return Jobs(server, catalog, ForeignJobs(server, place)), catalog


def test_runtimes_of_the_cluster_come_before_others_and_make_train_jobs() -> None:
    _, catalog = jobs_of(Cluster())
    assert catalog.definition("wide").in_cluster
    assert not catalog.definition("torch-distributed").in_cluster
    assert {"wide", "torch-distributed"} <= {each.name for each in catalog.list()}
    _, elsewhere = jobs_of(Cluster(kind="slurm"))
    with pytest.raises(NotFoundError):
        elsewhere.definition("wide")


def test_jobs_of_others_are_listed_and_shown_with_their_runtime() -> None:
    jobs, _ = jobs_of(Cluster(foreign(), foreign("done", status="COMPLETED", runtime="gone")))
    shown = jobs.shown("theirs")
    assert (shown.status, shown.state, shown.runtime.trainer.image, shown.labels) == (
        "Running",
        "TRAINING",
        "wide:1",
        {"team": "a"},
    )
    (step,) = shown.steps
    assert (step.name, step.status, step.pod_name, step.device_count) == ("node-0", "Running", "theirs-node-0-0-x", "2")
    assert sorted(job.name for job in jobs.list(None)) == ["done", "theirs"]
    assert [job.name for job in jobs.list("wide")] == ["theirs"]
    assert jobs.shown("done").runtime.name == "gone"
    with pytest.raises(NotFoundError):
        jobs.shown("absent")
    with pytest.raises(NotFoundError):
        jobs_of(Cluster(foreign(), kind="slurm"))[0].shown("theirs")


@pytest.mark.parametrize(
    "change",
    [
        lambda jobs, name: jobs.delete(name),
        lambda jobs, name: jobs.cancel(name),
        lambda jobs, name: jobs.suspend(name, save_checkpoint=True),
        lambda jobs, name: jobs.resume(name),
        lambda jobs, name: jobs.retry(name),
        lambda jobs, name: jobs.result(name),
        lambda jobs, name: jobs.events(name),
    ],
)
def test_jobs_of_others_are_not_changed(change: Callable[[Jobs, str], object]) -> None:
    jobs, _ = jobs_of(Cluster(foreign()))
    with pytest.raises(RuntimeError, match=r"somebody else made.*kubectl delete trainjob theirs"):
        change(jobs, "theirs")
    with pytest.raises(NotFoundError):
        change(jobs, "absent")


def test_cluster_that_is_away_hides_nothing_else() -> None:
    cluster = Cluster(foreign())
    jobs, catalog = jobs_of(cluster)
    cluster.is_away = True
    assert jobs.list(None) == []
    with pytest.raises(RuntimeError, match="does not answer"):
        jobs.shown("theirs")
    with pytest.raises(api.UnavailableError):
        catalog.list()


def test_log_of_others_is_read_in_parts_and_followed_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.trainer.foreign_jobs._LOOK_AGAIN_S", 0)
    parts: list[Any] = [(["a", "b"], False), (["c"], False), ([], False), (["d"], True), ([], True)]

    def lines(**given: Any) -> list[str]:
        jobs, _ = jobs_of(Cluster(foreign(), logs=parts))
        return list(jobs.log("theirs", "node-0", **{"follow": False, "tail": None, "since": None, **given}))

    assert lines() == ["a", "b", "c"]
    assert lines(tail=2) == ["b", "c"]
    assert lines(follow=True) == ["a", "b", "c", "d"]
    assert lines(follow=True, tail=1) == ["c", "d"]
    with pytest.raises(ValueError, match="since"):
        lines(since="2026-01-31")
    with pytest.raises(ValueError, match="tail"):
        lines(tail=-1)


def test_job_of_others_that_failed_says_why() -> None:
    jobs, _ = jobs_of(Cluster(foreign(status="FAILED", message="FailedJobs: node failed")))
    assert str(jobs.failure(jobs.shown("theirs"))) == "job theirs is Failed: FailedJobs: node failed"
    assert foreign_train_job(foreign(status="PAUSED"), {}).status == "Created"
