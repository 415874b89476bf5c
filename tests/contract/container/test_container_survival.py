"""What containers outlive: the server; and what several of them do together."""

from __future__ import annotations

import json
import os
from pathlib import Path

from container_servers import PACKAGES, ContainerServer
from real_server import wait_for

COUNTING = """
import time
from trainmaster.jobs import report
for step in range(1, 41):
    time.sleep(0.1)
    print("step", step, flush=True)
    report.metrics(step=step, total_steps=40, loss=1 / step)
with report.checkpoint(step=40) as directory:
    (directory / "state.txt").write_text("done")
report.finished()
"""

SAVING = """
import time
from trainmaster.jobs import report
path = report.resume_path()
start = int((path / "state.txt").read_text()) if path else 0
print("from", start, flush=True)
for step in range(start + 1, 10_000):
    time.sleep(0.05)
    report.metrics(step=step, total_steps=10_000, loss=1 / step)
    if stop := report.stop_requested():
        if stop.save:
            with report.checkpoint(step=step) as directory:
                (directory / "state.txt").write_text(str(step))
        report.exit_stopped()
"""

MEETING = """
import os, socket
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
met = f"{os.environ['MASTER_ADDR']} {socket.gethostname()}"
print("sum", value.item(), "of", dist.get_world_size(), "at", met, flush=True)
dist.destroy_process_group()
"""


def test_a_container_outlives_a_server_that_is_killed_and_is_found_again(container_server: ContainerServer) -> None:
    server = container_server
    job_id = server.run("python3", "-c", COUNTING)
    server.wait_for_line(job_id, "step 5")
    names = server.containers(job_id)
    server.kill()
    assert server.containers(job_id) == names
    server.start()
    job = server.until(job_id)
    assert job["status"] == "COMPLETED"
    assert len(job["attempts"]) == 1
    assert server.lines(job_id) == [f"step {step}" for step in range(1, 41)]
    assert job["progress"]["step"] == 40
    checkpoints = server.data("GET", f"/v1/jobs/{job_id}/checkpoints")["checkpoints"]
    assert [each["step"] for each in checkpoints] == [40]
    server.wait_until_cleared(job_id)


def test_a_container_that_ended_while_no_server_ran_is_taken_in_and_removed(container_server: ContainerServer) -> None:
    server = container_server
    job_id = server.run("python3", "-c", "import time; print('up', flush=True); time.sleep(1); print('end')")
    server.wait_for_line(job_id, "up")
    server.kill()
    try:
        (name,) = server.containers(job_id)
        wait_for(lambda: server.engine.podman("inspect", "--format", "{{.State.Running}}", name) == "false", "its end")
    finally:
        server.start()
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.lines(job_id) == ["up", "end"]
    server.wait_until_cleared(job_id)


def test_a_paused_job_goes_on_from_its_checkpoint_in_another_container(container_server: ContainerServer) -> None:
    server = container_server
    job_id = server.run("python3", "-c", SAVING)
    wait_for(lambda: (server.job(job_id)["progress"] or {}).get("step"), "its first step")
    server.data("POST", f"/v1/jobs/{job_id}/pause")
    server.until(job_id, "PAUSED")
    server.wait_until_cleared(job_id)
    server.data("POST", f"/v1/jobs/{job_id}/resume")
    # Of a job with several attempts, the log of the last one is shown.
    saved = server.data("GET", f"/v1/jobs/{job_id}/checkpoints")["checkpoints"][0]["step"]
    wait_for(lambda: server.lines(job_id) == [f"from {saved}"], f"a start from step {saved}")
    server.data("POST", f"/v1/jobs/{job_id}/cancel")
    server.until(job_id)


def test_nodes_of_a_gang_meet_by_name_on_a_network_of_their_own(container_server: ContainerServer) -> None:
    server = container_server
    workload = {
        "volumes": [{"source": str(PACKAGES), "target": "/packages", "read_only": True}],
        "environment": {"PYTHONPATH": "/packages", "OMP_NUM_THREADS": "1"},
    }
    job_id = server.run("python3", "-c", MEETING, workload=workload, resources={"node_count": 2})
    wait_for(lambda: len(server.containers(job_id)) == 3, "two containers and their network")
    job = server.until(job_id, timeout_s=100)
    assert job["status"] == "COMPLETED", json.dumps(job["error"])
    assert sorted(line for line in server.lines(job_id) if line.startswith("sum")) == [
        "sum 3.0 of 2 at node-0 node-0",
        "sum 3.0 of 2 at node-0 node-1",
    ]
    server.wait_until_cleared(job_id)


def test_a_gang_ends_as_a_whole_when_one_of_its_containers_is_killed(container_server: ContainerServer) -> None:
    server = container_server
    script = "import time; print('up', flush=True); time.sleep(600)"
    job_id = server.run("python3", "-c", script, resources={"node_count": 2})
    wait_for(lambda: server.lines(job_id).count("up") == 2, "both nodes")
    server.engine.podman("kill", next(name for name in server.containers(job_id) if name.endswith("-1")))
    job = server.until(job_id, timeout_s=90)
    assert (job["status"], job["error"]["error_type"]) == ("FAILED", "WORKER_LOST")
    server.wait_until_cleared(job_id)


def test_an_engine_that_does_not_answer_is_waited_for(container_server: ContainerServer) -> None:
    server = container_server
    job_id = server.run("python3", "-c", "import time; time.sleep(4)")
    server.until(job_id, "TRAINING")
    socket = Path(server.engine.host.removeprefix("unix://"))
    hidden = socket.with_name("hidden.sock")
    os.rename(socket, hidden)
    try:
        waits = server.run("true")
        wait_for(lambda: "no container engine" in str(server.job(waits)) or "answer" in str(server.job(waits)), "why")
        assert server.job(job_id)["status"] == "TRAINING"
    finally:
        os.rename(hidden, socket)
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.until(waits)["status"] == "COMPLETED"


def test_a_service_in_a_container_answers_through_the_server(container_server: ContainerServer) -> None:
    server = container_server
    script = (
        "from http.server import SimpleHTTPRequestHandler, test; import os\n"
        "test(SimpleHTTPRequestHandler, port=int(os.environ['PORT']), bind='127.0.0.1')"
    )
    workload = {"kind": "service", "argv": ["python3", "-c", script]}
    job_id = server.submit(workload=workload, resource_config={"gpu_count": 0})
    server.until(job_id, "TRAINING")
    answer = server.ask("GET", f"/v1/jobs/{job_id}/proxy/")
    assert (answer.status_code, "Directory listing" in answer.text) == (200, True)
    server.data("POST", f"/v1/jobs/{job_id}/cancel")
    assert server.until(job_id)["status"] == "CANCELLED"
    server.wait_until_cleared(job_id)


def test_account_with_a_user_of_its_own_runs_no_containers(container_server: ContainerServer) -> None:
    server = container_server
    server.data("PATCH", "/v1/accounts/default", {"uid": 12345})
    workload = {"kind": "container", "image": "localhost/missing:1"}

    def refusal() -> str | None:
        # For a few seconds the server goes by what it knew.
        answer = server.ask("POST", "/v1/jobs", {"name": "n", "workload": workload, "backend": "container"})
        return str(answer.json()["error"]["message"]) if answer.status_code == 400 else None

    try:
        message = wait_for(refusal, "the refusal")
        assert "could act as the server's own user; use the backend local" in message
    finally:
        server.data("PATCH", "/v1/accounts/default", {"uid": None})
