"""Whole jobs on a real Slurm cluster, and what Slurm, its administrators and its other users do to them."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from container_engine import missing as no_containers
from container_engine import python_image, running_engine
from local_servers import quiet_port
from real_server import ENDED, wait_for
from saving_program import TRAINS, latest_checkpoint, number_after, wait_until_it_can_save
from slurm_cluster import SlurmCluster
from slurm_servers import SlurmServer

AGAIN: dict[str, Any] = {"scheduling_config": {"max_retries": 2}}


@pytest.fixture(scope="module")
def shared_server(shared_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmServer]:
    server = SlurmServer(tmp_path_factory.mktemp("slurm-jobs") / "data", shared_cluster, quiet_port())
    try:
        server.start()
        yield server
    finally:
        server.clean_up()


@pytest.fixture
def server(shared_server: SlurmServer) -> Iterator[SlurmServer]:
    """After each test, no job is left."""
    yield shared_server
    shared_server.end_all_jobs()


def number_of(server: SlurmServer, job_id: str) -> str:
    """What Slurm calls the job, once it has it."""
    names = wait_for(lambda: server.jobs_on_cluster(job_id), f"{job_id} on the cluster")
    return server.cluster.run("squeue", "--noheader", f"--name={names[0]}", "--format=%A").strip()


def hold_all_nodes(cluster: SlurmCluster, *, partition: str, seconds: int = 600) -> str:
    """A job of somebody else that has the cluster for itself."""
    wrapped = ("--nodes=2", "--exclusive", "--output=/dev/null", f"--wrap=sleep {seconds}")
    return cluster.run("sbatch", "--parsable", f"--partition={partition}", *wrapped).strip()


def test_a_job_that_slurm_preempts_saves_and_continues_where_it_was(server: SlurmServer) -> None:
    job_id = server.submit_source(TRAINS, **AGAIN)
    wait_until_it_can_save(server, job_id)
    other = hold_all_nodes(server.cluster, partition="high", seconds=1)
    saved = number_after(server, job_id, "stopped at", attempt=1)
    server.wait_for_event(job_id, "resumed")
    assert number_after(server, job_id, "begins at", attempt=2) == saved
    job = server.until(job_id, "TRAINING")
    assert [attempt["reason"] for attempt in job["attempts"]] == ["PREEMPTED", None]
    assert (job["preemptions_used"], job["retries_used"]) == (1, 0)
    assert latest_checkpoint(job)["step"] >= saved
    server.cluster.run("scancel", other)


def preempted(server: SlurmServer, job_id: str) -> Any:
    """The job, once it was; one that has ended will not be."""
    job = server.job(job_id)
    assert job["status"] not in ENDED, server.events(job_id)
    return job if job["preemptions_used"] else None


@pytest.fixture(scope="module")
def told(shared_server: SlurmServer) -> SlurmServer:
    """The server, with clusters whose partitions give jobs time to end before they make room, or a short time limit."""
    for partition in ("graced", "short"):
        options = {**shared_server.slurm.options(), "partition": partition}
        shared_server.data("PUT", f"/v1/backends/{partition}", {"kind": "slurm", "options": options})
    return shared_server


def test_jobs_that_make_room_within_their_grace_time_were_preempted(told: SlurmServer, server: SlurmServer) -> None:
    """Slurm calls them completed: they ended by themselves, whether they know how to stop or fail."""
    saves = server.submit_source(TRAINS, backend="graced", **AGAIN)
    fails = server.submit("sh", "-c", "trap 'exit 3' TERM; echo up; sleep 600 & wait", backend="graced", **AGAIN)
    wait_until_it_can_save(server, saves)
    server.wait_for_line(fails, "up")
    other = hold_all_nodes(server.cluster, partition="high", seconds=1)
    saved = number_after(server, saves, "stopped at", attempt=1)
    server.wait_for_event(saves, "resumed")
    assert number_after(server, saves, "begins at", attempt=2) == saved
    for job_id in (saves, fails):
        job = wait_for(lambda job_id=job_id: preempted(server, job_id), "the preemption")
        assert job["attempts"][0]["reason"] == "PREEMPTED"
        assert "Slurm gave its nodes to a job of a higher priority" in job["attempts"][0]["message"]
        assert job["retries_used"] == 0
    server.cluster.run("scancel", other)


def test_jobs_at_the_time_limit_of_their_partition_say_so(told: SlurmServer, server: SlurmServer) -> None:
    """Without max_runtime_seconds, Slurm's limit is the only one."""
    saves = server.submit_source(TRAINS, backend="short")
    fails = server.submit("sh", "-c", "trap 'exit 3' TERM; sleep 600 & wait", backend="short")
    obeys = server.submit("sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait", backend="short")
    sleeps = server.submit("sleep", "600", backend="short")
    for job_id in (saves, fails, obeys, sleeps):
        job = server.until(job_id)
        assert (job["status"], job["attempts"][-1]["reason"]) == ("FAILED", "TIMEOUT"), job
        assert "max_runtime_seconds or the option time" in job["attempts"][-1]["message"]
    assert latest_checkpoint(server.job(saves))["step"] > 0


