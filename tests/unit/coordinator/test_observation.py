"""Reading what ranks wrote: they may write anything."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pytest

from trainmaster.backends.base import Loss, endpoint_on_node
from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.run_directory import (
    RunDirectory,
    endpoint_document,
    events_stream,
    exit_document,
    metrics_stream,
    worker_stream,
)
from trainmaster.server.coordinator import streams
from trainmaster.server.coordinator.launch import attempt_request, compiled_launch
from trainmaster.server.coordinator.observation import LOSS_WITHIN_S, READS_AFTER_END, observe_attempt
from trainmaster.server.coordinator.streams import LONGEST_LINE
from trainmaster.server.core.commands import submit
from trainmaster.server.core.job import Job, JobProgress
from trainmaster.server.core.observations import admit, place
from trainmaster.server.core.reports import AttemptObservation, Liveness
from trainmaster.server.core.resources import Share
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.states import Desired
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots, run_directory


def placed_job() -> Job:
    request = parse_submit(
        {"name": "j", "workload": {"kind": "command", "argv": ["x"]}, "resource_config": {"gpu_count": 0}}
    )
    change = submit(compile_job(request), account_id="a", job_id="j", created_by="t", now=1.0, default_backend="local")
    admitted = admit(change.job, now=1.0)
    assert admitted is not None
    placed = place(admitted.job, now=1.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    return placed.job


@pytest.fixture(autouse=True)
def no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes what its limits in lines allow, however slow this machine is."""
    monkeypatch.setattr(streams, "LOOK_S", 3600.0)


@pytest.fixture
def job() -> Job:
    return placed_job()


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots({RUNS: tmp_path / "runs", ARTIFACTS: tmp_path / "artifacts", BLOBS: tmp_path / "blobs"})


@pytest.fixture
def directory(job: Job, roots: Roots) -> RunDirectory:
    laid_out = run_directory(roots, job.job_id, job.live.number)
    laid_out.create(
        attempt_request(
            job, compiled_launch(job), nodes={}, roots=roots, resume=None, hint_socket=None, server_url=None
        )
    )
    return laid_out


def progress_after(lines: bytes, job: Job, directory: RunDirectory, roots: Roots) -> JobProgress | None:
    directory.append(metrics_stream(0, 0), 0, lines)
    return observe_attempt(
        job,
        directory,
        [Liveness.ALIVE],
        ranks_per_node=1,
        roots=roots,
        endpoint=partial(endpoint_on_node, directory.request()),
    ).progress


def test_report_without_a_time_counts_as_progress(job: Job, directory: RunDirectory, roots: Roots) -> None:
    progress = progress_after(b'{"step": 3, "values": {"loss": 0.5}}\n', job, directory, roots)
    assert progress is not None
    assert (progress.step, progress.metrics, progress.step_at) == (3, {"loss": 0.5}, None)


@pytest.mark.parametrize(
    "malformed",
    [b'{"t": 1, "step": "x"}', b'{"t": [], "step": 1e999}', b'{"t": 1, "values": 3}', b"[]", b"nonsense", b"\xff"],
)
def test_malformed_report_does_not_hide_the_next(
    malformed: bytes, job: Job, directory: RunDirectory, roots: Roots
) -> None:
    progress = progress_after(malformed + b'\n{"t": 5.0, "step": 2, "values": {}}\n', job, directory, roots)
    assert progress is not None
    assert (progress.step, progress.step_at) == (2, 5.0)


def noted(observation: AttemptObservation) -> list[str]:
    return [str(record["message"]) for record in observation.nodes[0].records if record["type"] == "note"]


def cut(observation: AttemptObservation) -> list[str]:
    return [str(record["message"]) for record in observation.nodes[0].records if record["type"] == "reports_cut"]


def seen(job: Job, directory: RunDirectory, roots: Roots, ranks: int = 1) -> tuple[AttemptObservation, Job]:
    """What is to be seen, and the job once that is taken in."""
    observation = observe_attempt(
        job,
        directory,
        [Liveness.ALIVE],
        ranks_per_node=ranks,
        roots=roots,
        endpoint=partial(endpoint_on_node, directory.request()),
    )
    return observation, job.evolve(attempt=job.live.evolve(offsets=observation.offsets))


def all_seen(job: Job, directory: RunDirectory, roots: Roots, ranks: int = 1) -> tuple[list[AttemptObservation], Job]:
    """Every look that it takes until nothing is left to read."""
    observations = []
    while not observations or observations[-1].behind:
        observation, job = seen(job, directory, roots, ranks)
        observations.append(observation)
    return observations, job


