"""docs/guides/trainer-client.md tells of every option and every field of a configuration, with its default."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from trainmaster.trainer import options, server_choice
from trainmaster.trainer.types import TrainJob

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "trainer-client.md").read_text()
CONFIGS = [
    each
    for each in vars(server_choice).values()
    if inspect.isclass(each)
    and issubclass(each, server_choice.BackendConfig)
    and each is not server_choice.BackendConfig
]
OPTIONS = [name for name in options.__all__ if issubclass(getattr(options, name), options.Option) and name != "Option"]


@pytest.mark.parametrize("name", OPTIONS)
def test_option_is_on_the_page_with_its_parameters(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}\((.*)\)` \|", PAGE, re.MULTILINE)
    written = re.findall(r"(\w+)(?==|,|$|\)$)", row) if name != "Volumes" else ["volumes"]
    assert [word for word in written if word not in ("True", "None")] == list(
        inspect.signature(getattr(options, name)).parameters
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_configuration_is_on_the_page_with_its_defaults(config: Any) -> None:
    start = PAGE.index(f"| `{config.__name__}` |")
    rows = PAGE[start:].splitlines()
    own = [rows[0], *_until_the_next(rows[1:])]
    told = {
        name: row.split("|")[3].strip().strip("`") for row in own for name in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert set(told) == set(config.model_fields)
    for name, field in config.model_fields.items():
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
        shown = told[name].replace('"', "")
        assert shown == ("none" if isinstance(default, server_choice.TrainingRuntimeSource) else str(default)), name


def test_fields_that_are_ours_are_on_the_page() -> None:
    added = [field.name for field in fields(TrainJob)][6:]
    told = " ".join(PAGE[PAGE.index("Its fields that Kubeflow does not have") :].split())
    assert ", ".join(f"`{name}`" for name in added[:-1]) + f" and `{added[-1]}`" in told


def _until_the_next(rows: list[str]) -> list[str]:
    found: list[str] = []
    for row in rows:
        if not row.startswith("| |"):
            break
        found.append(row)
    return found