def test_a_job_that_somebody_cancels_on_slurm_says_so_and_is_tried_again(server: SlurmServer) -> None:
    job_id = server.submit_source(TRAINS, "--save-every", 20, **AGAIN)
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    server.cluster.run("scancel", number_of(server, job_id))
    server.wait_for_event(job_id, "resumed")
    assert number_after(server, job_id, "begins at", attempt=2) > 0
    job = server.job(job_id)
    assert job["attempts"][0]["reason"] == "ENGINE_CANCELLED"
    assert "cancelled" in job["attempts"][0]["message"]


def test_a_job_waits_in_slurms_queue_with_its_reason_and_is_withdrawn_from_there(server: SlurmServer) -> None:
    other = hold_all_nodes(server.cluster, partition="low")
    job_id = server.submit("true")
    wait_for(lambda: "Resources" in (server.job(job_id)["status_message"] or ""), "Slurm's reason")
    assert server.job(job_id)["status"] == "SCHEDULING"
    server.control(job_id, "cancel")
    assert server.until(job_id)["status"] == "CANCELLED"
    wait_for(lambda: not server.jobs_on_cluster(job_id), "the withdrawal")
    server.cluster.run("scancel", other)


def test_jobs_in_slurms_queue_survive_the_server_and_start_once(server: SlurmServer) -> None:
    other = hold_all_nodes(server.cluster, partition="low")
    jobs = [server.submit("sh", "-c", "echo once") for _ in range(3)]
    for job_id in jobs:
        number_of(server, job_id)
    server.kill()
    server.cluster.run("scancel", other)
    server.start()
    for job_id in jobs:
        assert server.until(job_id)["status"] == "COMPLETED"
        assert server.lines(job_id, attempt="all") == ["once"]
        assert [attempt["reason"] for attempt in server.job(job_id)["attempts"]] == ["SUCCEEDED"], server.events(job_id)


def test_a_controller_that_is_away_ends_no_job(server: SlurmServer) -> None:
    job_id = server.submit_source(TRAINS, "--steps", 2000)
    wait_until_it_can_save(server, job_id)
    handle = number_of(server, job_id)
    server.cluster.kill_controller(handle)
    wait_for(lambda: "does not answer" in server.log_text(), "the server to miss the controller")
    assert server.job(job_id)["status"] in ("TRAINING", "COMPLETED")
    server.cluster.start_controller()
    job = server.until(job_id)
    assert (job["status"], len(job["attempts"])) == ("COMPLETED", 1)


def test_what_no_node_could_hold_is_refused_at_once(server: SlurmServer) -> None:
    asked = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}, "resource_config": {"gpu_count": 16}}
    answer = server.ask("POST", "/v1/jobs", asked)
    assert answer.status_code == 400
    assert "the largest has 4" in answer.text


def test_a_gang_that_needs_more_nodes_than_the_partition_has_is_refused_at_once(server: SlurmServer) -> None:
    wait_for(lambda: server.data("GET", "/v1/nodes")["nodes"], "the nodes")
    for resources, told in (
        ({"gpu_count": 0, "node_count": 3}, "hpc has 2 nodes that could hold one. Ask for at most 2 nodes"),
        ({"gpu_count": 2, "node_count": 2, "gpu_type": "a100"}, "hpc has 1 node that could hold one"),
    ):
        asked = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}, "resource_config": resources}
        answer = server.ask("POST", "/v1/jobs", asked)
        assert answer.status_code == 400
        assert told in answer.text


def test_a_job_for_a_cluster_that_has_never_answered_says_so_and_runs_when_it_does(server: SlurmServer) -> None:
    server.cluster.kill_controller()
    try:
        server.data("PUT", "/v1/backends/later", {"kind": "slurm", "options": {**server.slurm.options()}})
        job_id = server.submit("true", backend="later", resource_config={"gpu_count": 0, "node_count": 2})
        message = wait_for(
            lambda: (why := server.job(job_id)["pending"]) and "has not answered" in why["message"] and why["message"],
            "the explanation",
        )
        assert "Slurm's controller does not answer" in message
        assert message.endswith("and the job waits until it does")
    finally:
        server.cluster.start_controller()
    assert server.until(job_id)["status"] == "COMPLETED"


def test_a_dry_run_shows_the_script_without_the_token(server: SlurmServer) -> None:
    asked = {"name": "n; rm -rf /", "workload": {"kind": "command", "argv": ["true"]}}
    rendered = server.data("POST", "/v1/jobs/validate?render=true", asked)["rendered"]
    assert rendered.startswith("#!/bin/sh\n#SBATCH --job-name=tm-")
    assert "rm -rf" not in rendered
    assert server.jobs_on_cluster() == []


