"""Who is preempted and who is not, and drains: the victim saves in its grace period, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from local_servers import LocalServer, over
from real_server import wait_for
from saving_program import TRAINS, latest_checkpoint, number_after, wait_until_it_can_save

pytestmark = over("files")  # who makes room for whom is decided by the server

BOTH_GPUS = {"gpu_count": 2}


@pytest.fixture(scope="module")
def simulated_gpus() -> str:
    return "H100-80GB:2"


def start_victim(server: LocalServer, *arguments: object, **scheduling: Any) -> str:
    job_id = server.submit_source(
        TRAINS, *arguments, resource_config=BOTH_GPUS, scheduling_config={"priority": 2, **scheduling}
    )
    wait_until_it_can_save(server, job_id)
    return job_id


def test_preempted_job_that_is_not_tried_again_ends_and_its_successor_goes_on_where_it_was(server: LocalServer) -> None:
    victim = start_victim(server, preemptible=True)
    urgent = server.submit("sleep", "0.5", resource_config=BOTH_GPUS, scheduling_config={"priority": 9})
    assert server.until(urgent)["status"] == "COMPLETED"
    job = server.until(victim, "PREEMPTED")
    saved = latest_checkpoint(job)
    assert saved["step"] == number_after(server, victim, "stopped at")
    successor = server.control(victim, "retry")["job_id"]
    assert number_after(server, successor, "begins at") == saved["step"]


def test_job_that_is_not_preemptible_keeps_its_gpus(server: LocalServer) -> None:
    holder = start_victim(server)
    urgent = server.submit("true", resource_config=BOTH_GPUS, scheduling_config={"priority": 10})
    server.until(urgent, "QUEUED")
    follower = server.submit("true")
    assert server.until(follower)["status"] == "COMPLETED"  # several passes later
    assert server.job(urgent)["status"] == "QUEUED"
    server.control(holder, "cancel")
    assert server.until(urgent)["status"] == "COMPLETED"


def test_job_that_ignores_its_grace_period_is_killed_and_goes_on_from_its_last_checkpoint(server: LocalServer) -> None:
    victim = server.submit_source(
        TRAINS,
        *("--ignore-stops", "--save-every", 20),
        workload={"grace_period_s": 1},
        resource_config=BOTH_GPUS,
        scheduling_config={"priority": 2, "preemptible": True, "max_retries": 1},
    )
    wait_for(lambda: server.job(victim)["checkpoints"], "a checkpoint")
    urgent = server.submit("true", resource_config=BOTH_GPUS, scheduling_config={"priority": 9})
    assert server.until(urgent)["status"] == "COMPLETED"
    server.wait_for_event(victim, "grace_missed")
    wait_for(lambda: server.job(victim)["attempt"] == 2 and server.lines(victim, attempt=2), "the second attempt")
    begins = number_after(server, victim, "begins at", attempt=2)
    assert begins > 0
    assert begins % 20 == 0


def test_drained_node_takes_no_work_and_is_emptied_by_force(server: LocalServer) -> None:
    holder = start_victim(server, max_retries=1)
    (node,) = server.data("GET", "/v1/nodes")["nodes"]
    server.data("POST", f"/v1/nodes/{node['id']}/drain", {"reason": "new fan"})
    waiting = server.submit("true")
    wait_for(lambda: server.data("GET", f"/v1/nodes/{node['id']}")["state"] == "DRAINING")
    assert server.job(holder)["status"] == "TRAINING"
    assert server.job(waiting)["status"] == "QUEUED"

    server.data("POST", f"/v1/nodes/{node['id']}/drain", {"reason": "new fan", "force": True})
    wait_for(lambda: server.data("GET", f"/v1/nodes/{node['id']}")["state"] == "DRAINED", "the node to be empty")
    job = server.job(holder)
    assert job["status"] == "QUEUED"
    assert "new fan" in server.events_of(holder, "preempting")[0]["message"]
    saved = latest_checkpoint(job)["step"]

    server.data("POST", f"/v1/nodes/{node['id']}/enable")
    assert server.until(waiting)["status"] == "COMPLETED"
    server.until(holder, "TRAINING")
    wait_for(lambda: server.lines(holder, attempt=2), "the second attempt's first line")
    assert number_after(server, holder, "begins at", attempt=2) == saved
