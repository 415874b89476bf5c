"""The root Tinker door: training runs and what they saved, whether a trainer runs or not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from api_world import wait_for
from tinker_world import MODEL, Client, StandIn

from trainmaster.server.store.scope import Scope


@pytest.fixture(scope="module", autouse=True)
def _quick_records() -> Iterator[None]:
    """What was used is written ten times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainmaster.server.doors.tinker.sessions.WRITE_EVERY_S", 0.1)
        yield


@pytest.fixture
def model_id(client: Client, trainer: StandIn) -> str:
    return client.model(trainer, user_metadata={"seed": 3})


def listed(client: Client, model_id: str) -> list[str]:
    return [each["checkpoint_id"] for each in client.get(f"training_runs/{model_id}/checkpoints")["checkpoints"]]


def test_run_is_shown_with_what_it_saved_last(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    client.save(model_id, "b")
    client.save(model_id, "s", "sampler")
    run = client.get(f"training_runs/{model_id}")
    assert run["training_run_id"] == model_id
    assert (run["base_model"], run["model_owner"], run["is_lora"], run["lora_rank"]) == (
        MODEL,
        client.account_id,
        True,
        8,
    )
    assert run["last_checkpoint"]["tinker_path"] == f"tinker://{model_id}/weights/b"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/s"
    assert run["user_metadata"] == {"seed": "3"}
    assert run["corrupted"] is False
    assert datetime.fromisoformat(run["last_request_time"]).tzinfo is not None


def test_runs_are_listed_newest_first_in_pages_and_by_project(
    client: Client, stranger: Client, trainer: StandIn
) -> None:
    made = [client.model(trainer) for _ in range(3)]
    client.result(client.ask_for_model(client.session(), base_model="unknown"))  # never began, and is not listed
    page = client.get("training_runs", limit=2, offset=1, access_scope="accessible")
    assert [run["training_run_id"] for run in page["training_runs"]] == made[::-1][1:]
    assert page["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    client.call("PUT", f"sessions/{made[0].partition(':')[0]}/project", {"project_id": "p"})
    inside = client.get("training_runs", project_id="p")
    assert [run["training_run_id"] for run in inside["training_runs"]] == [made[0]]
    assert stranger.get("training_runs")["training_runs"] == []


def test_checkpoints_are_listed_newest_first(client: Client, model_id: str) -> None:
    client.save(model_id, "a", user_metadata={"epoch": 1})
    client.save(model_id, "s", "sampler")
    assert listed(client, model_id) == ["sampler_weights/s", "weights/a"]
    page = client.get("checkpoints", limit=1, offset=1)
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    (checkpoint,) = page["checkpoints"]
    assert checkpoint["tinker_path"] == f"tinker://{model_id}/weights/a"
    assert (checkpoint["checkpoint_type"], checkpoint["size_bytes"], checkpoint["public"]) == ("training", 10, False)
    assert checkpoint["user_metadata"] == {"epoch": "1"}
    assert checkpoint["expires_at"] is None


def test_checkpoints_of_another_door_are_not_runs(client: Client, model_id: str) -> None:
    client.save(model_id, "a", door="fireworks")
    assert client.get("checkpoints")["checkpoints"] == []


def test_weights_info_has_what_a_model_needs_to_load_them(client: Client, stranger: Client, model_id: str) -> None:
    client.save(model_id, "a")
    path = f"tinker://{model_id}/weights/a"
    assert client.post("weights_info", {"tinker_path": path}) == {
        "base_model": MODEL,
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": False,
        "train_mlp": True,
        "train_attn": True,
    }
    stranger.post("weights_info", {"tinker_path": path}, expect=404)
    client.post(f"training_runs/{model_id}/checkpoints/weights/a/publish")
    assert stranger.post("weights_info", {"tinker_path": path})["lora_rank"] == 8


@pytest.mark.parametrize("path", ["", "tinker://x", "tinker://x/y/z", "step-4", "tinker://none/weights/a"])
def test_weights_that_are_not_there_are_told(client: Client, path: str) -> None:
    assert client.post("weights_info", {"tinker_path": path}, expect=404)["error"]["message"]


def test_checkpoint_is_published_and_withdrawn(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    address = f"training_runs/{model_id}/checkpoints/weights/a"

    def public() -> bool:
        return bool(client.get("checkpoints")["checkpoints"][0]["public"])

    client.post(f"{address}/publish")
    assert public()
    client.post(f"{address}/publish")
    client.call("DELETE", f"{address}/publish")
    assert not public()


def test_checkpoint_is_given_an_end_and_freed_of_it(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    address = f"training_runs/{model_id}/checkpoints/weights/a/ttl"

    def expiry() -> str | None:
        found = client.get("checkpoints")["checkpoints"][0]["expires_at"]
        assert found is None or isinstance(found, str)
        return found

    client.call("PUT", address, {"ttl_seconds": 3600})
    assert abs(datetime.fromisoformat(expiry() or "").timestamp() - time.time() - 3600) < 60
    client.call("PUT", address, {"ttl_seconds": None})
    assert expiry() is None
    for wrong in (-1, 0, 60, 3599):
        refused = client.call("PUT", address, {"ttl_seconds": wrong}, expect=422)
        assert "ttl_seconds" in str(refused["error"]["details"])


def test_checkpoint_is_deleted(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    client.save(model_id, "b")
    client.call("DELETE", f"training_runs/{model_id}/checkpoints/weights/a")
    assert listed(client, model_id) == ["weights/b"]
    client.call("DELETE", f"training_runs/{model_id}/checkpoints/weights/a", expect=404)
    client.call("DELETE", f"training_runs/{model_id}/checkpoints/weights/b")
    assert listed(client, model_id) == []


def test_pinned_checkpoint_is_kept_and_its_deletion_not_tried_again(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    url = str(client.http.base_url).removesuffix("/api/v1/")
    job_id = client.trainer_job().job_id
    pinned = client.http.post(f"{url}/v1/jobs/{job_id}/checkpoints/training-a-{model_id}/pin")
    assert pinned.status_code == 200, pinned.text
    error = client.call("DELETE", f"training_runs/{model_id}/checkpoints/weights/a", expect=400)["error"]
    assert "pinned" in error["message"]


def test_others_cannot_touch_what_a_run_saved_public_or_not(client: Client, stranger: Client, model_id: str) -> None:
    client.save(model_id, "a")
    address = f"training_runs/{model_id}/checkpoints/weights/a"
    for public in (False, True):
        if public:
            client.post(f"{address}/publish")
        stranger.get(f"training_runs/{model_id}", expect=404)
        stranger.get(f"training_runs/{model_id}/checkpoints", expect=404)
        stranger.post(f"{address}/publish", expect=404)
        stranger.call("DELETE", f"{address}/publish", expect=404)
        stranger.call("DELETE", address, expect=404)
        stranger.call("PUT", f"{address}/ttl", {"ttl_seconds": 3600}, expect=404)
    assert client.get("checkpoints")["checkpoints"][0]["public"] is True


def test_lists_and_changes_need_no_trainer_and_no_job(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    client.save(model_id, "b")
    job_id = client.trainer_job().job_id
    client.world.end(job_id, "KILLED_BY_SIGNAL")
    client.world.commands.delete(Scope(client.account_id), job_id).result()
    address = f"training_runs/{model_id}/checkpoints/weights/a"
    assert listed(client, model_id) == ["weights/b", "weights/a"]
    client.post(f"{address}/publish")
    client.call("PUT", f"{address}/ttl", {"ttl_seconds": 3600})
    assert client.post("weights_info", {"tinker_path": f"tinker://{model_id}/weights/a"})["base_model"] == MODEL
    client.call("DELETE", address)
    assert listed(client, model_id) == ["weights/b"]


def test_storage_is_told_by_project(client: Client, model_id: str) -> None:
    client.save(model_id, "a")
    client.save(model_id, "b")
    (row,) = client.get("billing/usage/checkpoints/current")["data"]
    assert (row["checkpoint_count"], row["size_bytes"]) == (2, 20)
    assert client.get("billing/usage/checkpoints/current", project_id="none")["data"] == []


def test_run_says_when_it_was_last_asked_something(client: Client, model_id: str) -> None:
    def last() -> Any:
        return client.get(f"training_runs/{model_id}")["last_request_time"]

    before = last()
    client.post("optim_step", {"model_id": model_id, "seq_id": 1})
    wait_for(lambda: last() > before)
