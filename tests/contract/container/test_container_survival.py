"""What an engine's networks and its absence do to jobs, and who may not run containers."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from container_engine import Engine, plain_image
from container_servers import ContainerServer
from real_server import wait_for
from trainmaster.backends import ContainerDefaults
from trainmaster.backends.base import NotYetError
from trainmaster.backends.container import ContainerBackend
from trainmaster.backends.container.engine import ContainerEngine as ClientOfEngine
from trainmaster.backends.local.fork_client import ForkServer
from trainmaster.backends.local.inventory import LocalInventory
from trainmaster.protocol.launch import Launch, LaunchStep, Lifetime
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import NO_SECRETS

MEETING = """
import os, socket, time
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(("", address[1])).accept()
else:
    while True:
        try:
            connection = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
connection.sendall(socket.gethostname().encode())
print("met", connection.recv(64).decode(), "at", address[0], flush=True)
time.sleep(600)
"""


@pytest.mark.long  # tests/contract/backends has gangs that meet
def test_nodes_of_a_gang_meet_by_name_on_a_network_of_their_own(container_server: ContainerServer) -> None:
    server = container_server
    job_id = server.run("python3", "-c", MEETING, resources={"node_count": 2})
    wait_for(lambda: len(server.lines(job_id)) == 2, "both nodes")
    assert sorted(server.lines(job_id)) == ["met node-0 at node-0", "met node-1 at node-0"]
    assert len(server.containers(job_id)) == 3  # and their network
    server.control(job_id, "cancel")
    assert server.until(job_id)["status"] == "CANCELLED"
    server.wait_until_cleared(job_id)


def test_an_engine_that_was_away_is_waited_for_and_costs_no_job_a_line(container_server: ContainerServer) -> None:
    server = container_server
    gate = server.home / "gate"
    gate.mkdir()
    workload = {"volumes": [{"source": str(gate), "target": "/gate", "read_only": True}]}
    counting = ("sh", "-c", "n=0; while [ ! -e /gate/open ]; do n=$((n + 1)); echo $n; sleep 0.1; done")
    # One has its worker in the container, the other outside of it.
    running = [
        server.run(*counting, workload={**workload, "image": image})
        for image in (server.image, plain_image(server.engine))
    ]
    for job_id in running:
        server.wait_for_line(job_id, "3")
    try:
        server.engine.stop()
        waits = server.run("true")
        wait_for(lambda: server.engine.host in (server.job(waits)["pending_reason"] or ""), "the reason why it waits")
        job = server.job(waits)
        assert (job["status"], job["attempts"][0]["reason"]) == ("QUEUED", "ENGINE_UNAVAILABLE")
        assert [server.job(job_id)["status"] for job_id in running] == ["TRAINING", "TRAINING"]
        written = len(server.lines(running[0]))
        wait_for(lambda: len(server.lines(running[0])) > written, "a line of a job that needs no engine")
    finally:
        server.engine.start()
    assert server.until(waits)["status"] == "COMPLETED"
    (gate / "open").touch()
    for job_id in running:
        job = server.until(job_id)
        assert (job["status"], len(job["attempts"])) == ("COMPLETED", 1)
        lines = server.lines(job_id)
        assert lines == [str(number) for number in range(1, len(lines) + 1)]
        server.wait_until_cleared(job_id)


class Slow(ForkServer):
    """Starts workers that nobody has seen yet."""

    def ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        self.within = order["within"]
        return {}


def test_a_service_that_is_launched_twice_keeps_its_port_and_no_plan_when_it_is_revoked(
    engine: Engine, tmp_path: Path
) -> None:
    runs, workers, job_id = tmp_path / "runs", Slow(tmp_path / "forkserver"), f"job-{uuid.uuid4().hex[:12]}"
    directory = RunDirectory(runs / job_id / "1")
    backend = ContainerBackend(
        engine=ClientOfEngine(engine.host),
        defaults=ContainerDefaults(pull_policy="Never"),
        inventory=LocalInventory(storage=tmp_path),
        run_directory=lambda _: directory,
        runs=runs,
        workers=tmp_path / "workers",
        passes_gpus=False,
        fork_server=workers,
    )
    request = AttemptRequest(
        job_id=job_id,
        attempt=1,
        token="",
        rank_token="",
        launch=Launch(
            kind="container",
            steps=(LaunchStep(name="main", argv=("serve",)),),
            image=plain_image(engine),
            lifetime=Lifetime.SERVICE,
        ),
        nodes=(NodeAssignment(node_id="a"),),
        checkpoint_dir=str(tmp_path / "artifacts" / job_id / "checkpoints"),
        output_dir=str(tmp_path / "artifacts" / job_id / "output"),
        owner_file=str(runs / job_id / "owner.json"),
    )
    directory.create(request)

    def submitted() -> str | None:
        with contextlib.suppress(NotYetError):  # the image is looked into
            return backend.submit(request, NO_SECRETS)
        return None

    ports = []
    for _ in range(2):
        wait_for(submitted, "the launch")
        (plan,) = (tmp_path / "workers/plans").iterdir()
        document = json.loads(plan.read_text())["containers"]["main"]["document"]
        assert list(document["ExposedPorts"]) == [f"{workers.within['port']}/tcp"]
        ports.append(workers.within["port"])
    assert ports[0] == ports[1] > 0
    backend.revoke(request)
    assert list((tmp_path / "workers/plans").iterdir()) == []
    backend.close()
    engine.podman("network", "rm", "--force", f"tm-{job_id}.1")


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
        assert "use the backend local" in message
    finally:
        server.data("PATCH", "/v1/accounts/default", {"uid": None})
        wait_for(lambda: refusal() is None, "the end of refusals")
