"""The client of a Ray cluster, against a real one: what starts, runs, waits, ends and is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from patience import PATIENCE_S
from ray_cluster import GPUS, HEAD, REGION, SECOND, TRIES, RayCluster, marked
from ray_launches import launch_of
from trainmaster.backends.cluster.engine import EngineAwayError, EngineJob, EngineLaunch, EnginePhase
from trainmaster.backends.ray import client
from trainmaster.backends.ray.client import RayEngine
from trainmaster.backends.ray.options import RayOptions, Spread
from trainmaster.protocol.reasons import Reason
from trainmaster.worker import bootstrap

pytestmark = pytest.mark.long  # a Ray cluster takes long to start, and much memory
Make = Callable[..., RayEngine]
ENDED, RUNNING, QUEUED = EnginePhase.ENDED, EnginePhase.RUNNING, EnginePhase.QUEUED

WRITE = """
import json, os, pathlib, signal, sys, time

directory = pathlib.Path(sys.argv[1])
node = os.environ["TRAINMASTER_NODE"]
def write(name, content):
    draft = directory / ("." + name + node)
    draft.write_text(json.dumps(content))
    draft.rename(directory / (name + node))
def stop(*_):
    write("stopped", time.time())
    time.sleep(float(sys.argv[2]))
    sys.exit(85)