def test_line_that_is_too_long_is_skipped_with_one_note(job: Job, directory: RunDirectory, roots: Roots) -> None:
    stream = events_stream(0, 0)
    line = b'{"type": "note", "message": "' + b"x" * 3 * LONGEST_LINE + b'"}\n'
    end = directory.append(stream, 0, b'{"type": "note", "message": "before"}\n' + line)
    directory.append(stream, end, b'{"type": "note", "message": "after"}\n')
    observations, job = all_seen(job, directory, roots)
    before, skipped, after = [message for observation in observations for message in noted(observation)]
    assert (before, after) == ("before", "after")
    assert stream in skipped
    assert observations[-1].offsets[stream] == dict(directory.streams())[stream]
    assert noted(seen(job, directory, roots)[0]) == []


def test_line_that_is_too_long_may_come_in_pieces(job: Job, directory: RunDirectory, roots: Roots) -> None:
    stream = events_stream(0, 0)
    told: list[str] = []
    end = 0
    pieces = [b'{"a": "', b"x" * (LONGEST_LINE - 7), b"x" * 10, b'{"type": "finished"}', b'"}\n{"type": "note", ']
    for piece in [*pieces, b'"message": "after"}\n']:
        end = directory.append(stream, end, piece)
        observation, job = seen(job, directory, roots)
        told += noted(observation)
        assert [record["type"] for record in observation.nodes[0].records if record["type"] != "note"] == []
    assert [message == "after" for message in told] == [False, True]
    assert observation.offsets[stream] == end


