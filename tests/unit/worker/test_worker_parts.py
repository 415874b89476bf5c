"""The smaller parts of the worker: environment, watching, records, staging, cgroups, Kubeflow's reports."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainmaster.protocol.documents import write_document
from trainmaster.protocol.launch import BlobFile, Launch, LaunchStep
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.request import AttemptRequest, Control, NodeAssignment
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.worker.cgroups import members_pattern
from trainmaster.worker.local_http import metrics_from_status
from trainmaster.worker.ranks import rank_environment
from trainmaster.worker.records import ExitRecord, RunDirectoryGoneError
from trainmaster.worker.staging import NodeContext, StagingError, stage
from trainmaster.worker.watch import ControlWatch, LogClock, RankWatch


def request_of(tmp_path: Path, **changes: Any) -> AttemptRequest:
    values: dict[str, Any] = {
        "job_id": "j",
        "attempt": 2,
        "token": "secret",
        "rank_token": "less secret",
        "launch": Launch(kind="test", steps=(LaunchStep(name="run", argv=("true",)),)),
        "nodes": (NodeAssignment(node_id="a"), NodeAssignment(node_id="b", gpus=("1", "3"))),
        "checkpoint_dir": os.fspath(tmp_path / "checkpoints"),
        "output_dir": os.fspath(tmp_path / "output"),
        "owner_file": "/runs/j/owner.json",
    }
    return AttemptRequest(**{**values, **changes})


def environment_of(
    request: AttemptRequest, *, prepares: bool = False, own: Mapping[str, str] | None = None, **base: str
) -> dict[str, str]:
    around = NodeContext(
        request=request,
        node=1,
        run_dir=Path("/runs/j/2"),
        working_directory="/work",
        control_file="/c",
        token_file="/t",
        kubeflow_url="http://127.0.0.1:1/",
        port=8080,
        secrets=own or {},
    )
    return rank_environment(around, around.first_rank, base=base, rendezvous=None if prepares else ("10.0.0.1", 29500))


def test_environment_of_second_node_continues_the_ranks(tmp_path: Path) -> None:
    launch = Launch(kind="test", steps=(LaunchStep(name="run", argv=("true",)),), ranks_per_node=4)
    variables = environment_of(request_of(tmp_path, launch=launch))
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("4", "0", "8")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert variables["TRAINMASTER_EVENTS_FILE"] == "/runs/j/2/nodes/1/rank-4.events.jsonl"


def test_environment_over_http_names_an_owner_url(tmp_path: Path) -> None:
    variables = environment_of(request_of(tmp_path, server_url="http://server:1/"))
    assert variables["TRAINMASTER_OWNER_URL"] == "http://server:1/v1/worker/attempts/j.2/owner"
    assert "TRAINMASTER_OWNER_FILE" not in variables


def test_environment_has_the_servers_endpoints_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    request = request_of(tmp_path, environment={"HF_ENDPOINT": "https://mirror.test"})
    assert environment_of(request, HF_ENDPOINT="https://older.test")["HF_ENDPOINT"] == "https://mirror.test"
    own = {"HF_ENDPOINT": "https://own.test"}
    assert environment_of(request, own=own)["HF_ENDPOINT"] == "https://own.test"


def test_python_that_crashes_says_where_unless_the_job_says_otherwise(tmp_path: Path) -> None:
    request = request_of(tmp_path)
    assert environment_of(request)["PYTHONFAULTHANDLER"] == "1"
    assert environment_of(request, own={"PYTHONFAULTHANDLER": ""})["PYTHONFAULTHANDLER"] == ""


def test_environment_of_service_has_the_port_where_it_wants_it(tmp_path: Path) -> None:
    launch = Launch(kind="test", steps=(LaunchStep(name="run", argv=("true",)),), port_environment="LISTEN_ON")
    assert environment_of(request_of(tmp_path, launch=launch))["LISTEN_ON"] == "8080"


def test_environment_may_name_the_variables_of_a_rank(tmp_path: Path) -> None:
    launch = Launch(kind="test", steps=(LaunchStep(name="run", argv=("true",)),), ranks_per_node=4)
    own = {
        "COORDINATOR": "$(MASTER_ADDR):$(MASTER_PORT)",
        "WHO": "$(RANK)/$(WORLD_SIZE) $(LOCAL_RANK)/$(LOCAL_WORLD_SIZE) on $(NODE_RANK)",
        "AS_IT_IS": "$$(RANK) $(HOME) $RANK ${RANK} $(rank)",
        "RANK": "$(WORLD_SIZE)",
    }
    variables = environment_of(request_of(tmp_path, launch=launch), own=own, HOME="/h", INHERITED="$(RANK)")
    assert variables["COORDINATOR"] == "10.0.0.1:29500"
    assert variables["WHO"] == "4/8 0/4 on 1"
    assert variables["AS_IT_IS"] == "$(RANK) $(HOME) $RANK ${RANK} $(rank)"
    assert (variables["RANK"], variables["INHERITED"]) == ("4", "$(RANK)")
    prepares = environment_of(request_of(tmp_path, launch=launch), own=own, prepares=True)
    assert prepares["COORDINATOR"] == "$(MASTER_ADDR):$(MASTER_PORT)"


def test_environment_that_the_user_chose_is_kept(tmp_path: Path) -> None:
    variables = environment_of(request_of(tmp_path), PYTHONUNBUFFERED="", OMP_NUM_THREADS="8", TRAINMASTER_URL="x")
    assert (variables["PYTHONUNBUFFERED"], variables["OMP_NUM_THREADS"]) == ("", "8")
    assert "TRAINMASTER_URL" not in variables


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "when_preparing"),
    [(8, 2, "4", "8"), (7, 2, "3", "7"), (6, 1, "6", "6"), (2, 4, "1", "2"), (0, 1, None, None), (0, 4, "1", "1")],
)
def test_threads_of_a_rank_follow_the_cores_that_are_booked(
    tmp_path: Path, cores: int, ranks: int, threads: str | None, when_preparing: str | None
) -> None:
    nodes = (NodeAssignment(node_id="a", cpu_cores=64), NodeAssignment(node_id="b", cpu_cores=cores))
    launch = Launch(kind="test", steps=(LaunchStep(name="run", argv=("true",)),), ranks_per_node=ranks)
    request = request_of(tmp_path, launch=launch, nodes=nodes)
    assert environment_of(request).get("OMP_NUM_THREADS") == threads
    assert environment_of(request, prepares=True).get("OMP_NUM_THREADS") == when_preparing
    assert environment_of(request, OMP_NUM_THREADS="5")["OMP_NUM_THREADS"] == "5"
    assert AttemptRequest.from_json(request.to_json()) == request


def test_control_watch_sees_each_newer_wish_once(tmp_path: Path) -> None:
    watch = ControlWatch(tmp_path)
    directory = RunDirectory(tmp_path)
    assert watch.poll() is None
    directory.set_control(Control(seq=3, stop=StopCause.PAUSE, save=True).to_json())
    assert watch.poll() == Control(seq=3, stop=StopCause.PAUSE, save=True)
    assert watch.poll() is None
    directory.set_control(Control(seq=2, stop=StopCause.CANCEL).to_json())
    assert watch.poll(closely=True) is None
    directory.set_control(Control(seq=4, stop=StopCause.CANCEL).to_json())
    assert watch.poll(closely=True) == Control(seq=4, stop=StopCause.CANCEL)


@pytest.mark.parametrize("content", ["", "[]", '{"seq": 1, "stop": "dance"}', '{"stop": "cancel"}'])
def test_control_watch_ignores_what_it_does_not_understand(tmp_path: Path, content: str) -> None:
    watch = ControlWatch(tmp_path)
    (tmp_path / "control.json").write_text(content)
    assert watch.poll() is None
    write_document(tmp_path / "control.json", Control(seq=2, save=True).to_json())
    assert watch.poll(closely=True) == Control(seq=2, save=True)


def test_log_clock_dates_growth_and_forgets_nothing_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "run.0.out"
    clock = LogClock(os.fspath(log))
    clock.poll()
    log.write_bytes(b"one\n")
    before = time.time()
    clock.poll()
    with log.open("ab") as file:
        file.write(b"two\n")
    clock.poll(last=True)
    clock.poll(last=True)
    entries = [line.split() for line in (tmp_path / "run.0.out.times").read_text().splitlines()]
    assert [int(size) for _, size in entries] == [4, 8]
    assert all(before - 1 <= float(moment) <= time.time() + 1 for moment, _ in entries)


def test_rank_watch_learns_what_ranks_can_do_from_whole_lines(tmp_path: Path) -> None:
    events = tmp_path / "events"
    watch = RankWatch(RunDirectory(tmp_path))
    watch.follow([], {3: os.fspath(events)})
    assert not watch.poll()
    events.write_text('{"type": "capable", "save": true}\nnonsense\n{"type": "capable", "stacks')
    assert watch.poll()
    assert (watch.can_save, watch.dump_stacks, watch.has_finished) == (True, set(), False)
    with events.open("a") as file:
        file.write('": true}\n{"type": "finished"}\n')
    assert watch.poll()
    assert (watch.dump_stacks, watch.has_finished) == ({3}, True)
    assert not watch.poll()


def test_exit_record_is_tried_until_it_is_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "1")
    directory.create(request_of(tmp_path))
    record = ExitRecord(directory, 0)
    tries: list[float] = []

    def compose() -> dict[str, Any]:
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "full")
        return {"reason": "SUCCEEDED"}

    record.write(compose, tries.append)
    assert directory.document(exit_document(0)) == {"reason": "SUCCEEDED"}
    assert len(tries) == 3
    assert sorted(os.listdir(tmp_path / "1" / "nodes" / "0")) == ["exit.json", "logs"]


def test_exit_record_of_deleted_run_says_so(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "1")
    record = ExitRecord(directory, 0)
    with pytest.raises(RunDirectoryGoneError):
        record.write(dict, lambda _: None)


@pytest.mark.parametrize("path", ["../escape", "/etc/passwd", "a/../../escape", ""])
def test_staging_file_that_leaves_the_working_directory_is_refused(tmp_path: Path, path: str) -> None:
    content = b"x"
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / digest).write_bytes(content)
    launch = Launch(
        kind="test", steps=(LaunchStep(name="run", argv=("true",)),), blobs=(BlobFile(sha256=digest, path=path),)
    )
    (tmp_path / "run").mkdir()
    with pytest.raises(StagingError, match="leaves the working directory"):
        stage(request_of(tmp_path, launch=launch, blob_dir=os.fspath(tmp_path)), tmp_path / "run", 0, lambda: None)


def test_staging_gives_up_when_it_is_told_to_and_leaves_no_part(tmp_path: Path) -> None:
    content = b"x" * (3 << 20)
    digest = hashlib.sha256(content).hexdigest()
    (tmp_path / digest).write_bytes(content)
    launch = Launch(
        kind="test", steps=(LaunchStep(name="run", argv=("true",)),), blobs=(BlobFile(sha256=digest, path="big"),)
    )
    (tmp_path / "run").mkdir()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        stage(request_of(tmp_path, launch=launch, blob_dir=os.fspath(tmp_path)), tmp_path / "run", 0, stop)
    assert os.listdir(tmp_path / "run" / "work") == []


@pytest.mark.parametrize(
    ("line", "node", "belongs"),
    [
        (b"4:memory:/user/trainmaster-j.1.0", None, True),
        (b"4:memory:/user/trainmaster-j.1.0", 0, True),
        (b"4:memory:/user/trainmaster-j.1.0/below", 0, True),
        (b"4:memory:/user/trainmaster-j.1.0", 1, False),
        (b"4:memory:/user/trainmaster-j.1.12", 1, False),
        (b"4:memory:/user/trainmaster-j.10.0", None, False),
        (b"4:memory:/user/trainmaster-jx1.0", None, False),
        (b"4:memory:/user", None, False),
    ],
)
def test_cgroup_pattern_matches_the_attempts_own_groups(line: bytes, node: int | None, belongs: bool) -> None:
    assert bool(members_pattern("j.1", node).search(b"9:cpu:/\n" + line + b"\n")) is belongs


def test_kubeflow_status_is_read_tolerantly() -> None:
    status = {
        "progressPercentage": 12.5,
        "estimatedRemainingSeconds": "60",
        "metrics": [
            {"name": "loss", "value": "1e-3"},
            {"name": "steps", "value": 7},
            {"name": "flag", "value": True},
            {"name": "text", "value": "abc"},
            {"name": "inf", "value": "inf"},
            {"value": "1"},
            "nonsense",
        ],
        "lastUpdatedTime": "2026-01-01T00:00:00Z",
    }
    assert metrics_from_status({"trainerStatus": status}, now=5.0) == {
        "t": 5.0,
        "percent": 12.5,
        "eta_s": 60.0,
        "values": {"loss": 0.001, "steps": 7.0},
    }
    assert metrics_from_status({"trainerStatus": {}}, now=5.0) == {"t": 5.0, "values": {}}


@pytest.mark.parametrize("document", [None, [], {}, {"trainerStatus": 3}, "text"])
def test_kubeflow_status_of_another_shape_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match="trainerStatus"):
        metrics_from_status(document, now=0.0)


@pytest.mark.parametrize("line", [b'{"type":"note"}\n', b"\n", b"nonsense\n", b'{"type":"finished"}\n'])
def test_flood_of_events_takes_little_of_the_workers_time(line: bytes, tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.write_bytes(line * ((8 << 20) // len(line)) + b'{"type":"failed","reason":"BAD_INPUT","message":"m"}\n')
    watch = RankWatch(RunDirectory(tmp_path))
    watch.follow([], {0: str(events)})
    began = time.thread_time()
    assert watch.poll()
    assert time.thread_time() - began < 1.5  # to parse every line takes several seconds
    assert watch.failures[0].message == "m"
    assert not watch.poll()
