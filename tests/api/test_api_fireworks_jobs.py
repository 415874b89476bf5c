"""Trainer jobs of the Fireworks door: made, shown, listed, resumed, cancelled, deleted."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_world import Served, World
from fireworks_world import ALIAS, MODEL, Door, door_of, healthy, knowing
from sqlalchemy import update

from model_config import model_config
from patience import PATIENCE_S
from trainmaster.server.core import commands, endings
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.core.spec.documents import load_stored
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.doors.fireworks import jobs
from trainmaster.server.store import queues, schema
from trainmaster.server.store.jobs import record_use
from trainmaster.server.store.scope import Scope

EVERYTHING = Scope.everything()


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with knowing(world, tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture
def door(world: World, served: Served) -> Iterator[Door]:
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as door:
        yield door


@pytest.fixture(scope="module")
def trainer() -> Iterator[str]:
    with healthy() as address:
        yield address


def service_of(job: Job) -> Any:
    """What the trainer of a job is told."""
    launch = compile_job(load_stored(job.spec_version, job.spec)).launch
    return json.loads(launch.inputs["service.json"])


def test_trainer_is_made_as_the_client_asks_for_it(door: Door) -> None:
    made = door.create("job-a", displayName="t", inactivityTimeout="1800s", nodeCount=1)
    assert made["name"] == f"accounts/{door.account_id}/rlorTrainerJobs/job-a"
    assert made["state"] == "JOB_STATE_PENDING"
    assert made["trainingConfig"]["maxContextLength"] == 512
    job = door.job("job-a")
    assert (job.handle, job.name, job.workload_kind, job.is_service) == ("job-a", "t", "trainer_service", True)
    assert job.inactivity_timeout_s == 1800
    told = service_of(job)
    assert (told["base_model"], told["mode"], told["lora_rank"]) == (MODEL, "lora", 8)
    assert told["aliases"] == [ALIAS]
    assert told["learning_rate"] == 1e-5
    assert door.get("job-a")["displayName"] == "t"


def test_trainer_without_an_id_is_given_one(door: Door) -> None:
    body = {"serviceMode": True, "trainingConfig": {"baseModel": MODEL}}
    made = door.call("POST", door.jobs, params={"skipValidations": "true"}, json=body)
    assert door.get(made["name"].rpartition("/")[2])["name"] == made["name"]


FIELDS: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
    # what is sent, what is shown, and what it does to the job or to its trainer
    ({"config_loraRank": 0}, {}, lambda job, told: told["mode"] == "full"),
    ({"config_loraRank": 16}, {}, lambda job, told: (told["mode"], told["lora_rank"]) == ("lora", 16)),
    ({"config_maxContextLength": 128}, {}, lambda job, told: told["max_context_length"] == 128),
    ({"config_learningRate": 0.5}, {}, lambda job, told: told["learning_rate"] == 0.5),
    ({"config_gradientAccumulationSteps": 4}, {}, lambda job, told: told["gradient_accumulation_steps"] == 4),
    ({"nodeCount": 3}, {"nodeCount": 3}, lambda job, told: job.needs.node_count == 3),
    ({"trainerReplicaCount": 2, "nodeCount": 2}, {"nodeCount": 4}, lambda job, told: job.needs.node_count == 4),
    (
        {"config_acceleratorType": "NVIDIA_H100_80GB", "config_acceleratorCount": 2, "nodeCount": 2},
        {},
        lambda job, told: (
            (job.needs.gpu_type, job.needs.gpus_per_node, job.needs.gpu_memory_min_mb) == ("H100", 2, 76293)
        ),
    ),
    ({"config_region": "eu-1"}, {}, lambda job, told: job.needs.capabilities == ("region=eu-1",)),
    (
        {"config_extraArgs": ["--forward-only", "--max-adapters", "3"]},
        {"forwardOnly": True},
        lambda job, told: (told["mode"], told["max_adapters"]) == ("forward_only", 3),
    ),
    ({"extraValues": {"precision": "float32"}}, {}, lambda job, told: told["precision"] == "float32"),
    ({"forwardOnly": True}, {"forwardOnly": True}, lambda job, told: told["mode"] == "forward_only"),
    ({"displayName": "mine"}, {"displayName": "mine"}, lambda job, told: job.name == "mine"),
    ({"preemptible": True}, {"preemptible": True}, lambda job, told: job.preemptible),
    ({"purpose": "pilot"}, {"purpose": "pilot"}, lambda job, told: job.labels["purpose"] == "pilot"),
    ({"managedBy": "me"}, {"managedBy": "me"}, lambda job, told: job.labels["managed_by"] == "me"),
    (
        {"inactivityTimeout": "90.5s"},
        {"inactivityTimeout": "90.5s"},
        lambda job, told: job.inactivity_timeout_s == 90.5,
    ),
    (
        {"inactivityTimeout": "86400s"},
        {"inactivityTimeout": "86400s"},
        lambda job, told: job.inactivity_timeout_s == 86_400,
    ),
    ({"inactivityTimeout": "0s"}, {"inactivityTimeout": "3600s"}, lambda job, told: job.inactivity_timeout_s == 3600),
    ({}, {"inactivityTimeout": "3600s"}, lambda job, told: job.inactivity_timeout_s == 3600),
    (
        {"disableInactivityCleanup": True},
        {"disableInactivityCleanup": True},
        lambda job, told: job.inactivity_timeout_s is None,
    ),
]


@pytest.mark.parametrize(("sent", "shown", "does"), FIELDS)
def test_field_has_its_effect(door: Door, sent: dict[str, Any], shown: dict[str, Any], does: Any) -> None:
    made = door.create("job-f", **sent)
    job = door.job("job-f")
    assert does(job, service_of(job))
    configured = {name.removeprefix("config_"): value for name, value in sent.items() if name.startswith("config_")}
    assert {name: made["trainingConfig"][name] for name in configured} == configured
    assert {name: made[name] for name in shown} == shown


def test_reservation_is_the_name_of_a_queue(door: Door, world: World) -> None:
    world.database.write_now(lambda connection: queues.put(connection, EVERYTHING, JobQueue(name="team"), 1.0))
    made = door.create("job-q", reservationTarget="accounts/x/reservations/team")
    assert (door.job("job-q").queue, made["reservationTarget"]) == ("team", "team")
    assert "reservationTarget" in door.create("job-r", 400, reservationTarget="nobodys")["message"]
    # As the public client sends it.
    door.create("job-s", 200, reservationTarget="team", useReservation=False)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"config_baseModel": "nobodys"}, "unknown base model 'nobodys'"),
        ({"config_extraArgs": ["--no-such"]}, "trainingConfig.extraArgs[0]: unknown argument '--no-such'"),
        ({"config_extraArgs": ["--max-adapters"]}, "needs a value"),
        ({"extraValues": {"no_such": "1"}}, "--no-such"),
        ({"config_projectionHeadDim": 4}, "projection head"),
        ({"config_epochs": 2}, "trainingConfig.epochs"),
        (
            {"config_customImageTag": "7"},
            "trainingConfig.customImageTag: trainers run with the packages of this server",
        ),
        ({"hotLoadDeploymentId": "d-1"}, "hotLoadDeploymentId: is not available: this server has no deployments"),
        ({"rolloutDeploymentName": "d-1"}, "this server has no deployments"),
        ({"query": {"deploymentId": "d-1"}}, "deploymentId: is not available: this server has no deployments"),
        ({"useReservation": False}, "useReservation: false has no effect: accounts have no reservations here"),
        ({"config_loraRank": -1}, "trainingConfig.loraRank: must be at least 0"),
        ({"config_nobodys": 1}, "trainingConfig.nobodys: unknown field"),
        ({"dataset": "d"}, "dataset"),
        ({"serviceMode": False}, "service mode"),
        ({"inactivityTimeout": "31536001s"}, "inactivityTimeout: must be at most 31536000"),
        ({"inactivityTimeout": "3h"}, "inactivityTimeout: must be a duration such as '1800s'"),
        ({"displayName": "x" * 64}, "displayName"),
        ({"nodeCount": -1}, "nodeCount"),
    ],
)
def test_wrong_field_is_refused_by_its_name(door: Door, sent: dict[str, Any], said: str) -> None:
    error = door.create("job-w", 400, **sent)
    assert said in error["message"]
    assert error["code"] == 3
    door.get("job-w", 404)


@pytest.mark.parametrize(
    "name",
    [
        "keepAlive",
        "usePurpose",
        "dataset",
        "evaluationDataset",
        "evalAutoCarveout",
        "lossConfig",
        "rewardWeights",
        "wandbConfig",
        "awsS3Config",
        "azureBlobStorageConfig",
        "config_warmStartFrom",
        "config_outputModel",
        "config_batchSize",
        "config_batchSizeSamples",
        "config_jinjaTemplate",
        "config_learningRateWarmupSteps",
        "config_optimizerWeightDecay",
        "config_samplerCheckpointSaveIntervalSteps",
    ],
)
def test_member_that_no_trainer_has_is_refused_by_its_name(door: Door, name: str) -> None:
    error = door.create("job-w", 400, **{name: "x"})
    assert f"{name.removeprefix('config_')}: " in error["message"]
    door.get("job-w", 404)


def test_wrong_id_is_refused(door: Door) -> None:
    assert "rlorTrainerJobId" in door.create("Not_An_Id", 400)["message"]


def test_trainer_is_cancelled_when_its_deployment_is_refused(door: Door) -> None:
    door.create("made-for-it")
    body = {"hotLoadTrainerJob": f"accounts/{door.account_id}/rlorTrainerJobs/made-for-it"}
    options = {"params": {"deploymentId": "d", "acceptShapelessRisk": "true"}, "json": body}
    refused = door.call("POST", f"/v1/accounts/{door.account_id}/deployments", 400, **options)
    assert "there are no deployments here" in refused["message"]
    assert "trainer made-for-it, which nobody used, is cancelled" in refused["message"]
    assert door.get("made-for-it")["state"] == "JOB_STATE_CANCELLED"
    # Nothing is left to cancel, and what is not there is no other error.
    for name in ("made-for-it", "nobodys", ""):
        body = {"hotLoadTrainerJob": f"accounts/{door.account_id}/rlorTrainerJobs/{name}"}
        refused = door.call("POST", f"/v1/accounts/{door.account_id}/deployments", 400, json=body)
        assert "cancelled" not in refused["message"]


def test_trainer_in_use_is_not_cancelled_for_a_deployment(door: Door, world: World) -> None:
    door.create("in-use")
    job = door.job("in-use")
    world.database.write(lambda connection: record_use(connection, EVERYTHING, job.job_id, time.time())).result()
    body = {"hotLoadTrainerJob": f"accounts/{door.account_id}/rlorTrainerJobs/in-use"}
    refused = door.call("POST", f"/v1/accounts/{door.account_id}/deployments", 400, json=body)
    assert "cancelled" not in refused["message"]
    assert door.get("in-use")["state"] == "JOB_STATE_PENDING"


def test_deployment_of_another_account_cancels_nothing(door: Door, world: World, served: Served) -> None:
    door.create("mine")
    body = {"hotLoadTrainerJob": f"accounts/{door.account_id}/rlorTrainerJobs/mine"}
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as stranger:
        refused = stranger.call("POST", f"/v1/accounts/{stranger.account_id}/deployments", 400, json=body)
        assert "cancelled" not in refused["message"]
        stranger.call("POST", f"/v1/accounts/{door.account_id}/deployments", 404, json=body)
    assert door.get("mine")["state"] == "JOB_STATE_PENDING"


def test_id_is_given_out_once(door: Door, world: World) -> None:
    door.create("job-o")
    again = door.create("job-o", 409)
    assert (again["code"], again["details"][0]["reason"]) == (6, "HANDLE_TAKEN")
    door.call("DELETE", f"{door.jobs}/job-o")
    assert door.get("job-o")["state"] == "JOB_STATE_DELETED"
    assert "was deleted" in door.create("job-o", 409)["message"]
    door.call("DELETE", f"{door.jobs}/job-o")
    assert [job["name"] for job in door.call("GET", door.jobs).get("rlorTrainerJobs")] == []


def test_requests_for_one_id_at_once_make_one_job(door: Door) -> None:
    body = {"serviceMode": True, "trainingConfig": {"baseModel": MODEL}}

    def create(_: int) -> int:
        params = {"skipValidations": "true", "rlorTrainerJobId": "job-n"}
        return door.http.post(door.jobs, params=params, json=body).status_code

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(create, range(8))) == [200] + [409] * 7


# -- shapes --


def on(shape: str, account: str = "fireworks", **more: str) -> dict[str, str]:
    return {"trainingShape": f"accounts/{account}/trainingShapes/{shape}", **more}


def test_shape_says_where_a_trainer_runs(door: Door) -> None:
    made = door.create("job-s", query=on("gang"))
    job = door.job("job-s")
    needs = job.needs
    assert (needs.node_count, needs.gpus_per_node, needs.gpu_type) == (2, 4, "H100")
    assert needs.capabilities == ("region=eu-1",)
    assert made["trainingShape"] == f"accounts/{door.account_id}/trainingShapes/gang/versions/2"
    config = made["trainingConfig"]
    assert (config["acceleratorType"], config["acceleratorCount"]) == ("NVIDIA_H100_80GB", 4)
    assert config["region"] == "eu-1"
    # What the model was made for is less than what the shape could do.
    assert config["maxContextLength"] == 512
    assert service_of(job)["precision"] == "bfloat16"
    assert service_of(job)["sampling_share"] == 0.75
    launch = compile_job(load_stored(job.spec_version, job.spec)).launch
    assert launch.ranks_per_node == 4


def test_shape_of_the_own_account_and_an_older_version_are_found(door: Door) -> None:
    made = door.create("job-s", query=on("gang/versions/1", door.account_id))
    assert made["trainingShape"].endswith("/gang/versions/1")


@pytest.mark.parametrize(
    "sent",
    [
        {"nodeCount": 1},
        {"config_acceleratorType": "A100"},
        {"config_acceleratorCount": 1},
        {"config_customImageTag": "mine"},
        {"config_region": "us-1"},
    ],
)
def test_shape_cannot_be_overridden(door: Door, sent: dict[str, Any]) -> None:
    error = door.create("job-s", 400, query=on("gang"), **sent)
    assert "cannot be overridden" in error["message"]


@pytest.mark.parametrize(
    ("query", "sent", "status", "said"),
    [
        (on("nobodys"), {}, 404, "unknown training shape"),
        (on("gang/versions/9"), {}, 404, "no version 9"),
        (on("gang", "somebody"), {}, 404, "somebody"),
        ({"trainingShape": "gang"}, {}, 400, "trainingShape"),
        (on("gang/versions/3"), {}, 400, "not validated"),
        (on("frozen"), {}, 400, "forward passes alone"),
        (on("whole"), {}, 400, "weights themselves"),
        (on("split/versions/1"), {}, 400, "pipeline_parallelism 2"),
        (on("gang"), {"config_maxContextLength": 5000}, 400, "maxContextLength"),
    ],
)
def test_shape_that_is_not_for_a_trainer_says_why(
    door: Door, query: dict[str, str], sent: dict[str, Any], status: int, said: str
) -> None:
    assert said in door.create("job-s", status, query=query, **sent)["message"]


def test_version_that_is_not_validated_can_be_asked_for(door: Door) -> None:
    door.create("job-s", query=on("gang/versions/3", skipValidations="true"))
    door.create("job-t", query=on("frozen"), forwardOnly=True)


def test_choice_of_the_shape_can_be_left_to_the_server(door: Door) -> None:
    made = door.create("job-c", query={})
    # The nodes of these tests have GPUs, or there are none yet.
    assert made["trainingShape"].rpartition("/trainingShapes/")[2] in ("cpu/versions/1", "one-gpu/versions/1")
    error = door.create("job-d", 400, query={}, config_maxContextLength=10**6)
    assert "no training shape" in error["message"]


def test_longer_sequences_than_the_models_are_refused(door: Door) -> None:
    error = door.create("job-e", 400, config_maxContextLength=513)
    assert error["message"] == f"trainingConfig.maxContextLength: is 513, and {MODEL} was made for 512 tokens at most"
    assert door.create("job-e", config_maxContextLength=512)["trainingConfig"]["maxContextLength"] == 512
    path = door.job("job-e").spec["workload"]["model_path"]
    for named in ({}, {"model_path": path}):
        workload = {"kind": "trainer_service", "base_model": MODEL, "max_context_length": 513, **named}
        body = {"name": "n", "workload": workload, "resource_config": {"gpu_count": 0}}
        for route in ("/v1/jobs", "/v1/jobs/validate"):
            refused = door.http.post(route, json=body)
            assert refused.status_code == 400
            assert "workload.max_context_length: is 513" in refused.text


def test_model_that_no_trainer_can_hold_is_refused(door: Door) -> None:
    door.create("job-f")
    config = Path(door.job("job-f").spec["workload"]["model_path"], "config.json")
    before = config.read_text()
    try:
        config.write_text(json.dumps(model_config(model_type="mamba")))
        error = door.create("job-g", 400)
        assert f"the model in {MODEL} cannot be used: its architecture 'mamba' is not among" in error["message"]
    finally:
        config.write_text(before)
    door.create("job-g")


# -- states --


def resume(door: Door, job_id: str, expect: int = 200) -> Any:
    return door.call("POST", f"{door.jobs}/{job_id}:resume", expect)


def test_state_follows_the_job(door: Door, world: World, trainer: str) -> None:
    door.create("job-l")
    job_id = door.job("job-l").job_id
    assert door.get("job-l")["state"] == "JOB_STATE_PENDING"
    assert door.get("job-l")["statusMessage"]
    world.place(job_id)
    assert door.get("job-l")["state"] == "JOB_STATE_CREATING"
    world.see(job_id, {"type": "claimed"}, {"type": "started"}, {"type": "ready"})
    # It is ready, and nobody knows yet where.
    assert door.get("job-l")["state"] == "JOB_STATE_CREATING"
    world.see(job_id, endpoint=trainer)
    assert door.get("job-l")["state"] == "JOB_STATE_RUNNING"
    world.change(job_id, lambda job: commands.pause(job, now=time.time()))
    assert door.get("job-l")["state"] == "JOB_STATE_WRITING_RESULTS"
    assert resume(door, "job-l", 503)["code"] == 14
    world.end(job_id, "PAUSED")
    assert door.get("job-l")["state"] == "JOB_STATE_PAUSED"


def test_trainer_that_does_not_answer_is_not_running(door: Door, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KNOWN_WITHIN_S", 0.2)
    door.create("job-h")
    door.run("job-h", "127.0.0.1:1")
    assert door.get("job-h")["state"] == "JOB_STATE_CREATING"


def test_trainer_that_died_a_moment_ago_is_never_shown_as_running(door: Door, world: World) -> None:
    door.create("job-d")
    job = door.run("job-d", "127.0.0.1:1")
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(door.get, "job-d")
        time.sleep(0.3)
        assert not shown.done()
        world.end(job.job_id, "KILLED_BY_SIGNAL", "killed")
        assert shown.result(PATIENCE_S)["state"] == "JOB_STATE_FAILED"


@pytest.mark.parametrize(
    ("reason", "state", "code"),
    [
        ("KILLED_BY_SIGNAL", "JOB_STATE_FAILED", "UNAVAILABLE"),
        ("EXITED_NONZERO", "JOB_STATE_FAILED", "FAILED_PRECONDITION"),
        ("PREEMPTED", "JOB_STATE_FAILED", "ABORTED"),
        ("SUCCEEDED", "JOB_STATE_COMPLETED", "OK"),
        ("PAUSED", "JOB_STATE_PAUSED", "OK"),
    ],
)
def test_ended_trainer_is_resumed_as_another_attempt(
    door: Door, world: World, reason: str, state: str, code: str
) -> None:
    door.create("job-e", preemptible=True)
    job = door.run("job-e")
    if reason == "PREEMPTED":
        world.change(job.job_id, lambda job: commands.preempt(job, now=time.time(), message="for another"))
    if reason == "PAUSED":
        world.change(job.job_id, lambda job: commands.pause(job, now=time.time()))
    world.end(job.job_id, reason, "it ended")
    shown = door.get("job-e")
    assert (shown["state"], shown["status"]["code"]) == (state, code)
    if code != "OK":
        assert "it ended" in shown["statusMessage"]
    assert resume(door, "job-e")["state"] == "JOB_STATE_PENDING"
    # It waits, and asking again changes nothing.
    assert resume(door, "job-e")["state"] == "JOB_STATE_PENDING"
    again = door.run("job-e")
    assert (again.job_id, again.live.number) == (job.job_id, 2)
    assert resume(door, "job-e")["state"] == "JOB_STATE_RUNNING"
    assert world.job(job.job_id).attempt_count == 2


def test_crashed_trainer_is_not_started_again_by_itself(door: Door, world: World) -> None:
    body = {
        "name": "n",
        "handle": "retried",
        "workload": {"kind": "trainer_service", "base_model": MODEL},
        "resource_config": {"gpu_count": 0},
        "scheduling_config": {"max_retries": 5},
    }
    door.http.post("/v1/jobs", json=body).raise_for_status()
    job = door.run("retried")
    world.end(job.job_id, "WORKER_LOST")
    assert world.job(job.job_id).status is JobStatus.FAILED
    assert door.get("retried")["state"] == "JOB_STATE_FAILED"


def test_cancelled_trainer_can_be_resumed(door: Door, world: World) -> None:
    door.create("job-x")
    job = door.run("job-x")
    assert door.call("POST", f"{door.jobs}/job-x:cancel", json={}) == {}
    assert door.get("job-x")["state"] == "JOB_STATE_CANCELLING"
    world.end(job.job_id, "CANCELLED")
    assert door.get("job-x")["state"] == "JOB_STATE_CANCELLED"
    door.call("POST", f"{door.jobs}/job-x:cancel", json={})
    resume(door, "job-x")
    world.place(job.job_id)
    world.end(job.job_id, "EXITED_NONZERO")
    assert door.call("POST", f"{door.jobs}/job-x:cancel", 400, json={})["code"] == 9


def test_deleted_trainer_cannot_be_resumed(door: Door) -> None:
    door.create("job-y")
    door.call("DELETE", f"{door.jobs}/job-y")
    assert "was deleted" in resume(door, "job-y", 404)["message"]
    resume(door, "nobodys", 404)
    door.call("DELETE", f"{door.jobs}/nobodys", 404)


def test_deletion_is_answered_when_the_trainer_is_gone(door: Door, world: World) -> None:
    door.create("job-z")
    job = door.run("job-z")
    with ThreadPoolExecutor(1) as pool:
        deletion = pool.submit(door.call, "DELETE", f"{door.jobs}/job-z")
        while door.get("job-z")["state"] != "JOB_STATE_DELETING":
            time.sleep(0.01)
        assert not deletion.done()
        world.end(job.job_id, "DELETED")
        assert deletion.result(PATIENCE_S) == {}
    assert door.get("job-z")["state"] == "JOB_STATE_DELETED"


def test_trainer_that_nobody_uses_is_parked(door: Door, world: World) -> None:
    door.create("job-p", inactivityTimeout="60s")
    job = door.run("job-p")
    now = time.time()
    assert endings.due(job, now=now + 59, last_activity_at=None) is None
    assert endings.due(job, now=now + 62, last_activity_at=now + 50) is None
    parked = endings.due(job, now=now + 62)
    assert parked is not None
    assert parked.job.live.stop_save
    world.change(job.job_id, lambda job: endings.due(job, now=now + 62))
    world.end(job.job_id, "INACTIVE", "not used")
    assert door.get("job-p")["state"] == "JOB_STATE_PAUSED"
    resume(door, "job-p")


def test_step_of_a_trainer_is_its_clients(door: Door) -> None:
    door.create("job-t")
    assert "service mode" in door.call("POST", f"{door.jobs}/job-t:executeTrainStep", 400, json={})["message"]


# -- lists --


def test_list_is_filtered_ordered_and_paged(door: Door) -> None:
    for name in ("c", "a", "b"):
        door.create(name, displayName=f"trainer {name}", config_loraRank=8 if name != "b" else 16)
    door.http.post("/v1/jobs", json={"name": "x", "workload": {"kind": "command", "argv": ["true"]}})

    def names(**query: Any) -> list[str]:
        found = door.call("GET", door.jobs, params=query)
        return [job["name"].rpartition("/")[2] for job in found["rlorTrainerJobs"]]

    assert names() == ["a", "b", "c"]
    assert names(orderBy="createTime") == ["c", "a", "b"]
    assert names(orderBy="createTime desc") == ["b", "a", "c"]
    assert names(orderBy="displayName desc") == ["c", "b", "a"]
    assert names(filter="trainingConfig.loraRank=8") == ["a", "c"]
    assert names(filter='displayName="trainer b" AND state=JOB_STATE_PENDING') == ["b"]
    assert names(filter="state!=JOB_STATE_PENDING") == []
    assert names(filter="displayName:trainer") == ["a", "b", "c"]
    first = door.call("GET", door.jobs, params={"pageSize": 2})
    assert len(first["rlorTrainerJobs"]) == 2
    rest = door.call("GET", door.jobs, params={"pageSize": 2, "pageToken": first["nextPageToken"]})
    assert [job["displayName"] for job in rest["rlorTrainerJobs"]] == ["trainer c"]
    assert "nextPageToken" not in rest
    two = door.call("GET", door.jobs, params={"pageSize": 1, "filter": "trainingConfig.loraRank=8"})
    more = door.call(
        "GET",
        door.jobs,
        params={"pageSize": 1, "filter": "trainingConfig.loraRank=8", "pageToken": two["nextPageToken"]},
    )
    assert more["rlorTrainerJobs"][0]["displayName"] == "trainer c"
    masked = door.call("GET", door.jobs, params={"readMask": "name,state"})
    assert {frozenset(job) for job in masked["rlorTrainerJobs"]} == {frozenset({"name", "state"})}


@pytest.mark.parametrize(
    "query", [{"filter": "a=b OR c=d"}, {"orderBy": "loss"}, {"pageToken": "x"}, {"nobodys": 1}, {"pageSize": -1}]
)
def test_wrong_list_is_refused(door: Door, query: dict[str, Any]) -> None:
    assert door.call("GET", door.jobs, 400, params=query)["code"] == 3


def test_trainer_is_idle_in_lists_alone(door: Door, world: World, trainer: str) -> None:
    door.create("job-i")
    job = door.run("job-i", trainer)

    def listed() -> str:
        return str(door.call("GET", door.jobs)["rlorTrainerJobs"][0]["state"])

    assert listed() == "JOB_STATE_RUNNING"
    long_ago = update(schema.jobs).where(schema.jobs.c.job_id == job.job_id).values(last_activity_at=1.0)
    world.database.write_now(lambda connection: connection.execute(long_ago))
    assert listed() == "JOB_STATE_IDLE"
    assert door.get("job-i")["state"] == "JOB_STATE_RUNNING"
    world.database.write_now(lambda connection: record_use(connection, EVERYTHING, job.job_id, time.time()))
    assert listed() == "JOB_STATE_RUNNING"


# -- whose they are --


def test_job_of_another_account_is_not_found(door: Door, world: World, served: Served) -> None:
    door.create("mine")
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as stranger:
        stranger.call("GET", f"{door.jobs}/mine", 404)
        stranger.call("GET", f"{stranger.jobs}/mine", 404)
        for method, path in (("DELETE", "mine"), ("POST", "mine:resume"), ("POST", "mine:cancel")):
            stranger.call(method, f"{door.jobs}/{path}", 404)
            stranger.call(method, f"{stranger.jobs}/{path}", 404)
        stranger.create("mine")


def test_job_of_another_kind_is_no_trainer(door: Door) -> None:
    body = {"name": "x", "handle": "plain", "workload": {"kind": "command", "argv": ["true"]}}
    door.http.post("/v1/jobs", json=body)
    door.get("plain", 404)


def test_wrong_key_is_told_so(door: Door) -> None:
    for headers in ({"X-Api-Key": "fw_wrong"}, {"X-Api-Key": "", "Authorization": "Bearer wrong"}):
        assert door.call("GET", door.jobs, 401, headers=headers)["code"] == 16
    url = door.http.base_url.join(door.jobs)
    assert httpx.get(url, headers={"Authorization": f"Bearer {door.key}"}, verify=False).status_code == 200


def test_ordinary_commands_apply_to_a_trainer(door: Door) -> None:
    door.create("job-o")
    shown = door.http.get("/v1/jobs/job-o").json()["data"]
    assert (shown["kind"], shown["handle"]) == ("trainer_service", "job-o")
    changed = door.http.patch("/v1/jobs/job-o", json={"priority": 9}).json()["data"]
    assert changed["priority"] == 9
    assert door.http.get("/v1/jobs/job-o/events").json()["data"]["events"]


def test_weight_syncers_find_one_replica_that_has_failed(door: Door) -> None:
    """They would poll for five minutes for a replica to appear, and load weights into it only then."""
    [replica] = door.call("GET", "/hot_load/v1/models/hot_load")["replicas"]
    assert replica["readiness"] is False
    assert replica["loading_state"]["stage"] == "error"
    assert "there are no deployments here" in replica["loading_state"]["message"]
    refused = door.call("POST", "/hot_load/v1/models/hot_load", 400, json={"identity": "snapshot"})
    assert "there are no deployments here" in refused["error"]["message"]