def test_stream_without_end_is_read_in_portions_and_not_for_ever(
    job: Job, directory: RunDirectory, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_BYTES", 3 * LONGEST_LINE)
    directory.put_document(exit_document(0), {"reason": "SUCCEEDED", "message": "m", "ended_at": 2.0})
    stream = directory.path / events_stream(0, 0)
    directory.append(events_stream(0, 0), 0, b'{"type": "note", "message": "before"}\n')
    with open(stream, "r+b") as file:
        file.truncate(1 << 40)  # holds nothing, and takes long to read
    told: list[str] = []
    exits = []
    for _ in range(6):
        observation = observe_attempt(
            job,
            directory,
            [Liveness.GONE],
            ranks_per_node=1,
            roots=roots,
            endpoint=partial(endpoint_on_node, directory.request()),
        )
        told += noted(observation) + cut(observation)
        exits.append(observation.nodes[0].exit is not None)
        job = job.evolve(attempt=job.live.evolve(offsets=observation.offsets))
        if exits[-1]:
            break
        assert observation.nodes[0].liveness is Liveness.UNKNOWN  # nobody may conclude anything from its silence
    assert exits[-1]
    assert len(exits) > 1
    assert told[0] == "before"
    assert "the rest of it is ignored" in told[-1]


def test_line_that_just_fits_is_read(job: Job, directory: RunDirectory, roots: Roots) -> None:
    line = b'{"type": "note", "message": "x"' + b" " * (LONGEST_LINE - 33) + b"}\n"
    assert len(line) == LONGEST_LINE
    directory.append(events_stream(0, 0), 0, line * 2)
    observations, _ = all_seen(job, directory, roots)
    assert [message for observation in observations for message in noted(observation)] == ["x", "x"]


def test_line_of_metrics_that_is_too_long_does_not_hide_the_next(
    job: Job, directory: RunDirectory, roots: Roots
) -> None:
    line = b'{"t": 1, "step": 1, "x": "' + b"x" * LONGEST_LINE + b'"}\n'
    directory.append(metrics_stream(0, 0), 0, line + b'{"t": 2, "step": 2}\n')
    observation, _ = seen(job, directory, roots)
    assert observation.progress is not None
    assert observation.progress.step == 2


NOTE = b'{"type":"note","message":"m"}\n'


@pytest.mark.parametrize("line", [NOTE, b"\n", b"{}\n", b"nonsense\n", b"\r\n"])
def test_flood_is_taken_in_small_portions(line: bytes, job: Job, directory: RunDirectory, roots: Roots) -> None:
    directory.append(events_stream(0, 0), 0, line * 10_000)
    directory.append(worker_stream(0), 0, b'{"type":"started"}\n')
    observation, job = seen(job, directory, roots)
    assert observation.behind
    assert len(noted(observation)) <= streams.READ_LINES
    assert observation.offsets[events_stream(0, 0)] <= streams.READ_LINES * len(line)
    assert "started" in [record["type"] for record in observation.nodes[0].records]  # other streams do not wait


def test_stream_with_too_many_lines_is_cut_and_the_others_go_on(
    job: Job, directory: RunDirectory, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_LINES", 300)
    end = directory.append(events_stream(0, 0), 0, NOTE * 1000)
    observations, job = all_seen(job, directory, roots)
    assert sum(len(noted(observation)) for observation in observations) == 300
    assert [message for observation in observations for message in cut(observation)] == cut(observations[-1]) != []
    directory.append(events_stream(0, 0), end, NOTE)
    directory.append(worker_stream(0), 0, NOTE)
    observation, job = seen(job, directory, roots)
    assert (len(noted(observation)), cut(observation), observation.behind) == (1, [], False)


def test_ranks_are_cut_together_and_their_worker_goes_on(
    job: Job, directory: RunDirectory, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_LINES", 300)
    for rank in range(40):
        directory.append(events_stream(0, rank), 0, NOTE * 1000)
    directory.append(worker_stream(0), 0, NOTE)
    directory.put_document(exit_document(0), {"reason": "SUCCEEDED", "message": "m", "ended_at": 2.0})
    observations, job = all_seen(job, directory, roots, ranks=40)
    assert sum(len(noted(observation)) for observation in observations) == streams.MOST_OF_RANKS * 300 + 1
    assert sum(len(cut(observation)) for observation in observations) >= 1
    assert observations[-1].nodes[0].exit is not None


def test_look_at_a_thousand_ranks_takes_few_lines_of_all(job: Job, directory: RunDirectory, roots: Roots) -> None:
    for rank in range(300):
        directory.append(events_stream(0, rank), 0, NOTE * 100)
    observation, job = seen(job, directory, roots, ranks=300)
    assert observation.behind
    assert len(noted(observation)) < streams.MOST_LINES + streams.LEAST_LINES


def test_look_that_is_late_takes_one_stream_and_leaves_the_others_to_the_next(
    job: Job, directory: RunDirectory, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "LOOK_S", -1.0)
    for rank in range(3):
        directory.append(events_stream(0, rank), 0, NOTE)
    taken = []
    for _ in range(3):
        observation, job = seen(job, directory, roots, ranks=3)
        taken.append((len(noted(observation)), observation.behind))
    assert taken == [(1, True), (1, True), (1, False)]


def end(directory: RunDirectory, reason: str = "SUCCEEDED") -> None:
    directory.put_document(exit_document(0), {"reason": reason, "message": "m", "ended_at": 2.0})


def checkpoint(roots: Roots, number: int) -> bytes:
    path = str(roots.path(ARTIFACTS, f"j/checkpoints/{number}"))
    record = {"type": "checkpoint", "checkpoint_id": f"c{number}", "step": number, "path": path, "t": float(number)}
    return json.dumps(record).encode() + b"\n"


def saved(observations: list[AttemptObservation]) -> list[str]:
    records = [record for observation in observations for record in observation.nodes[0].records]
    return [str(record["checkpoint_id"]) for record in records if record["type"] == "checkpoint"]


def until_the_end(job: Job, directory: RunDirectory, roots: Roots, ranks: int = 1) -> list[AttemptObservation]:
    """Every look up to the one that shows how the node ended; each of them must be followed by another."""
    observations: list[AttemptObservation] = []
    while True:
        observation, job = seen(job, directory, roots, ranks)
        observations.append(observation)
        if observation.nodes[0].exit is not None:
            return observations
        assert observation.behind
        assert observation.nodes[0].liveness is Liveness.UNKNOWN


def test_last_reports_of_a_job_that_has_ended_are_all_read(job: Job, directory: RunDirectory, roots: Roots) -> None:
    lines = [checkpoint(roots, number) for number in range(READS_AFTER_END * streams.READ_LINES // 2)]
    directory.append(events_stream(0, 0), 0, b"".join(lines))
    directory.append(metrics_stream(0, 0), 0, b'{"step": 1}\n{"step": 2, "values": {"loss": 0.5}}\n')
    end(directory)
    observations = until_the_end(job, directory, roots)
    assert saved(observations) == [f"c{number}" for number in range(len(lines))]
    assert [message for observation in observations for message in cut(observation)] == []
    assert observations[0].progress is not None
    assert (observations[0].progress.step, observations[0].progress.metrics) == (2, {"loss": 0.5})


def test_end_of_a_flood_waits_for_few_looks_and_its_newest_reports_are_read(
    job: Job, directory: RunDirectory, roots: Roots
) -> None:
    flood = [checkpoint(roots, number) for number in range(20_000)]
    directory.append(events_stream(0, 0), 0, b"".join(flood))
    end(directory, "PREEMPTED")
    *before, last = until_the_end(job, directory, roots)
    assert len(before) == READS_AFTER_END
    read = saved([*before, last])
    count = len(read) - streams.LEAST_LINES
    assert read == [f"c{number}" for number in [*range(count), *range(20_000 - streams.LEAST_LINES, 20_000)]]
    (message,) = [message for observation in [*before, last] for message in cut(observation)]
    skipped = sum(map(len, flood[count : -streams.LEAST_LINES]))
    assert f" {skipped} bytes of them were skipped" in message
    assert not last.behind
    assert last.offsets[events_stream(0, 0)] == sum(map(len, flood))


def test_end_of_a_flood_of_many_ranks_waits_for_no_more_looks(job: Job, directory: RunDirectory, roots: Roots) -> None:
    for rank in range(64):
        directory.append(events_stream(0, rank), 0, NOTE * 2000)
    directory.append(events_stream(0, 63), len(NOTE) * 2000, checkpoint(roots, 7))
    end(directory)
    observations = until_the_end(job, directory, roots, ranks=64)
    assert len(observations) == READS_AFTER_END + 1
    assert saved(observations) == ["c7"]
    assert sum(len(cut(observation)) for observation in observations) == 1
    assert len(noted(observations[-1])) < streams.MOST_LINES + (64 + 1) * streams.LEAST_LINES


def test_end_of_a_cancelled_job_does_not_wait_for_its_flood(job: Job, directory: RunDirectory, roots: Roots) -> None:
    directory.append(events_stream(0, 0), 0, NOTE * 1000 + checkpoint(roots, 7))
    end(directory, "CANCELLED")
    assert seen(job, directory, roots)[0].nodes[0].exit is None
    (observation,) = until_the_end(job.evolve(desired=Desired.STOP), directory, roots)
    assert saved([observation]) == ["c7"]
    assert len(cut(observation)) == 1
    assert not observation.behind


def test_end_with_a_report_that_broke_off_is_no_skipping(job: Job, directory: RunDirectory, roots: Roots) -> None:
    directory.append(events_stream(0, 0), 0, NOTE * (streams.READ_LINES // 2 + 3) + b'{"type": "no')
    end(directory, "CANCELLED")
    (observation,) = until_the_end(job.evolve(desired=Desired.STOP), directory, roots)
    assert len(noted(observation)) == streams.READ_LINES // 2 + 3
    assert cut(observation) == []


def test_end_waits_only_for_streams_of_its_own_node(job: Job, directory: RunDirectory, roots: Roots) -> None:
    gang = job.evolve(attempt=job.live.evolve(shares=(Share(node_id="n"), Share(node_id="m"))))
    directory.append(events_stream(0, 0), 0, NOTE * 1000)
    (directory.path / "nodes/1").mkdir()
    for node in (0, 1):
        directory.put_document(exit_document(node), {"reason": "SUCCEEDED", "message": "m", "ended_at": 2.0})
    observation = observe_attempt(
        gang,
        directory,
        [Liveness.GONE, Liveness.GONE],
        ranks_per_node=1,
        roots=roots,
        endpoint=partial(endpoint_on_node, directory.request()),
    )
    assert [node.exit is not None for node in observation.nodes] == [False, True]


def test_metrics_flood_is_skipped_up_to_its_newest_lines(job: Job, directory: RunDirectory, roots: Roots) -> None:
    flood = b'{"step":1}\n' + b"{}\n" * (1 << 19)
    last = b'{"step":7,"values":{"loss":0.5}}\n'
    directory.append(metrics_stream(0, 0), 0, flood + last)
    began = time.thread_time()
    observation, job = seen(job, directory, roots)
    assert time.thread_time() - began < 1.0  # every line of it takes several seconds
    assert observation.progress is not None
    assert (observation.progress.step, observation.progress.metrics) == (7, {"loss": 0.5})
    assert observation.offsets[metrics_stream(0, 0)] == len(flood + last)
    assert not observation.behind
    directory.append(metrics_stream(0, 0), len(flood + last), b'{"step":8}\n{"step"')
    observation, job = seen(job, directory, roots)
    assert observation.progress is not None
    assert observation.progress.step == 8


def test_line_nested_too_deeply_is_passed_over(job: Job, directory: RunDirectory, roots: Roots) -> None:
    deep = b'{"type": "note", "message": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n"
    directory.append(events_stream(0, 0), 0, deep + b'{"type": "note", "message": "after"}\n')
    assert noted(seen(job, directory, roots)[0]) == ["after"]


def test_rank_cannot_speak_for_its_worker(job: Job, directory: RunDirectory, roots: Roots) -> None:
    kinds: list[object] = ["started", "ready", "stacks", "claimed", "capable", "finished", ["note"], None, "phase"]
    lines = b"".join(json.dumps({"type": kind}).encode() + b"\n" for kind in kinds)
    directory.append(events_stream(0, 0), 0, lines)
    observation, _ = seen(job, directory, roots)
    assert [record["type"] for record in observation.nodes[0].records] == ["capable", "finished", "phase"]


@pytest.mark.parametrize("t", [10**400, float("nan"), 1e300, "now", None, [1]])
def test_time_that_is_none_keeps_nothing_from_being_read(
    t: object, job: Job, directory: RunDirectory, roots: Roots
) -> None:
    record = json.dumps({"type": "note", "t": t, "message": "m"}).encode() + b"\n"
    directory.append(events_stream(0, 0), 0, record)
    assert noted(seen(job, directory, roots)[0]) == ["m"]


@pytest.mark.parametrize("path", [None, 3, "a\0b", "/elsewhere", "\ud800"])
def test_checkpoint_somewhere_else_is_noted(path: object, job: Job, directory: RunDirectory, roots: Roots) -> None:
    record = {"type": "checkpoint", "checkpoint_id": "c", "path": path}
    directory.append(events_stream(0, 0), 0, json.dumps(record).encode() + b"\n")
    (message,) = noted(seen(job, directory, roots)[0])
    assert "not registered" in message


@pytest.mark.parametrize(
    ("root", "path"),
    [
        (ARTIFACTS, "another/checkpoints/c"),
        (ARTIFACTS, "j/output"),
        (ARTIFACTS, "j/checkpoints"),
        (ARTIFACTS, "j/checkpoints/a/b"),
        (ARTIFACTS, "j/checkpoints/../../another/checkpoints/c"),
        (RUNS, "j/1"),
        (BLOBS, "a/b"),
    ],
)
def test_checkpoint_that_is_not_the_jobs_own_is_noted(
    root: str, path: str, job: Job, directory: RunDirectory, roots: Roots
) -> None:
    record = {"type": "checkpoint", "checkpoint_id": "c", "path": f"{roots.path(root, '')}/{path}"}
    directory.append(events_stream(0, 0), 0, json.dumps(record).encode() + b"\n")
    (message,) = noted(seen(job, directory, roots)[0])
    assert "not registered" in message


def test_metrics_are_kept_of_no_more_than_the_latest_names(job: Job, directory: RunDirectory, roots: Roots) -> None:
    records = [{"step": step, "values": {"loss": step, f"at-{step}": 1.0}} for step in range(300)]
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    progress = progress_after(lines, job, directory, roots)
    assert progress is not None
    assert progress.metrics["loss"] == 299
    assert set(progress.metrics) == {"loss"} | {f"at-{step}" for step in range(101, 300)}


def test_metrics_that_are_no_numbers_do_not_hide_the_others(job: Job, directory: RunDirectory, roots: Roots) -> None:
    line = b'{"step": 2, "percent": 1e9, "eta_s": NaN, "epoch": "x", "values": {"a": NaN, "b": "x", "c": 1}}\n'
    progress = progress_after(line, job, directory, roots)
    assert progress == JobProgress(step=2, metrics={"c": 1.0})


def service(job: Job, directory: RunDirectory, roots: Roots, endpoint: object) -> str | None:
    directory.append(worker_stream(0), 0, b'{"t": 1, "type": "ready"}\n')
    (directory.path / endpoint_document(0)).write_text(json.dumps(endpoint))
    return seen(job.evolve(lifetime=Lifetime.SERVICE), directory, roots)[0].nodes[0].endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        {"x": 1},
        [],
        {"host": "h", "port": "80"},
        {"host": "h", "port": 0},
        {"host": "h", "port": 70000},
        {"host": "", "port": 80},
        {"host": ["h"], "port": 80},
        {"host": "h/@x", "port": 80},
        {"host": "h\ud800", "port": 80},
    ],
)
def test_endpoint_that_makes_no_sense_is_none(
    endpoint: object, job: Job, directory: RunDirectory, roots: Roots
) -> None:
    assert service(job, directory, roots, endpoint) is None


def test_endpoint_is_read_when_the_service_is_ready(job: Job, directory: RunDirectory, roots: Roots) -> None:
    assert service(job, directory, roots, {"host": "127.0.0.1", "port": 80}) == "127.0.0.1:80"


def test_endpoint_that_arrives_late_is_found(job: Job, directory: RunDirectory, roots: Roots) -> None:
    ready = job.evolve(lifetime=Lifetime.SERVICE, attempt=job.live.evolve(started=frozenset({0})))
    assert seen(ready, directory, roots)[0].nodes[0].endpoint is None
    (directory.path / endpoint_document(0)).write_text('{"host": "127.0.0.1", "port": 80}')
    assert seen(ready, directory, roots)[0].nodes[0].endpoint == "127.0.0.1:80"


BY_ENGINE = {"reason": "PREEMPTED", "stop_cause": "engine", "message": "stopped", "ended_at": 1000.0}
BY_SIGNAL = {"reason": "KILLED_BY_SIGNAL", "signal": "SIGTERM", "message": "killed", "ended_at": 1000.0}
BY_ITSELF = {"reason": "EXITED_NONZERO", "exit_code": 1, "message": "failed", "ended_at": 1000.0}


@pytest.mark.parametrize(
    ("ended", "loss", "alive", "reason"),
    [
        (BY_ENGINE, Reason.TIMEOUT, Liveness.ALIVE, "TIMEOUT"),
        (BY_SIGNAL, Reason.EVICTED, Liveness.ALIVE, "EVICTED"),
        (BY_ENGINE, Reason.WORKER_LOST, Liveness.ALIVE, "WORKER_LOST"),  # no reason of an engine
        (BY_SIGNAL, Reason.WORKER_LOST, Liveness.ALIVE, "KILLED_BY_SIGNAL"),
        (BY_ITSELF, Reason.EVICTED, Liveness.ALIVE, "EXITED_NONZERO"),
        (None, Reason.NODE_LOST, Liveness.GONE, "NODE_LOST"),
        (None, Reason.NODE_LOST, Liveness.UNKNOWN, None),
        (BY_ENGINE, None, Liveness.ALIVE, None),  # the engine has not said why yet
    ],
)
def test_end_that_the_worker_cannot_explain_has_the_engines_reason(
    job: Job,
    directory: RunDirectory,
    roots: Roots,
    ended: dict[str, object] | None,
    loss: Reason | None,
    alive: Liveness,
    reason: str | None,
) -> None:
    if ended is not None:
        directory.put_document(exit_document(0), ended)

    def look(now: float) -> AttemptObservation:
        return observe_attempt(
            job,
            directory,
            [alive],
            ranks_per_node=1,
            roots=roots,
            endpoint=partial(endpoint_on_node, directory.request()),
            loss=lambda _: None if loss is None else Loss(reason=loss, message="the engine's words"),
            now=lambda: now,
        )

    (seen,) = look(1001.0).nodes
    assert (seen.exit or {}).get("reason") == reason
    if ended is not None and loss is None:
        assert seen.liveness is Liveness.UNKNOWN
        # An engine that never says why does not keep the attempt for ever.
        assert (look(1000.0 + LOSS_WITHIN_S + 1).nodes[0].exit or {})["reason"] == "PREEMPTED"


@pytest.mark.parametrize(
    ("ended", "reason"), [(BY_ENGINE, "TIMEOUT"), (BY_SIGNAL, "KILLED_BY_SIGNAL"), (None, "WORKER_LOST")]
)
def test_reason_of_a_stop_is_for_workers_that_the_engine_told_to_stop(
    job: Job, directory: RunDirectory, roots: Roots, ended: dict[str, object] | None, reason: str
) -> None:
    if ended is not None:
        directory.put_document(exit_document(0), ended)
    stopped = Loss(reason=Reason.TIMEOUT, message="it was out of time")
    observed = observe_attempt(
        job,
        directory,
        [Liveness.GONE],
        ranks_per_node=1,
        roots=roots,
        endpoint=partial(endpoint_on_node, directory.request()),
        loss=lambda _: Loss(reason=Reason.WORKER_LOST, message="it ended", if_stopped=stopped),
    )
    assert (observed.nodes[0].exit or {})["reason"] == reason
