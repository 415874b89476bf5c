"""Requests to the Fireworks door that make no sense: each is refused with 400 and the name of what is wrong."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
from api_world import Served, World
from fireworks_world import MODEL, Door, door_of, knowing

from trainmaster.server.doors.fireworks.checkpoints import CHECKPOINT_MEMBERS
from trainmaster.server.doors.fireworks.job_documents import MEMBERS, CreateJobBody, TrainingConfigBody
from trainmaster.server.doors.fireworks.models import MODEL_MEMBERS, SHAPE_MEMBERS, VERSION_MEMBERS

INVALID_ARGUMENT = 3
LISTS = {
    "rlorTrainerJobs": MEMBERS,
    "rlorTrainerJobs/trainer/checkpoints": CHECKPOINT_MEMBERS,
    "models": MODEL_MEMBERS,
    "trainingShapes": SHAPE_MEMBERS,
    "trainingShapes/gang/versions": VERSION_MEMBERS,
}


@pytest.fixture(scope="module")
def served(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with knowing(world, tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture(scope="module")
def door(world: World, served: Served) -> Iterator[Door]:
    """With a trainer that saved something, and a model of that."""
    with door_of(world, served, f"account-{secrets.token_hex(4)}") as door:
        door.create("trainer")
        door.save(door.run("trainer"), "sampler", "saved", sampler_kind="base")
        door.call("POST", f"/v1/accounts/{door.account_id}/checkpoints/saved:promote", json=promotion(door))
        yield door


def promotion(door: Door, **fields: Any) -> dict[str, Any]:
    account = f"accounts/{door.account_id}"
    named = {"output_model": f"{account}/models/m", "trainer_job_id": f"{account}/rlorTrainerJobs/trainer"}
    return {**named, "base_model": MODEL, **fields}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "body: is not valid JSON"),
        (b"{", "body: is not valid JSON"),
        (b"\xff\xfe", "body: is not valid JSON"),
        (b'{"serviceMode": NaN}', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        ([], "must be an object, not a list"),
        ("text", "must be an object, not text"),
        (5, "must be an object, not a number"),
        (None, "must be an object, not null"),
        ({}, "trainingConfig: required"),
        ({"trainingConfig": []}, "trainingConfig: must be an object, not a list"),
        ({"trainingConfig": {}}, "trainingConfig.baseModel: required"),
    ],
)
def test_body_that_is_no_trainer_is_refused(door: Door, body: Any, said: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    error = door.call("POST", door.jobs, 400, content=content)
    assert error["code"] == INVALID_ARGUMENT
    assert said in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("displayName", 5, "must be text, not a number"),
        ("displayName", [], "must be text, not a list"),
        ("purpose", "two\nlines", "must be one line"),
        ("purpose", "\ud800", "contains a lone surrogate"),
        ("serviceMode", "perhaps", "boolean"),
        ("preemptible", [], "must be true or false, not a list"),
        ("nodeCount", "two", "integer"),
        ("nodeCount", 10**30, "must be at most"),
        ("nodeCount", True, "must be a number, not a truth value"),
        ("extraValues", [], "must be an object, not a list"),
        ("extraValues", {"precision": 5}, "extraValues.precision: must be text"),
        ("inactivityTimeout", {}, "must be a number, not an object"),
        ("inactivityTimeout", True, "must be a number, not a truth value"),
        ("reservationTarget", {}, "must be text, not an object"),
        ("config_baseModel", 5, "must be text, not a number"),
        ("config_baseModel", "", "must not be empty"),
        ("config_baseModel", "a\0b", "must be one line"),
        ("config_loraRank", "x", "integer"),
        ("config_loraRank", 1.5, "must be a whole number"),
        ("config_loraRank", [8], "must be a whole number, not a list"),
        ("config_loraRank", True, "must be a number, not a truth value"),
        ("config_learningRate", "fast", "number"),
        ("config_learningRate", -1, "must be at least 0"),
        ("config_maxContextLength", 2**70, "must be at most"),
        ("config_acceleratorType", 7, "must be text, not a number"),
        ("config_acceleratorCount", -1, "must be at least 0"),
        ("config_region", [], "must be text, not a list"),
        ("config_extraArgs", "--forward-only", "must be a list, not text"),
        ("config_extraArgs", [5], "extraArgs[0]: must be text"),
    ],
)
def test_field_of_a_wrong_type_is_refused_by_its_name(door: Door, field: str, value: Any, said: str) -> None:
    config = field.startswith("config_")
    name = field.removeprefix("config_")
    trained = {"baseModel": MODEL, **({name: value} if config else {})}
    body = {"serviceMode": True, "trainingConfig": trained, **({} if config else {name: value})}
    # As ASCII: a lone surrogate is no proper UTF-8.
    error = door.call("POST", door.jobs, 400, content=json.dumps(body))
    assert error["code"] == INVALID_ARGUMENT
    assert ("trainingConfig." if config else "") + name in error["message"]
    assert said in error["message"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"skipValidations": "perhaps"}, "skipValidations"),
        ({"trainingShape": "x"}, "trainingShape"),
        ({"trainingShape": "accounts/fireworks/trainingShapes/../x"}, "trainingShape"),
        ({"rlorTrainerJobId": "a/b"}, "rlorTrainerJobId"),
        ({"rlorTrainerJobId": "x" * 500}, "rlorTrainerJobId"),
        ({"rlorTrainerJobId": "a\0b"}, "rlorTrainerJobId"),
        ({"deploymentId": "\n"}, "deploymentId"),
        ({"nobodys": "1"}, "nobodys"),
    ],
)
def test_wrong_parameter_is_refused_by_its_name(door: Door, query: dict[str, str], said: str) -> None:
    body = {"serviceMode": True, "trainingConfig": {"baseModel": MODEL}}
    error = door.call("POST", door.jobs, 400, params=query, json=body)
    assert error["code"] == INVALID_ARGUMENT
    assert said in error["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"output_model": 5}, "output_model: must be text"),
        ({"trainer_job_id": []}, "trainer_job_id: must be text"),
        ({"trainer_job_id": "trainer"}, "trainer_job_id: is like accounts/"),
        ({"base_model": None}, "base_model: must be text"),
        ({"async_promotion": "perhaps"}, "async_promotion"),
        ({"nobodys": 1}, "nobodys: unknown field"),
    ],
)
def test_wrong_promotion_is_refused_by_its_name(door: Door, fields: dict[str, Any], said: str) -> None:
    path = f"/v1/accounts/{door.account_id}/checkpoints/saved:promote"
    error = door.call("POST", path, 400, json=promotion(door, **fields))
    assert error["code"] == INVALID_ARGUMENT
    assert said in error["message"]
    assert door.call("POST", path, 400, json=[])["code"] == INVALID_ARGUMENT


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"filter": "nobodys=1"}, "filter: unknown member 'nobodys'"),
        ({"filter": "nobodys.name=1"}, "filter: unknown member 'nobodys.name'"),
        ({"filter": "("}, "filter: is understood as"),
        ({"filter": "name=a OR name=b"}, "filter: is understood as"),
        ({"pageToken": "nonsense"}, "pageToken"),
        ({"pageToken": "W10"}, "pageToken"),
        ({"pageSize": "-1"}, "pageSize"),
        ({"pageSize": "x"}, "pageSize"),
        ({"orderBy": "loss"}, "orderBy"),
        ({"nobodys": "1"}, "nobodys"),
    ],
)
def test_wrong_list_is_refused_by_its_name(door: Door, path: str, query: dict[str, str], said: str) -> None:
    error = door.call("GET", f"/v1/accounts/{door.account_id}/{path}", 400, params=query)
    assert error["code"] == INVALID_ARGUMENT
    assert said in error["message"]


@pytest.mark.parametrize("path", LISTS)
def test_whatever_a_list_shows_can_be_filtered_by(door: Door, path: str) -> None:
    lists = [f"/v1/accounts/{door.account_id}/{path}"]
    if path == "models":
        lists.append("/v1/accounts/fireworks/models")
    for each in lists:
        [entries] = door.call("GET", each).values()
        assert entries
        shown = {name for entry in entries for name in names(entry)}
        assert shown <= set(LISTS[path])
        wanted = f'name="{entries[0]["name"]}"'
        [found] = door.call("GET", each, params={"filter": wanted}).values()
        assert found == entries[:1]


def names(document: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """The names of the members of a document, with dots between their parts."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from names(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("value", ["", " ", None, 0, False, [], {}, "\n", "x" * 5000, "\ud800"], ids=repr)
def test_any_field_with_an_odd_value_is_taken_or_refused_by_its_name(door: Door, value: Any) -> None:
    fields = [(name, CreateJobBody, "") for name in CreateJobBody.model_fields]
    fields += [(name, TrainingConfigBody, "config_") for name in TrainingConfigBody.model_fields]
    for name, model, prefix in fields:
        alias = model.model_fields[name].alias or name
        job_id = f"odd-{secrets.token_hex(6)}"
        body = {"serviceMode": True, "trainingConfig": {"baseModel": MODEL, "loraRank": 8}}
        (body["trainingConfig"] if prefix else body).update({alias: value})  # type: ignore[attr-defined]
        query = {"skipValidations": "true", "rlorTrainerJobId": job_id}
        answer = door.http.post(door.jobs, params=query, content=json.dumps(body))
        assert answer.status_code in (200, 400), (alias, answer.text)
        if answer.status_code == 200:
            assert door.get(job_id)["name"].endswith(job_id)


@pytest.mark.parametrize("name", ["", " ", None])
def test_display_name_that_says_nothing_is_as_good_as_none(door: Door, name: str | None) -> None:
    job_id = f"unnamed-{secrets.token_hex(4)}"
    assert "displayName" not in door.create(job_id, displayName=name)
