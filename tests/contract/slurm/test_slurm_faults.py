"""What Slurm does to jobs, and what happens to Slurm: preemption, limits, dead nodes, a controller that is away."""

from __future__ import annotations

import pytest
from slurm_programs import Programs

from slurm_cluster import CPUS, SlurmCluster, slurm_launch, wait_for, wait_for_phase
from trainmaster.backends.cluster.engine import EngineAwayError, EnginePhase
from trainmaster.backends.slurm.client import SlurmEngine
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.resources import NodeState

RUNNING, ENDED = EnginePhase.RUNNING, EnginePhase.ENDED


@pytest.mark.parametrize("partition", ["low", "graced"])
def test_preempted_worker_gets_sigterm_and_is_told_apart(
    cluster: SlurmCluster, instance: str, programs: Programs, partition: str
) -> None:
    engine = cluster.engine(instance, partition=partition)
    launch = programs.waiting(nodes=2, cpu_cores=CPUS)
    engine.start(launch)
    programs.wait_for_note("up", nodes=2)
    urgent = slurm_launch("urgent", "exit 0", nodes=2, cpu_cores=CPUS, job_id=f"job-{partition}")
    cluster.engine("urgent", partition="high").start(urgent)
    programs.wait_for_note("TERM", nodes=2)
    programs.go()
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    # A worker that ends within the grace time of the partition ends by itself.
    expected = {"low": (Reason.PREEMPTED,), "graced": (Reason.PREEMPTED, Reason.WORKER_LOST)}[partition]
    assert loss.reason in expected
    wait_for_phase(cluster.engine("urgent", partition="high"), urgent.name, ENDED)


