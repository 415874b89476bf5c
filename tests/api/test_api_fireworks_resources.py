"""Accounts, training shapes, checkpoints, promotion and models of the Fireworks door."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_world import Served, World
from fireworks_world import ALIAS, MODEL, Door, door_of, knowing

from model_config import model_config
from trainmaster.server.coordinator import promotion as promoting
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.doors.fireworks.errors import COLLECTIONS, PREFIXES
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import checkpoints, promoted
from trainmaster.server.store.promoted import Operation
from trainmaster.server.store.scope import Scope


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with knowing(world, tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture
def door(world: World, served: Served) -> Iterator[Door]:
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as door:
        yield door


# -- accounts --


def test_key_sees_exactly_its_own_account(door: Door, world: World) -> None:
    world.key("another-account")
    answer = door.call("GET", "/v1/accounts", params={"pageSize": 2})
    assert [account["name"] for account in answer["accounts"]] == [f"accounts/{door.account_id}"]
    # Beside it, whoever runs the cluster sees them all, as ever.
    seen = {account["account_id"] for account in answer["data"]["accounts"]}
    assert {door.account_id, "another-account"} <= seen


def test_plain_key_sees_its_account_alone_everywhere(door: Door, world: World) -> None:
    key = world.key(door.account_id, KeyScope.VIEW)
    answer = door.call("GET", "/v1/accounts", headers={"X-Api-Key": key})
    assert [account["account_id"] for account in answer["data"]["accounts"]] == [door.account_id]
    assert len(answer["accounts"]) == 1


# -- shapes --


def shapes_of(account: str) -> str:
    return f"/v1/accounts/{account}/trainingShapes"


def test_latest_validated_version_is_found(door: Door) -> None:
    path = f"{shapes_of('fireworks')}/gang/versions"
    [version] = door.call("GET", path, params={"filter": "latest_validated=true", "pageSize": 1})[
        "trainingShapeVersions"
    ]
    assert version["name"] == "accounts/fireworks/trainingShapes/gang/versions/2"
    assert version["snapshot"] == {
        "trainerMode": "LORA_TRAINER",
        "region": "eu-1",
        "acceleratorType": "NVIDIA_H100_80GB",
        "acceleratorCount": 4,
        "nodeCount": 2,
        "trainerImageTag": "trainer-7",
        "maxSupportedContextLength": 4096,
        "baseModelWeightPrecision": "bfloat16",
        "trainerShardingScheme": {
            "pipelineParallelism": 1,
            "tensorParallelism": 1,
            "contextParallelism": 1,
            "expertParallelism": 1,
        },
        "deploymentShapeVersion": "accounts/fireworks/deploymentShapes/d/versions/3",
        "deploymentImageTag": "serving-2",
    }
    every = door.call("GET", path)["trainingShapeVersions"]
    assert [each["name"].rpartition("/")[2] for each in every] == ["3", "2", "1"]
    assert door.call("GET", f"{path}/1")["latestValidated"] is False
    assert door.call("GET", f"{path}/latest")["name"] == version["name"]


def test_shape_that_cannot_be_honoured_is_no_candidate(door: Door) -> None:
    path = f"{shapes_of(door.account_id)}/split/versions"
    assert door.call("GET", path, params={"filter": "latest_validated=true"})["trainingShapeVersions"] == []
    assert "pipeline_parallelism" in door.call("GET", f"{path}/1")["statusMessage"]


def test_shapes_are_listed(door: Door) -> None:
    found = door.call("GET", shapes_of(door.account_id), params={"pageSize": 4})
    names = [shape["name"].rpartition("/")[2] for shape in found["trainingShapes"]]
    assert names == ["cpu", "frozen", "gang", "one-gpu"]
    rest = door.call("GET", shapes_of(door.account_id), params={"pageToken": found["nextPageToken"]})
    assert [shape["displayName"] for shape in rest["trainingShapes"]] == ["split", "whole"]
    assert door.call("GET", f"{shapes_of('fireworks')}/cpu")["acceleratorCount"] == 0


@pytest.mark.parametrize("path", ["nobodys", "nobodys/versions", "gang/versions/7"])
def test_shape_that_is_not_there_is_not_found(door: Door, path: str) -> None:
    assert door.call("GET", f"{shapes_of('fireworks')}/{path}", 404)["code"] == 5
    door.call("GET", f"{shapes_of('somebody')}/gang", 404)


# -- checkpoints --


@pytest.fixture
def saved(door: Door) -> Path:
    """The sampler checkpoint of a trainer that has run, and saved."""
    door.create("trainer")
    job = door.run("trainer")
    door.save(job, "training", "step-4")
    directory = door.save(job, "sampler", "step-4-aabbccdd", sampler_kind="base")
    door.save(job, "sampler", "step-5-aabbccdd", sampler_kind="delta", is_lora=False)
    return directory


def rows(door: Door, **query: Any) -> Any:
    return door.call("GET", f"{door.jobs}/trainer/checkpoints", params=query)["checkpoints"]


def test_checkpoints_are_listed_also_of_a_trainer_that_is_gone(door: Door, world: World, saved: Path) -> None:
    found = rows(door)
    assert [row["name"].removeprefix(f"accounts/{door.account_id}/") for row in found] == [
        "rlorTrainerJobs/trainer/checkpoints/step-4",
        "rlorTrainerJobs/trainer/checkpoints/step-4-aabbccdd",
        "rlorTrainerJobs/trainer/checkpoints/step-5-aabbccdd",
    ]
    assert [(row["checkpointType"], row["promotable"]) for row in found] == [
        ("CHECKPOINT_TYPE_TRAINING_LORA", False),
        ("CHECKPOINT_TYPE_INFERENCE_LORA", True),
        ("CHECKPOINT_TYPE_INFERENCE_ARC_V2", False),
    ]
    assert rows(door, filter="promotable=true") == [found[1]]
    first = door.call("GET", f"{door.jobs}/trainer/checkpoints", params={"pageSize": 2})
    assert len(first["checkpoints"]) == 2
    assert rows(door, pageToken=first["nextPageToken"]) == found[2:]
    one = door.call("GET", f"{door.jobs}/trainer/checkpoints", params={"pageSize": 1, "filter": "promotable=false"})
    assert one["checkpoints"] == [found[0]]
    assert rows(door, pageToken=one["nextPageToken"], pageSize=1, filter="promotable=false") == [found[2]]
    world.end(door.job("trainer").job_id, "KILLED_BY_SIGNAL")
    assert rows(door) == found
    door.call("DELETE", f"{door.jobs}/trainer")
    assert rows(door) == found


def test_saving_under_a_name_again_leaves_the_new_one(door: Door, world: World, saved: Path) -> None:
    job = door.job("trainer")
    before = f"{job.job_id}-training-step-4"
    record = {
        "type": "checkpoint",
        "checkpoint_id": "another",
        "root": ARTIFACTS,
        "path": f"{job.job_id}/checkpoints/training/step-4/2",
        "kind": "training",
        "name": "step-4",
        "attributes": {"replaces": [before]},
    }
    world.see(job.job_id, record)
    with world.database.read() as connection:
        found = checkpoints.of_job(connection, Scope(door.account_id), job.job_id)
        assert [each.checkpoint_id for each in found if each.name == "step-4"] == ["another"]
        assert [each.checkpoint_id for each in checkpoints.hidden(connection, Scope(door.account_id))] == [before]


def test_checkpoints_of_users_are_not_what_a_trainer_goes_on_from(door: Door, saved: Path) -> None:
    job = door.job("trainer")
    assert job.latest_checkpoint_id is None
    assert job.can_save


# -- promotion --


def promote(door: Door, name: str, expect: int = 200, **fields: Any) -> Any:
    body = {
        "output_model": f"accounts/{door.account_id}/models/my-model",
        "trainer_job_id": f"accounts/{door.account_id}/rlorTrainerJobs/trainer",
        "base_model": MODEL,
        "async_promotion": True,
        **fields,
    }
    return door.call("POST", f"/v1/accounts/{door.account_id}/checkpoints/{name}:promote", expect, json=body)


def model_directory(door: Door, model_id: str = "my-model") -> Path:
    return door.world.roots.path(ARTIFACTS, f"models/{door.account_id}/{model_id}")


@pytest.mark.parametrize("state", ["running", "failed", "deleted"])
def test_checkpoint_becomes_a_model(door: Door, world: World, saved: Path, state: str) -> None:
    if state != "running":
        world.end(door.job("trainer").job_id, "KILLED_BY_SIGNAL")
    if state == "deleted":
        door.call("DELETE", f"{door.jobs}/trainer")
    operation = promote(door, "step-4-aabbccdd")["operation"]
    assert operation["done"] is True
    assert door.call("GET", f"/v1/{operation['name']}") == operation
    model = operation["response"]
    assert model["name"] == f"accounts/{door.account_id}/models/my-model"
    assert (model["state"], model["kind"]) == ("READY", "HF_PEFT_ADDON")
    assert model["peftDetails"] == {"baseModel": MODEL, "r": 8, "targetModules": ["q_proj"]}
    files = model_directory(door)
    assert (files / "adapter_model.safetensors").read_bytes() == b"weights"
    # No room is taken twice, and the model outlives its checkpoint.
    assert os.path.samefile(files / "adapter_model.safetensors", saved / "adapter_model.safetensors")
    shown = door.call("GET", f"/v1/{model['name']}")
    assert shown == {name: value for name, value in model.items() if name != "@type"}
    listed = door.call("GET", f"/v1/accounts/{door.account_id}/models")["models"]
    assert [each["name"] for each in listed] == [model["name"]]


def test_promotion_can_be_waited_for(door: Door, saved: Path) -> None:
    answer = promote(door, "step-4-aabbccdd", async_promotion=False)
    assert answer["model"]["kind"] == "HF_PEFT_ADDON"


def test_promotion_twice_makes_one_model_and_a_second_one_needs_a_name(door: Door, saved: Path) -> None:
    first = promote(door, "step-4-aabbccdd")
    assert promote(door, "step-4-aabbccdd")["model"] == first["model"]
    door.save(door.job("trainer"), "sampler", "step-6-aabbccdd", sampler_kind="base")
    assert promote(door, "step-6-aabbccdd", 409)["code"] == 10
    promote(door, "step-6-aabbccdd", output_model=f"accounts/{door.account_id}/models/other")


@pytest.mark.parametrize(
    ("name", "fields", "status", "said"),
    [
        ("nobodys", {}, 404, "no checkpoint nobodys"),
        ("step-4", {}, 400, "save one for sampling"),
        ("step-5-aabbccdd", {}, 400, "the difference"),
        ("step-4-aabbccdd", {"base_model": "other"}, 400, "base_model"),
        ("step-4-aabbccdd", {"output_model": "accounts/somebody/models/m"}, 404, "somebody"),
        ("step-4-aabbccdd", {"output_model": "m"}, 400, "output_model"),
        ("step-4-aabbccdd", {"output_model": "accounts/{a}/models/.."}, 400, "output_model"),
        ("step-4-aabbccdd", {"trainer_job_id": "accounts/{a}/rlorTrainerJobs/nobodys"}, 404, "nobodys"),
    ],
)
def test_promotion_that_cannot_be_says_why(
    door: Door, saved: Path, name: str, fields: dict[str, str], status: int, said: str
) -> None:
    asked = {key: value.replace("{a}", door.account_id) for key, value in fields.items()}
    assert said in promote(door, name, status, **asked)["message"]


def test_base_model_may_be_named_by_another_of_its_names(door: Door, saved: Path) -> None:
    assert promote(door, "step-4-aabbccdd", base_model=ALIAS)["model"]["peftDetails"]["baseModel"] == ALIAS


def test_link_in_a_checkpoint_is_not_followed(door: Door, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of another account")
    (saved / "extra").symlink_to(tmp_path / "secret")
    operation = promote(door, "step-4-aabbccdd")["operation"]
    assert "no plain file" in operation["error"]["message"]
    assert not model_directory(door).exists()
    assert "no plain file" in promote(door, "step-4-aabbccdd", 400, async_promotion=False)["message"]


def test_link_on_the_way_to_a_checkpoint_is_not_followed(door: Door, saved: Path, tmp_path: Path) -> None:
    saved.rename(tmp_path / "elsewhere")
    saved.symlink_to(tmp_path / "elsewhere")
    assert "error" in promote(door, "step-4-aabbccdd")["operation"]


def test_files_are_copied_where_they_cannot_be_linked(door: Door, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved / "nested").mkdir()
    (saved / "nested" / "more").write_bytes(b"more")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(18, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    promote(door, "step-4-aabbccdd")
    copy = model_directory(door)
    assert (copy / "nested" / "more").read_bytes() == b"more"
    assert not os.path.samefile(copy / "adapter_model.safetensors", saved / "adapter_model.safetensors")


def test_promotion_whose_server_died_is_gone_on_with(door: Door, world: World, saved: Path) -> None:
    job = door.job("trainer")
    scope = Scope(door.account_id)
    left = Operation(
        account_id=door.account_id,
        operation_id="promote-my-model-1",
        request={
            "job_id": job.job_id,
            "checkpoint_id": f"{job.job_id}-sampler-step-4-aabbccdd",
            "model_id": "my-model",
            "base_model": MODEL,
        },
        created_at=1.0,
        worked_on_at=1.0,
    )
    world.database.write_now(lambda connection: promoted.begin(connection, scope, left))
    # What the dead server had done: half a draft, and files that were moved before they were recorded.
    draft = world.roots.path(ARTIFACTS, f"{promoting.DRAFTS}/{left.operation_id}")
    for directory in (draft, model_directory(door)):
        directory.mkdir(parents=True)
        (directory / "half").write_text("")
    operation = door.call("GET", f"/v1/accounts/{door.account_id}/operations/{left.operation_id}")
    assert operation["done"] is True
    assert operation["response"]["name"].endswith("/my-model")
    assert sorted(path.name for path in model_directory(door).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    ]
    assert [path.name for path in model_directory(door).parent.iterdir()] == ["my-model"]
    assert list(draft.parent.iterdir()) == []


def test_operation_that_is_worked_on_is_left_alone(door: Door, world: World) -> None:
    scope = Scope(door.account_id)
    fresh = Operation(
        account_id=door.account_id,
        operation_id="promote-x-1",
        request={"job_id": "j", "checkpoint_id": "c", "model_id": "x", "base_model": "b"},
        created_at=2e9,
        worked_on_at=2e9,
    )
    world.database.write_now(lambda connection: promoted.begin(connection, scope, fresh))
    shown = door.call("GET", f"/v1/accounts/{door.account_id}/operations/promote-x-1")
    assert (shown["done"], "response" in shown) == (False, False)


# -- models --


def test_base_models_are_those_that_the_operator_named(door: Door) -> None:
    found = door.call("GET", f"/v1/{MODEL}")
    assert (found["state"], found["kind"], found["contextLength"]) == ("READY", "HF_BASE_MODEL", 512)
    assert found["baseModelDetails"]["moe"] is False
    listed = door.call("GET", "/v1/accounts/fireworks/models")["models"]
    assert [each["name"] for each in listed] == [MODEL]
    door.call("GET", "/v1/accounts/fireworks/models/nobodys", 404)
    door.call("GET", "/v1/accounts/somebody/models", 404)
    assert door.call("GET", f"/v1/accounts/{door.account_id}/models")["models"] == []


def test_promoted_model_can_be_removed_and_is_its_accounts_alone(
    door: Door, world: World, served: Served, saved: Path
) -> None:
    promote(door, "step-4-aabbccdd")
    path = f"/v1/accounts/{door.account_id}/models/my-model"
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as stranger:
        stranger.call("GET", path, 404)
        stranger.call("DELETE", path, 404)
        stranger.call("GET", f"/v1/accounts/{door.account_id}/operations/x", 404)
    assert door.call("DELETE", path) == {}
    door.call("GET", path, 404)
    door.call("DELETE", path, 404)
    assert not model_directory(door).exists()
    assert (saved / "adapter_model.safetensors").exists()
    promote(door, "step-4-aabbccdd")


def test_promoted_model_of_whole_weights_can_be_trained_on(door: Door, saved: Path) -> None:
    (saved / "adapter_config.json").unlink()
    (saved / "config.json").write_text(json.dumps(model_config(max_position_embeddings=64)))
    model = promote(door, "step-4-aabbccdd")["model"]
    assert model["kind"] == "HF_BASE_MODEL"
    made = door.create("next", config_baseModel=model["name"])
    assert made["trainingConfig"]["maxContextLength"] == 64
    assert door.job("next").spec["workload"]["model_path"] == str(model_directory(door))


def test_adapter_is_no_base_model(door: Door, saved: Path) -> None:
    name = promote(door, "step-4-aabbccdd")["model"]["name"]
    assert "load_adapter" in door.create("next", 400, config_baseModel=name)["message"]


def test_model_path_of_a_users_own_must_lie_where_it_may(door: Door, world: World, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config()))
    body = {
        "name": "n",
        "workload": {"kind": "trainer_service", "base_model": "mine", "model_path": str(tmp_path)},
        "resource_config": {"gpu_count": 0},
    }
    job_id = door.http.post("/v1/jobs", json=body).json()["data"]["job_id"]
    # Whether it does is looked at before it is queued.
    assert world.job(job_id).status == "PENDING"


# -- what is not here --


@pytest.mark.parametrize("collection", COLLECTIONS)
def test_collection_that_is_not_here_is_refused_with_the_reason(door: Door, collection: str) -> None:
    place = f"/v1/accounts/{door.account_id}/{collection}"
    for method, path in (
        ("GET", place),
        ("POST", place),
        ("GET", f"{place}/x"),
        ("POST", f"{place}/x/checkpoints/y:promote"),
    ):
        made = collection == "deployments" and (method, path) == ("POST", place)
        answer = door.call(method, path, 400 if made else 404, json={})
        assert answer["message"] == COLLECTIONS[collection]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_service_that_is_not_here_is_refused_with_the_reason(door: Door, prefix: str) -> None:
    """With 400: samplers retry 404 for two minutes, as a deployment may be loading weights."""
    answer = door.call("POST", f"{prefix}v1/completions", 400, json={})
    assert answer["error"]["message"] == PREFIXES[prefix]


def test_address_that_nobody_knows_is_still_nothing(door: Door) -> None:
    answer = door.call("GET", f"/v1/accounts/{door.account_id}/nobodys", 404)
    assert answer["message"] == "There is nothing at this address."
