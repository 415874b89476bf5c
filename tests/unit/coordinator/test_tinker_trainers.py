"""What the jobs that serve plain Tinker clients are called."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainmaster.coordinator.base_models import BaseModel
from trainmaster.coordinator.tinker import handle_of
from trainmaster.core.workloads.trainer_service import Mode


def model(name: str, *aliases: str, path: str = "/models/m") -> BaseModel:
    return BaseModel(name=name, path=Path(path), aliases=aliases)


@given(st.text(min_size=1, max_size=200), st.sampled_from(Mode))
def test_handle_is_one_that_a_job_may_have(name: str, mode: Mode) -> None:
    name = name.encode("utf-8", "replace").decode()
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", handle_of(model(name), mode))


def test_handle_tells_the_model() -> None:
    assert handle_of(model("Qwen/Qwen3-8B"), Mode.LORA).startswith("tinker-qwen-qwen3-8b-lora-")


def test_all_names_of_a_model_lead_to_one_handle() -> None:
    assert handle_of(model("a/b", "c/d"), Mode.LORA) == handle_of(model("c/d", "a/b"), Mode.LORA)


def test_another_mode_directory_or_spelling_is_another_handle() -> None:
    handles = {
        handle_of(model("Qwen/Qwen3"), Mode.LORA),
        handle_of(model("Qwen/Qwen3"), Mode.FULL),
        handle_of(model("qwen/qwen3"), Mode.LORA),
        handle_of(model("Qwen/Qwen3", path="/models/other"), Mode.LORA),
    }
    assert len(handles) == 4