def test_doctor_examines_the_cluster(server: SlurmServer) -> None:
    command = [sys.executable, "-m", "trainmaster", "doctor", "--json"]
    variables = {"TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key}

    def examined() -> dict[str, tuple[str, str]]:
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
        return {each["check"]: (each["verdict"], each["found"]) for each in json.loads(done.stdout)}

    # After a restart of the controller its nodes do not answer it at once.
    wait_for(lambda: examined().get("hpc: nodes") == ("ok", "2 of 2 usable, with 8 GPUs"), "both nodes")
    found = examined()
    assert found["hpc"][0] == "ok"
    assert found["hpc"][1].endswith("test, partition low")
    assert found["hpc: workers"] == ("ok", f"reach the server at {server.url}")


@pytest.fixture(scope="module")
def people(shared_server: SlurmServer) -> SlurmServer:
    """The server, with a cluster whose users the accounts' jobs are submitted as."""
    options = {**shared_server.slurm.options(), "account_users": True}
    for directory in (options["work_dir"], options["output_dir"]):
        Path(directory).mkdir(exist_ok=True)
        Path(directory).chmod(0o1777)
    shared_server.data("PUT", "/v1/backends/people", {"kind": "slurm", "options": options})
    return shared_server


class Tenant(SlurmServer):
    """The server, as an account with this user sees it."""

    key = ""

    def __init__(self, server: SlurmServer, account: str, uid: int | None) -> None:
        self.__dict__.update(server.__dict__)
        server.data("POST", "/v1/accounts", {"account_id": account, "uid": uid})
        body = {"account_id": account, "name": "test", "scopes": ["view", "manage"]}
        self.key = server.data("POST", "/v1/keys", body)["key"]


def test_jobs_of_an_account_with_a_uid_are_submitted_as_that_user(people: SlurmServer) -> None:
    nobody = pwd.getpwnam("nobody")
    tenant = Tenant(people, "vision", nobody.pw_uid)
    job_id = tenant.submit("sh", "-c", "id -un; echo $HOME; sleep 600", backend="people")
    tenant.wait_for_line(job_id, nobody.pw_dir)
    assert tenant.lines(job_id) == ["nobody", nobody.pw_dir]
    number = number_of(people, job_id)
    assert people.cluster.run("squeue", "--noheader", f"--jobs={number}", "--format=%u").strip() == "nobody"
    tenant.control(job_id, "cancel")
    assert tenant.until(job_id)["status"] == "CANCELLED"
    wait_for(lambda: not people.jobs_on_cluster(job_id), "the end of the job on the cluster")


def test_an_account_whose_user_is_unknown_is_told_so(people: SlurmServer) -> None:
    tenant = Tenant(people, "speech", 61007)
    job = tenant.until(tenant.submit("true", backend="people"))
    assert (job["status"], job["attempts"][-1]["reason"]) == ("FAILED", "LAUNCH_REFUSED")
    assert "uid 61007, whom the server's machine does not know" in job["attempts"][-1]["message"]


def test_an_account_without_a_uid_is_not_submitted_as_the_servers_user(people: SlurmServer) -> None:
    tenant = Tenant(people, "text", None)
    asked = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}, "backend": "people"}
    answer = tenant.ask("POST", "/v1/jobs", asked)
    assert answer.status_code == 400
    assert "account text has no system user of its own" in answer.text


@pytest.mark.skipif(no_containers() is not None, reason="there is no container engine")
def test_a_job_with_an_image_runs_in_it(shared_server: SlurmServer) -> None:
    """By a command, as with Apptainer: here it is podman's."""
    options = shared_server.slurm.options()
    run = f"podman run --rm --env-host --network=host --volume={options['work_dir']} {{image}}"
    with running_engine() as engine:
        image = python_image(engine)
        settings = engine.environment["CONTAINERS_CONF"]
        options["container"] = f"env CONTAINERS_CONF={settings} {run}"
        shared_server.data("PUT", "/v1/backends/images", {"kind": "slurm", "options": options})
        source = "import os; print(os.environ['FROM_IMAGE'], os.environ['RANK'])"
        workload = {"kind": "container", "image": image, "argv": ["python3", "-c", source]}
        asked = {"name": "n", "workload": workload, "backend": "images", "resource_config": {"gpu_count": 0}}
        job_id = shared_server.data("POST", "/v1/jobs", asked)["job_id"]
        job = shared_server.until(job_id)
        assert (job["status"], shared_server.lines(job_id)) == ("COMPLETED", ["yes 0"]), job
    refused = shared_server.ask("POST", "/v1/jobs", {**asked, "backend": "hpc"})
    assert refused.status_code == 400
    assert "the backend hpc runs no containers; use one of: images" in refused.text
    asked["workload"]["container"] = {"shm_mb": 64}
    refused = shared_server.ask("POST", "/v1/jobs", asked)
    assert refused.status_code == 400
    assert "the backend images does not support a size of /dev/shm; leave it out" in refused.text
