"""The same backend on docker's own engine, where it is installed: what engines do differently."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

import docker_engine
from container_engine import Engine, plain_image, python_image
from container_servers import ContainerServer
from docker_engine import running_docker
from real_server import wait_for
from registry_server import Registry, running_registry

if (reason := docker_engine.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)

GROWING = "held = [bytearray(8 << 20) for _ in range(64)]"
MEETING = """
import os, socket, time
other = f"node-{1 - int(os.environ['RANK'])}"
for _ in range(100):
    try: print(other, bool(socket.gethostbyname(other)), flush=True); break
    except OSError: time.sleep(0.1)
time.sleep(1)
"""
OBLIGING = (
    "import signal, sys, time\n"
    "def end(*_): print('saved', flush=True); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
)


@dataclass(frozen=True, slots=True)
class OnDocker:
    """A server with docker, and a registry for it."""

    server: ContainerServer
    plain: str
    registry: Registry


@pytest.fixture(scope="module")
def on_docker(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnDocker]:
    python, plain = python_image(engine), plain_image(engine)
    with contextlib.ExitStack() as stack:
        docker = stack.enter_context(running_docker())
        for image in (python, plain):
            docker.take(image, engine)
        registry = stack.enter_context(running_registry(engine, plain))
        server = ContainerServer(tmp_path_factory.mktemp("docker"), docker, python)
        stack.callback(server.clean_up)
        server.start()
        yield OnDocker(server, plain, registry)
        server.end_all_jobs()


def test_docker_runs_jobs_with_the_worker_inside_and_outside(on_docker: OnDocker) -> None:
    server = on_docker.server
    script = ("sh", "-c", "echo $RANK; echo wrong >&2; exit 9")
    for image in (server.image, on_docker.plain):
        job_id = server.run(*script, workload={"image": image})
        error = server.until(job_id)["error"]
        assert (error["error_type"], error["exit_code"]) == ("EXITED_NONZERO", 9)
        assert sorted(server.lines(job_id)) == ["0", "wrong"]
        server.wait_until_cleared(job_id)


def test_docker_tells_who_was_out_of_memory(on_docker: OnDocker) -> None:
    server = on_docker.server
    cases = [
        (("bash", "-c", "x=xxxxxxxx; while :; do x=$x$x; done"), on_docker.plain, "OUT_OF_MEMORY"),
        (("sh", "-c", "exit 137"), on_docker.plain, "KILLED_BY_SIGNAL"),
        (("python3", "-c", f"open('/proc/1/oom_score_adj', 'w').write('1000'); {GROWING}"), "", "OUT_OF_MEMORY"),
    ]
    limited = {"ram_min_mb": 64}
    jobs = [server.run(*argv, workload={"image": image or None}, resources=limited) for argv, image, _ in cases]
    ends = [server.until(job_id)["error"]["error_type"] for job_id in jobs]
    assert ends == [reason for _, _, reason in cases]


def test_docker_runs_a_gang_on_a_network_of_its_own_and_stops_when_told(on_docker: OnDocker) -> None:
    server = on_docker.server
    gang = server.run("python3", "-c", MEETING, resources={"node_count": 2})
    stopped = server.run("python3", "-c", OBLIGING)
    server.wait_for_line(stopped, "up")
    server.data("POST", f"/v1/jobs/{stopped}/cancel")
    assert server.until(stopped)["status"] == "CANCELLED"
    assert server.lines(stopped) == ["up", "saved"]
    assert server.until(gang)["status"] == "COMPLETED"
    assert sorted(server.lines(gang)) == ["node-0 True", "node-1 True"]
    server.wait_until_cleared()


def test_docker_pulls_and_its_refusals_are_told_apart(on_docker: OnDocker) -> None:
    server, registry = on_docker.server, on_docker.registry
    image = registry.put("greeter", "pulled")

    def submit(name: str) -> str:
        workload = {"kind": "container", "image": name, "container": {"pull_policy": "IfNotPresent"}}
        return server.submit(workload=workload, resource_config={"gpu_count": 0})

    there, absent, away = submit(image), submit(f"{registry.host}/absent:1"), submit("127.0.0.1:1/away:1")
    assert server.until(there)["status"] == "COMPLETED"
    assert server.lines(there) == ["pulled"]
    error = server.until(absent)["error"]
    assert error["error_type"] == "LAUNCH_REFUSED"
    assert "docker build" in error["error_message"]
    wait_for(lambda: "connection refused" in (server.job(away)["pending_reason"] or ""), "the reason why it waits")
    server.data("POST", f"/v1/jobs/{away}/cancel")
    assert server.until(away)["status"] == "CANCELLED"
