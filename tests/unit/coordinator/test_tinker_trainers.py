"""What the jobs that serve plain Tinker clients are called."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.server.coordinator.base_models import BaseModel
from trainmaster.server.doors.tinker.trainer_jobs import handle_of


def model(name: str, *aliases: str, path: str = "/models/m") -> BaseModel:
    return BaseModel(name=name, path=Path(path), aliases=aliases)


@given(
    st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=200),
    st.sampled_from(ModelMode),
)
def test_handle_is_one_that_a_job_may_have(directory: str, mode: ModelMode) -> None:
    handle = handle_of(model("a/b", path=f"/models/{directory}"), mode)
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", handle)


@pytest.mark.parametrize("path", ["/srv/models/Qwen3-8B", "/c/hub/models--Qwen--Qwen3-8B/snapshots/0123456789abcdef"])
def test_handle_tells_the_model_by_its_directory(path: str) -> None:
    assert re.fullmatch(r"tinker-(qwen-)?qwen3-8b-lora-[0-9a-f]{8}", handle_of(model("a/b", path=path), ModelMode.LORA))


def test_handle_bears_no_name_that_another_client_uses() -> None:
    """All names of a directory share a trainer; whichever was asked for, the handle is the same and names none."""
    for asked, other in (("Qwen/Qwen3-8B", "accounts/x/models/y"), ("accounts/x/models/y", "Qwen/Qwen3-8B")):
        handle = handle_of(model(asked, other, path="/models/m"), ModelMode.LORA)
        assert handle.startswith("tinker-m-lora-")
        assert handle == handle_of(model("Qwen/Qwen3-8B", path="/models/m"), ModelMode.LORA)


def test_another_mode_or_directory_is_another_handle() -> None:
    handles = {
        handle_of(model("Qwen/Qwen3"), ModelMode.LORA),
        handle_of(model("Qwen/Qwen3"), ModelMode.FULL),
        handle_of(model("Qwen/Qwen3", path="/models/other"), ModelMode.LORA),
        handle_of(model("Qwen/Qwen3", path="/other/m"), ModelMode.LORA),
    }
    assert len(handles) == 4
