"""A Slurm cluster that is reached by slurmrestd alone. `make test-long` runs all tests of the client by it too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_programs import Programs

from local_servers import quiet_port
from slurm_cluster import SlurmCluster, slurm_launch, wait_for, wait_for_phase
from slurm_servers import SlurmServer
from trainmaster.backends.cluster.engine import EngineAwayError, EnginePhase, EngineRefusedError
from trainmaster.backends.slurm.client import SlurmEngine
from trainmaster.protocol.reasons import Reason

RUNNING, ENDED = EnginePhase.RUNNING, EnginePhase.ENDED


@pytest.fixture
def rest(cluster: SlurmCluster, instance: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmEngine]:
    """A client on a machine without Slurm's programs."""
    engine = cluster.rest_engine(instance)
    monkeypatch.setenv("PATH", "/nonexistent")
    yield engine
    engine.close()


def test_job_gets_what_it_asks_for_and_is_cancelled(
    rest: SlurmEngine, cluster: SlurmCluster, programs: Programs
) -> None:
    script = (
        'echo "$HOME $USER $SLURM_CPUS_PER_TASK $CUDA_VISIBLE_DEVICES" >> env.$SLURM_NODEID\n'
        "trap 'echo TERM >> notes.$SLURM_NODEID; exit 0' TERM\n"
        "echo up >> notes.$SLURM_NODEID; while :; do sleep 0.2; done"
    )
    asked = {"gpus": 2, "gpu_type": "h100", "cpu_cores": 3, "storage_mb": 10, "capabilities": ("everywhere",)}
    launch = programs.launch(script, nodes=2, max_runtime_s=600.0, grace_s=60.0, priority=4, **asked)
    handle = rest.start(launch)
    assert rest.start(launch) == handle
    programs.wait_for_note("up", nodes=2)
    job = wait_for_phase(rest, launch.name, RUNNING)
    assert (job.handle, job.attempt_id, len(job.addresses)) == (handle, launch.request.attempt_id, 2)
    shown = cluster.scontrol("--details", "show", "job", handle)
    wanted = ("TimeLimit=00:22:00", "Requeue=0", "Nice=60", "CPUs/Task=3", "MinTmpDiskNode=10M", "Features=everywhere")
    assert [words for words in (*wanted, "MinMemoryNode=100M", "gpu:h100:2") if words not in shown] == []
    assert [(programs.directory / f"env.{node}").read_text().split()[:3] for node in (0, 1)] == [
        ["/root", "root", "3"]
    ] * 2
    # Slurm may still be taking back what an earlier job held.
    wait_for(lambda: held(rest) == {"n1": (2, 3), "n2": (2, 3)}, "Slurm to show what the job holds alone")
    rest.cancel(handle)
    loss = wait_for_phase(rest, launch.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.ENGINE_CANCELLED
    assert [programs.notes(node) for node in (0, 1)] == [["up", "TERM"]] * 2
    rest.cancel(handle)
    rest.cancel("4000000")


def held(engine: SlurmEngine) -> dict[str, tuple[int, int]]:
    return {node.hostname: (node.held_gpus, node.held_cpu_cores) for node in engine.nodes()}


def test_what_slurm_refuses_is_refused_with_a_remedy(cluster: SlurmCluster, instance: str, programs: Programs) -> None:
    engine = cluster.rest_engine(instance, constraint="no-such-feature")
    with pytest.raises(EngineRefusedError, match="as a feature"):
        engine.start(programs.waiting())
    engine.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"token": "no.such.token"}, "or the token of root is no good: make another"),
        ({"partition": "nowhere"}, "there are: brief, closed, graced, high, low"),
        ({"partition": "closed"}, "closed is DOWN"),
        ({"rest_url": "http://127.0.0.1:9"}, "see that slurmrestd runs there"),
    ],
)
def test_facts_have_every_problem_with_its_remedy(
    cluster: SlurmCluster, instance: str, changes: dict[str, str], says: str
) -> None:
    engine = cluster.rest_engine(instance, **changes)
    assert says in engine.facts().problem
    engine.close()


def test_expired_token_is_a_problem_before_anybody_is_asked(cluster: SlurmCluster, instance: str) -> None:
    token = cluster.token(lifespan_s=1)
    engine = cluster.rest_engine(instance, token=token)
    wait_for(lambda: "has expired: make another with `scontrol token" in engine.facts().problem, "the expiry")
    with pytest.raises(EngineAwayError, match="expired"):
        engine.start(slurm_launch(instance, "true"))
    engine.close()


def test_job_of_a_server_without_slurms_programs(shared_cluster: SlurmCluster, tmp_path: Path) -> None:
    server = SlurmServer(tmp_path / "data", shared_cluster, quiet_port())
    settings = server.directory / "config.toml"
    settings.write_text(settings.read_text().partition("[clusters.hpc]")[0].replace('["hpc"]', '["local"]'))
    server.environment["PATH"] = "/usr/local/nowhere"
    options = shared_cluster.rest_options(work_dir=server.slurm.options()["work_dir"], poll_s=0.2)
    try:
        server.start()
        server.data("PUT", "/v1/backends/hpc", {"kind": "slurm", "options": options})
        assert server.data("GET", "/v1/backends/hpc")["options"]["token"] == "***"
        workload = {"kind": "command", "argv": ["sh", "-c", "echo $HOME"]}
        asked = {"name": "n", "workload": workload, "backend": "hpc", "resource_config": {"gpu_count": 1}}
        job_id = server.data("POST", "/v1/jobs", asked)["job_id"]
        job = server.until(job_id)
        assert (job["status"], server.lines(job_id)) == ("COMPLETED", ["/root"]), job
    finally:
        server.clean_up()
