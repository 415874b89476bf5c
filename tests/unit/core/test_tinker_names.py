"""Names of the root Tinker door: ids that say where to go, and paths of weights."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.protocol.trainer_requests import (
    ModelMode,
    Trainer,
    WeightsPath,
    owner_of_future,
    trainer_of_future,
    trainer_of_sampling_session,
)
from trainmaster.server.doors.futures import Category, failure_id, failure_of
from trainmaster.server.doors.tinker.model_creation import created_model, creation_id, mode_of


def test_future_of_a_trainer_says_which_one_and_of_what() -> None:
    request_id = "job-abc123:2:sess-1:train:0:17"
    assert trainer_of_future(request_id) == Trainer("job-abc123", 2)
    assert owner_of_future(request_id) == "sess-1:train:0"


def test_sampling_session_says_whose_it_is() -> None:
    assert trainer_of_sampling_session("sess-1:sample:3@job-abc123.12") == Trainer("job-abc123", 12)


@pytest.mark.parametrize(
    "text", ["", "job-a", "job-a:x:y:1", "a:1:b:2", "create_model:sess-1:train:0", "sess:sample:0"]
)
def test_what_is_no_id_of_a_trainer_is_none(text: str) -> None:
    assert trainer_of_future(text) is None
    assert trainer_of_sampling_session(text) is None


@given(st.text(), st.sampled_from(Category))
def test_failed_future_holds_what_there_is_to_say(message: str, category: Category) -> None:
    if message.isascii() or message.encode("utf-8", "replace").decode() == message:
        request_id = failure_id(message, category)
        assert failure_of(request_id) == (message, category)
        assert trainer_of_future(request_id) is None
        assert created_model(request_id) is None


@given(st.text())
def test_any_text_can_be_asked_for(text: str) -> None:
    for request_id in (text, f"failed:{text}", f"failed:server:{text}", f"failed:user:{text}"):
        failure_of(request_id)
        created_model(request_id)
        trainer_of_future(request_id)
        trainer_of_sampling_session(request_id)
        WeightsPath.parse(request_id)


def test_creation_of_a_model_is_found_by_its_id() -> None:
    assert created_model(creation_id("sess-1:train:0")) == "sess-1:train:0"
    assert created_model("job-a:1:b:2") is None


def test_path_of_weights_is_read_and_written() -> None:
    text = "tinker://sess-1:train:0/sampler_weights/step-4"
    path = WeightsPath.parse(text)
    assert path == WeightsPath(run="sess-1:train:0", place="sampler_weights", name="step-4")
    assert (str(path), path and path.kind) == (text, "sampler")


@pytest.mark.parametrize(
    "text", ["", "step-4", "tinker://a/b/c", "tinker://a/weights", "tinker://a/weights/b/c", "tinker:///weights/b"]
)
def test_what_is_no_path_of_weights_is_none(text: str) -> None:
    assert WeightsPath.parse(text) is None


@pytest.mark.parametrize(
    ("request_", "mode"),
    [
        ({"lora_config": {"rank": 8}}, ModelMode.LORA),
        ({"lora_config": {}}, ModelMode.LORA),
        ({"lora_config": {"rank": 0}}, ModelMode.FULL),
        ({"lora_config": None}, ModelMode.FULL),
        ({}, ModelMode.FULL),
        ({"base_only": True}, ModelMode.LORA),
        ({"lora_config": {"rank": 0}, "base_only": True}, ModelMode.LORA),
    ],
)
def test_request_for_a_model_says_its_mode(request_: dict[str, Any], mode: ModelMode) -> None:
    assert mode_of(request_) is mode


def test_long_id_is_not_compared_for_long() -> None:
    began = time.monotonic()
    assert trainer_of_sampling_session("x" + ":sample:" * 20_000 + "@" * 160_000) is None
    assert time.monotonic() - began < 20
