"""The plan of a step that has a gang: which containers there are, and how large each is; and the gang's end."""

from __future__ import annotations

import json
import signal
import threading
from collections import defaultdict
from typing import Any, cast

import pytest
from container_around import AROUND

from trainmaster.backends.container import container_process
from trainmaster.backends.container.container_spec import KEEP, ImageFacts
from trainmaster.backends.container.engine import ContainerEngine
from trainmaster.backends.container.plans import plan_document, planned_names
from trainmaster.protocol.launch import ContainerLimits, Gang, Launch, LaunchStep
from trainmaster.protocol.request import AttemptRequest, NodeAssignment

IMAGE = ImageFacts(
    id="sha256:1", environment={}, entrypoint=(), command=(), working_directory=None, python="/usr/bin/python3"
)
GANG = Gang(
    count=2,
    argv=("-m", "write"),
    size=ContainerLimits(cpu_cores=0.5, memory_bytes=3 << 20),
    head=ContainerLimits(cpu_cores=2.0),
)


def test_gang_is_planned_with_its_sizes() -> None:
    step = LaunchStep(name="dataset-initializer", argv=("-m", "lead"), python=True, image="org/cache", gang=GANG)
    asked = AttemptRequest(
        job_id="job-1",
        attempt=2,
        token="",
        rank_token="",
        launch=Launch(kind="command", steps=(step, LaunchStep(name="main", argv=("train",)))),
        nodes=(NodeAssignment(node_id="a", cpu_cores=4, memory_mb=512),),
        checkpoint_dir="/srv/artifacts/job-1/checkpoints",
        output_dir="/srv/artifacts/job-1/output",
        owner_file="/srv/runs/job-1/owner.json",
    )
    plan = json.loads(json.dumps(plan_document(asked, 0, IMAGE, {"org/cache": IMAGE}, AROUND, engine="unix:///e")))
    head = "tm-job-1.2-0-dataset-initializer"
    planned = plan["containers"]["dataset-initializer"]
    assert planned["names"] == [head, f"{head}-0", f"{head}-1"]
    assert set(planned["names"]) < set(planned_names(plan))
    documents = {"head": planned["document"], "size": planned["gang"]["document"]}
    sizes = {name: [each["HostConfig"][key] for key in ("NanoCpus", "Memory")] for name, each in documents.items()}
    # What is not said is what the job has booked.
    assert sizes == {"head": [2_000_000_000, 512 << 20], "size": [500_000_000, 3 << 20]}
    assert documents["size"]["HostConfig"]["MemorySwap"] == 3 << 20
    assert documents["head"]["HostConfig"]["Mounts"] == documents["size"]["HostConfig"]["Mounts"]
    assert planned["gang"]["argv"] == ["-m", "write"]


DOCUMENTS = {f"writer-{index}": {"Labels": {KEEP: "no"}} for index in range(4)}


class RecordedEngine:
    """Has containers that run until they are removed."""

    def __init__(self, *, told_to_end_after: int = -1) -> None:
        self.made: list[str] = []
        self.ended: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._told_to_end_after = told_to_end_after

    def create(self, name: str, _: Any) -> None:
        self.made.append(name)
        if len(self.made) == self._told_to_end_after:
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    def start(self, name: str) -> None:
        assert not self.ended[name].is_set()

    def process(self, _: str) -> None:
        return None

    def output(self, _: str) -> str:
        return ""

    def ran_out_of_memory(self, _: str) -> bool:
        return False

    def wait(self, name: str) -> int:
        self.ended[name].wait()
        return 137

    def remove(self, name: str) -> None:
        self.ended[name].set()

    def gang(self) -> container_process.GangContainers:
        return container_process.GangContainers(cast("ContainerEngine", self), "head", DOCUMENTS)


def test_gang_that_is_told_to_end_while_it_is_started_starts_no_more_of_it() -> None:
    engine = RecordedEngine(told_to_end_after=2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with pytest.raises(SystemExit) as ended, engine.gang():
            pytest.fail("it has a head")
        assert ended.value.code == 128 + signal.SIGTERM
        assert engine.made == ["writer-0", "writer-1"]
        assert all(engine.ended[name].is_set() for name in engine.made)
    finally:
        signal.sigtimedwait([signal.SIGTERM], 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_writers_that_are_ended_after_their_head_are_not_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(container_process, "_LAST_S", 0.05)
    engine, others = RecordedEngine(), set(threading.enumerate())
    with engine.gang() as gang:
        watching = set(threading.enumerate()) - others
        assert len(watching) == len(DOCUMENTS)
    for thread in watching:
        thread.join()
    assert not gang.broke_head
    assert gang.out_of_memory == []
    assert capsys.readouterr().err == ""