def test_time_limit_comes_after_a_sigterm(cluster: SlurmCluster, engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.waiting(max_runtime_s=600.0, grace_s=60.0)
    handle = engine.start(launch)
    programs.wait_for_note("up")
    shown = cluster.scontrol("show", "job", handle)
    assert "TimeLimit=00:22:00" in shown
    # Slurm looks at limits twice a minute.
    cluster.scontrol("update", f"JobId={handle}", "EndTime=now+10")
    programs.wait_for_note("TERM")
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.TIMEOUT


def test_deadline_of_a_waiting_job_is_told_apart(
    cluster: SlurmCluster, engine: SlurmEngine, programs: Programs
) -> None:
    holder = programs.waiting(job_id="job-holder", nodes=2, cpu_cores=CPUS)
    engine.start(holder)
    programs.wait_for_note("up", nodes=2)
    launch = programs.waiting(cpu_cores=CPUS, max_runtime_s=600.0)
    handle = engine.start(launch)
    cluster.scontrol("update", f"JobId={handle}", "Deadline=now+60")
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert (loss.reason, "deadline" in loss.message) == (Reason.TIMEOUT, True)


def test_worker_over_its_memory_is_killed_and_says_so(engine: SlurmEngine, programs: Programs) -> None:
    eater = "import time; held = bytearray(600 << 20); time.sleep(3600)"
    launch = programs.launch(f"exec python3 -c '{eater}'")
    engine.start(launch)
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert (loss.reason, "out of memory" in loss.message) == (Reason.WORKER_LOST, True)


def test_job_that_an_administrator_cancels_is_told_apart(
    cluster: SlurmCluster, engine: SlurmEngine, programs: Programs
) -> None:
    launch = programs.waiting()
    handle = engine.start(launch)
    programs.wait_for_note("up")
    cluster.run("scancel", handle)
    programs.wait_for_note("TERM")
    programs.go()
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.ENGINE_CANCELLED


def test_held_job_says_how_it_is_released(cluster: SlurmCluster, engine: SlurmEngine, programs: Programs) -> None:
    holder = programs.waiting(job_id="job-holder", nodes=2, cpu_cores=CPUS)
    engine.start(holder)
    launch = programs.waiting(cpu_cores=CPUS)
    handle = engine.start(launch)
    cluster.scontrol("hold", handle)
    assert "scontrol release" in wait_for(lambda: engine.jobs()[launch.name].message, "the reason")


def test_requeued_job_ends_and_does_not_run_again(
    cluster: SlurmCluster, engine: SlurmEngine, programs: Programs
) -> None:
    launch = programs.waiting()
    handle = engine.start(launch)
    programs.wait_for_note("up")
    with pytest.raises(AssertionError, match="disabled"):
        cluster.scontrol("requeue", handle)
    cluster.scontrol("update", f"JobId={handle}", "Requeue=1")  # an administrator insists
    cluster.scontrol("requeuehold", handle)
    programs.wait_for_note("TERM")
    programs.go()
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert (loss.reason, "requeued on Slurm" in loss.message) == (Reason.ENGINE_CANCELLED, True)
    wait_for(lambda: "CANCELLED" in cluster.scontrol("show", "job", handle), "the end on Slurm")
    found = engine.find(launch.name)
    assert found is not None
    assert found.loss is not None
    assert found.loss.reason is Reason.ENGINE_CANCELLED
    assert programs.notes() == ["up", "TERM"]


def test_suspended_job_still_runs(cluster: SlurmCluster, engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.waiting()
    handle = engine.start(launch)
    programs.wait_for_note("up")
    cluster.scontrol("suspend", handle)
    job = wait_for(lambda: (found := engine.jobs()[launch.name]).message and found, "the suspension")
    assert (job.phase, "scontrol resume" in job.message) == (RUNNING, True)
    cluster.scontrol("resume", handle)


def test_dead_node_ends_the_job_and_is_named(cluster: SlurmCluster, engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.waiting(nodes=2)
    engine.start(launch)
    programs.wait_for_note("up", nodes=2)
    try:
        cluster.kill_node("n2")
        programs.wait_for_note("TERM")
        programs.go()
        loss = wait_for_phase(engine, launch.name, ENDED).loss
        assert loss is not None
        assert (loss.reason, "failed: n2" in loss.message) == (Reason.NODE_LOST, True)
        node = next(node for node in engine.nodes() if node.hostname == "n2")
        assert node.state is NodeState.OFFLINE
    finally:
        cluster.start_node("n2")
    found = engine.find(launch.name)
    assert found is not None
    assert found.loss == loss  # although the node is back


def test_jobs_outlive_the_controller_and_are_found_again(
    cluster: SlurmCluster, engine: SlurmEngine, programs: Programs
) -> None:
    launch = programs.waiting()
    handle = engine.start(launch)
    programs.wait_for_note("up")
    wait_for_phase(engine, launch.name, RUNNING)
    cluster.kill_controller(handle)
    try:
        with pytest.raises(EngineAwayError, match="controller"):
            engine.jobs()
        with pytest.raises(EngineAwayError):
            engine.start(programs.waiting(job_id="job-another"))
        assert "scontrol ping" in engine.facts().problem
        programs.go()  # it ends meanwhile
    finally:
        cluster.start_controller()
    assert wait_for_phase(engine, launch.name, ENDED).handle == handle
    assert engine.find(programs.waiting(job_id="job-another").name) is None


def test_controller_that_hangs_is_away(cluster: SlurmCluster, instance: str) -> None:
    hasty = SlurmEngine("hpc", instance, cluster.options(), timeout_s=1.0)
    cluster.pause_controller()
    try:
        with pytest.raises(EngineAwayError, match="has not answered after 1 s"):
            hasty.jobs()
    finally:
        cluster.resume_controller()


def test_absent_munge_is_a_problem_with_a_remedy(cluster: SlurmCluster, instance: str) -> None:
    engine = cluster.engine(instance)
    cluster.kill_munge()
    try:
        assert "start munged" in engine.facts().problem
        with pytest.raises(EngineAwayError, match="start munged"):
            engine.jobs()
    finally:
        cluster.start_munge()
    assert not engine.facts().problem


def test_job_that_the_controller_forgets_while_it_is_not_looked_at_ends(
    cluster: SlurmCluster, engine: SlurmEngine, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = programs.waiting()
    handle = engine.start(launch)
    wait_for_phase(engine, launch.name, RUNNING)
    monkeypatch.setattr(engine._access, "jobs", lambda *_: [])
    job = engine.jobs()[launch.name]
    assert (job.phase, job.handle) == (ENDED, handle)
    assert job.loss is not None
    assert "no accounting" in job.loss.message
    engine.forget(handle)
    assert not engine.jobs()