signal.signal(signal.SIGTERM, stop)
write("started", {"pid": os.getpid(), **os.environ})
time.sleep(3600)
"""
"""A worker that runs until it is told to stop; it takes a while to save."""


def python(code: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *map(str, arguments))


def until(engine: RayEngine, name: str, holds: Callable[[EngineJob], object]) -> EngineJob:
    deadline = time.monotonic() + PATIENCE_S
    while not ((job := engine.jobs().get(name)) is not None and holds(job)):
        assert time.monotonic() < deadline, job
        assert job is None or job.phase is not ENDED, job
        engine.wait(0.2)
    return job


def until_ended(engine: RayEngine, *names: str) -> Mapping[str, EngineJob]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        jobs = engine.jobs()
        if all(name in jobs and jobs[name].phase is ENDED for name in names):
            return jobs
        assert time.monotonic() < deadline, jobs
        engine.wait(0.2)


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def written(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    eventually(path.exists)
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def start(engine: RayEngine, launch: EngineLaunch) -> str:
    handle = engine.start(launch)
    assert handle == launch.name
    return handle


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_programs_that_end_say_how(engine: RayEngine, make_engine: Make, instance: str) -> None:
    def launch(*command: str, **options: Any) -> EngineLaunch:
        return launch_of(*command, instance=instance, **options)

    good = start(engine, launch("true"))
    first = engine.find(good)
    assert first is not None
    assert (first.handle, first.attempt_id) == (good, good.removeprefix(f"tm-{instance}-").rpartition("-")[0] + ".1")
    bad = start(engine, launch("sh", "-c", "echo no such data >&2; exit 7"))
    old = start(engine, launch("sh", "-c", f"exit {bootstrap.TOO_OLD}"))
    absent = start(engine, launch("/no/such/python"))

    jobs = until_ended(engine, good, bad, old, absent)

    losses = {name: jobs[name].loss for name in jobs}
    assert {name: loss.reason for name, loss in losses.items() if loss is not None} == {
        good: Reason.WORKER_LOST,
        bad: Reason.WORKER_LOST,
        old: Reason.LAUNCH_REFUSED,
        absent: Reason.LAUNCH_REFUSED,
    }
    assert jobs[bad].message == "its worker ended by exit code 7: no such data"
    assert "older than 3.11" in jobs[old].message
    assert "no Python where it was expected" in jobs[absent].message
    for name in jobs:
        engine.forget(name)
        engine.forget(name)
    eventually(lambda: not engine.jobs())
    assert engine.find(good) is None


def test_two_trainmasters_on_one_cluster_leave_each_other_alone(
    make_engine: Make, instance: str, tmp_path: Path
) -> None:
    other = f"{instance}x"  # its names begin with the same letters
    own, others = make_engine(), make_engine(instance=other)
    mine = start(own, launch_of(*python(WRITE, tmp_path, 0), instance=instance))
    until(own, mine, lambda job: job.phase is RUNNING)
    theirs = start(others, launch_of("true", instance=other))
    until_ended(others, theirs)
    assert (own.jobs().keys(), others.jobs().keys()) == ({mine}, {theirs})
    assert (own.find(theirs), others.find(mine)) == (None, None)
    others.forget(theirs)
    eventually(lambda: not others.jobs())
    assert own.jobs()[mine].phase is RUNNING
    assert not (tmp_path / "stopped0").exists()


@pytest.mark.parametrize(
    ("driver", "says"), [("/no/such/python", "driver_python"), (sys.executable, "has no Ray")], ids=["none", "no Ray"]
)
def test_driver_that_cannot_begin_refuses_attempts_until_the_options_are_right(
    make_engine: Make, instance: str, driver: str, says: str
) -> None:
    wrong, right = make_engine(driver_python=driver), make_engine()
    first = start(wrong, launch_of("true", instance=instance))
    job = until_ended(wrong, first)[first]
    assert job.loss is not None
    assert job.loss.reason is Reason.LAUNCH_REFUSED
    assert says in job.message
    second = start(right, launch_of("true", instance=instance))
    until_ended(right, second)


def test_attempts_outlive_the_death_of_their_driver_and_are_followed_by_the_next(
    engine: RayEngine, cluster: RayCluster, instance: str, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = start(engine, launch_of(*python(WRITE, tmp_path / "first", 0), instance=instance, node_count=2))
    waits = start(engine, launch_of(instance=instance, gpus=100))
    until(engine, first, lambda job: job.phase is RUNNING)
    until(engine, waits, lambda job: "100 GPU" in job.message)
    pids = [written(tmp_path / "first", f"started{node}")["pid"] for node in (0, 1)]

    drivers = drivers_of(cluster, instance)
    assert drivers
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    second = start(engine, launch_of(*python(WRITE, tmp_path / "second", 0), instance=instance))
    until(engine, second, lambda job: job.phase is RUNNING)

    jobs = engine.jobs()
    assert (jobs[first].phase, jobs[waits].phase) == (RUNNING, QUEUED)
    assert [written(tmp_path / "first", f"started{node}")["pid"] for node in (0, 1)] == pids
    for name in (first, waits, second):
        engine.cancel(name)
    jobs = until_ended(engine, first, waits, second)
    assert {job.loss.reason for job in jobs.values() if job.loss is not None} == {Reason.ENGINE_CANCELLED}
    assert (tmp_path / "first" / "stopped1").exists()
    assert nothing_is_left(cluster, instance)


def drivers_of(cluster: RayCluster, instance: str) -> list[int]:
    """The processes of the head that follow the attempts of an instance."""
    found = []
    for pid in marked(f"TRAINMASTER_TEST_RAY={cluster.mark}-{HEAD}"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.startswith(f"gcs://trainmaster-{instance}-".encode()) for word in words):
                found.append(pid)
    return found


def nothing_is_left(cluster: RayCluster, instance: str) -> bool:
    """Of attempts; only ended groups and actors are still shown."""
    shown = [("actors", "DEAD"), ("placement_groups", "REMOVED")]
    for kind, over in shown:
        for each in cluster.get(f"/api/v0/{kind}", limit=10_000)["data"]["result"]["result"]:
            if each["name"].startswith(f"tm-{instance}-") and each["state"] != over:
                return False
    return True


def test_nodes_of_an_attempt_run_on_nodes_of_their_own(engine: RayEngine, instance: str, tmp_path: Path) -> None:
    launch = launch_of(*python(WRITE, tmp_path, 0), instance=instance, node_count=2, gpus=2, cpu_cores=1)
    name = start(engine, launch)
    job = until(engine, name, lambda job: job.phase is RUNNING)
    assert sorted(job.addresses.values()) == [HEAD, SECOND]
    assert (job.node_losses, job.loss) == ({}, None)

    variables = [written(tmp_path, f"started{node}") for node in (0, 1)]
    assert [each["TRAINMASTER_NODE"] for each in variables] == ["0", "1"]
    assert [each["TRAINMASTER_WORKER_TOKEN"] for each in variables] == ["secret-token"] * 2
    assert all(each["CUDA_VISIBLE_DEVICES"] == "0,1" for each in variables)
    assert not [key for each in variables for key in each if key.startswith("RAY_")]
    held = {node.address: (node.held_gpus, node.held_cpu_cores) for node in engine.nodes()}
    eventually(lambda: {node.held_gpus for node in engine.nodes()} == {2}), held

    engine.cancel(name)
    until_ended(engine, name)
    assert (tmp_path / "stopped0").exists()
    assert (tmp_path / "stopped1").exists()
    eventually(lambda: not any(is_alive(each["pid"]) for each in variables))


def test_secrets_are_not_shown_by_the_dashboard(
    engine: RayEngine, cluster: RayCluster, instance: str, tmp_path: Path
) -> None:
    name = start(engine, launch_of(*python(WRITE, tmp_path, 0), instance=instance))
    written(tmp_path, "started0")
    (driver,) = [each["submission_id"] for each in cluster.get("/api/jobs/") if instance in each["entrypoint"]]
    shown = [cluster.get(path) for path in ("/api/jobs/", f"/api/jobs/{driver}", f"/api/jobs/{driver}/logs")]
    shown += [cluster.get(f"/api/v0/{kind}", detail=1) for kind in ("actors", "tasks", "workers", "runtime_envs")]
    shown += [cluster.get("/logical/actors"), cluster.get("/nodes", view="summary")]
    assert name in json.dumps(shown)
    assert "secret-token" not in json.dumps(shown)
    package = f"{cluster.address}/api/packages/gcs/{name}.zip"
    eventually(lambda: httpx.get(package, timeout=PATIENCE_S).status_code == 404)
    engine.cancel(name)
    until_ended(engine, name)


def test_cancelled_worker_has_its_grace(engine: RayEngine, instance: str, tmp_path: Path) -> None:
    # Longer than the 3 s that Ray grants by itself.
    name = start(engine, launch_of(*python(WRITE, tmp_path, 5), instance=instance, grace_s=PATIENCE_S))
    pid = written(tmp_path, "started0")["pid"]
    until(engine, name, lambda job: job.phase is RUNNING)
    engine.cancel(name)
    engine.cancel(name)
    stopped_at = float(json.dumps(written(tmp_path, "stopped0")))
    job = until_ended(engine, name)[name]
    assert time.time() > stopped_at + 5
    assert job.loss is not None
    assert job.loss.reason is Reason.ENGINE_CANCELLED
    assert not is_alive(pid)
    engine.cancel(name)


def test_attempt_that_does_not_fit_waits_and_says_for_what(engine: RayEngine, make_engine: Make, instance: str) -> None:
    many = start(engine, launch_of(instance=instance, gpus=100, gpu_type="H100-80GB"))
    spread = start(engine, launch_of(instance=instance, node_count=3))
    job = until(engine, many, lambda job: "100 GPU" in job.message)
    assert job.phase is QUEUED
    assert "accelerator_type:H100" in job.message
    job = until(engine, many, lambda job: "not even empty" in job.message)
    job = until(engine, spread, lambda job: "3 times (1 CPU)" in job.message)
    assert job.phase is QUEUED

    engine.cancel(many)
    engine.cancel(spread)
    jobs = until_ended(engine, many, spread)
    assert {job.loss.reason for job in jobs.values() if job.loss is not None} == {Reason.ENGINE_CANCELLED}


def test_options_decide_where_the_nodes_run(make_engine: Make, instance: str, tmp_path: Path) -> None:
    for name in ("packed", "second", "labelled"):
        (tmp_path / name).mkdir()
    by_pack = make_engine(placement=Spread.STRICT_PACK)
    by_resource = make_engine(resources={"second_node": 0.1, "CPU": 0.1}, namespace="of-their-own")
    packed = by_pack.start(launch_of(*python(WRITE, tmp_path / "packed", 0), instance=instance, node_count=2))
    second = by_resource.start(launch_of(*python(WRITE, tmp_path / "second", 0), instance=instance))
    labelled = by_pack.start(
        launch_of(
            *python(WRITE, tmp_path / "labelled", 0),
            instance=instance,
            gpus=1,
            gpu_memory_min_mb=60_000,
            capabilities=(f"region={REGION}", "pool=b"),
        )
    )
    addresses = until(by_pack, packed, lambda job: job.phase is RUNNING).addresses
    assert addresses[0] == addresses[1]
    assert until(by_resource, second, lambda job: job.phase is RUNNING).addresses == {0: SECOND}
    assert until(by_pack, labelled, lambda job: job.phase is RUNNING).addresses == {0: SECOND}
    for name in (packed, second, labelled):
        by_pack.cancel(name)
    until_ended(by_pack, packed, second, labelled)


def test_attempt_is_found_by_its_name_and_never_started_twice(
    engine: RayEngine, make_engine: Make, cluster: RayCluster, instance: str, tmp_path: Path
) -> None:
    launch = launch_of(*python(WRITE, tmp_path, 0), instance=instance)
    name = start(engine, launch)
    restarted, other = make_engine(), make_engine(instance="another")
    found = eventually(lambda: restarted.find(name))  # once Ray has accepted it
    assert found.attempt_id == launch.request.attempt_id
    assert start(restarted, launch) == name
    assert list(restarted.jobs()) == [name]
    assert other.find(name) is None
    assert name not in other.jobs()
    pid = written(tmp_path, "started0")["pid"]
    start(engine, launch)
    until(restarted, name, lambda job: job.phase is RUNNING)
    assert written(tmp_path, "started0")["pid"] == pid

    cluster.remove_group(name)  # by somebody else
    job = until_ended(restarted, name)[name]
    assert job.loss is not None
    assert job.loss.reason is Reason.ENGINE_CANCELLED
    assert restarted.jobs()[name] == job
    restarted.forget(name)
    eventually(lambda: not restarted.jobs())
    assert restarted.find(name) is None


def test_many_attempts_are_listed_in_few_requests_and_wait_in_one_process(
    engine: RayEngine, cluster: RayCluster, instance: str
) -> None:
    names = [start(engine, launch_of(instance=instance, gpus=100)) for _ in range(60)]
    for name in names:
        until(engine, name, lambda job: "100 GPU" in job.message)
    requests: list[str] = []
    engine._ray._http.event_hooks = {"request": [lambda request: requests.append(request.url.path)]}
    assert engine.jobs().keys() == set(names)
    assert sorted(requests) == ["/api/jobs/", "/api/v0/logs/file", "/api/version", "/api/version"]
    assert len(drivers_of(cluster, instance)) == 1
    for name in names:
        engine.cancel(name)
    until_ended(engine, *names)
    assert nothing_is_left(cluster, instance)


def test_inventory_has_what_jobs_can_ask_for(engine: RayEngine, cluster: RayCluster) -> None:
    facts = engine.facts()
    assert facts.name.startswith("Ray 2.")
    assert (facts.host, facts.problem) == (cluster.address, "")
    nodes = {node.address: node for node in engine.nodes()}
    assert nodes.keys() == {HEAD, SECOND}
    second = nodes[SECOND]
    assert (second.node_id, second.backend, second.cpu_cores, second.ram_mb) == (f"ray:{SECOND}", "ray", 4, 3814)
    assert [(gpu.type, gpu.memory_mb) for gpu in second.gpus] == [("H100", 81920)] * GPUS
    assert {f"region={REGION}", "pool=b"} <= set(second.labels)
    assert {f"region={REGION}", "pool=b", "second_node"} <= second.tags


def test_head_that_does_not_answer_says_nothing_of_jobs(instance: str) -> None:
    engine = RayEngine("ray", instance, RayOptions(address="http://127.0.0.1:9"))
    for call in (engine.jobs, engine.nodes, lambda: engine.find("a"), lambda: engine.cancel("a")):
        with pytest.raises(EngineAwayError, match=r"127\.0\.0\.1:9"):
            call()
    with pytest.raises(EngineAwayError):
        engine.start(launch_of(instance=instance))
    assert "is the Ray cluster up" in engine.facts().problem
    engine.close()


def test_node_that_is_lost_is_reported_while_the_others_run(
    engine: RayEngine, cluster: RayCluster, instance: str, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    gang = start(engine, launch_of(*python(WRITE, tmp_path, 0), instance=instance, node_count=2))
    one = start(
        engine,
        launch_of(*python(WRITE, tmp_path / "one", 0), instance=instance, capabilities=("second_node",)),
    )
    addresses = until(engine, gang, lambda job: job.phase is RUNNING).addresses
    until(engine, one, lambda job: job.phase is RUNNING)
    pids = [written(tmp_path, f"started{node}")["pid"] for node in (0, 1)]
    lost = next(number for number, address in addresses.items() if address == SECOND)

    cluster.kill(SECOND)
    try:
        job = until(engine, gang, lambda job: job.node_losses)
        assert {number: loss.reason for number, loss in job.node_losses.items()} == {lost: Reason.NODE_LOST}
        assert job.phase is RUNNING
        job = until_ended(engine, one)[one]
        assert job.loss is not None
        assert job.loss.reason is Reason.NODE_LOST
        assert [node.address for node in engine.nodes()] == [HEAD]
        assert is_alive(pids[1 - lost])

        engine.cancel(gang)
        until_ended(engine, gang)
        eventually(lambda: not any(map(is_alive, pids)))
    finally:
        assert cluster.start_second()


def test_head_that_was_killed_is_away_and_then_has_lost_its_jobs(
    engine: RayEngine, cluster: RayCluster, instance: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = start(engine, launch_of(*python(WRITE, tmp_path, 0), instance=instance, capabilities=("second_node",)))
    waits = start(engine, launch_of(instance=instance, gpus=100))
    pid = written(tmp_path, "started0")["pid"]
    until(engine, name, lambda job: job.phase is RUNNING)
    until(engine, waits, lambda job: "100 GPU" in job.message)

    cluster.kill(HEAD)
    with pytest.raises(EngineAwayError):
        engine.jobs()
    with pytest.raises(EngineAwayError):
        engine.find(name)
    assert any(cluster.start_head() for _ in range(TRIES)), cluster.log(HEAD)

    jobs = engine.jobs()
    assert jobs[name].phase is RUNNING
    assert "restarted" in jobs[name].message
    assert jobs[waits].phase is ENDED
    eventually(lambda: not is_alive(pid))
    monkeypatch.setattr(client, "WORKERS_END_S", 0.0)
    lost = engine.jobs()[name]
    assert lost.phase is ENDED
    assert lost.loss is not None
    assert lost.loss.reason is Reason.NODE_LOST
    found = engine.find(name)
    assert found == lost
    engine.forget(name)
    assert engine.find(name) is None
    cluster.kill(SECOND)
    assert cluster.start_second()
    again = start(engine, launch_of("true", instance=instance, capabilities=("second_node",)))
    until_ended(engine, again)
