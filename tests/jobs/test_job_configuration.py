"""Configurations of job classes: typed, from YAML and overrides, compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic
import pytest

from trainmaster.jobs.basic_job import BasicJob
from trainmaster.jobs.config_document import (
    ConfigurationError,
    config_type,
    differences,
    from_yaml,
    overlaid,
    overlay_of,
    overridden,
    plain,
    to_yaml,
    typed,
)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int
    optimizer: Optimizer = field(default_factory=Optimizer)
    parts: list[Optimizer] = field(default_factory=list)
    data: Path = Path("data")
    clip: float = math.inf
    tag: str = ""


class Model(pydantic.BaseModel):
    steps: int = 1
    lr: float = 0.5


def test_typed_document_fills_defaults_and_converts() -> None:
    config = typed(Config, {"steps": "7", "optimizer": {"lr": 1}})
    assert config == Config(steps=7, optimizer=Optimizer(lr=1.0))


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"step": 1}, "step: unknown key; did you mean 'steps'?"),
        ({"steps": 1, "optimizer": {"lrr": 1}}, "optimizer.lrr: unknown key; did you mean 'lr'?"),
        ({"steps": 1, "parts": [{"beta": 1}]}, "parts.0.beta: unknown key; did you mean 'betas'?"),
        ({"steps": 1, "zzz": 1}, "zzz: unknown key; known are: steps, optimizer"),
        ({}, "steps: required, and has no default"),
        ({"steps": "many"}, "steps: input should be a valid integer"),
    ],
)
def test_typed_document_that_does_not_fit_is_refused_with_the_place(document: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s).") as caught:
        typed(Config, document)
    assert said in str(caught.value)


def test_every_problem_is_named() -> None:
    with pytest.raises(ConfigurationError) as caught:
        typed(Config, {"step": 1, "clip": "x"})
    assert len(str(caught.value).splitlines()) == 3


def test_configuration_survives_yaml() -> None:
    config = Config(steps=3, optimizer=Optimizer(lr=1e-5), tag="1e-4", data=Path("a/b"))
    assert typed(Config, from_yaml(to_yaml(plain(config)), "config.yaml")) == config


def test_texts_that_look_like_something_else_survive_yaml() -> None:
    document = {"a": ["on", "1e-4", "1.0", "null", "~", "2024-01-01", "true", "0o17", ".inf", "é", "a: b", ""]}
    assert from_yaml(to_yaml(document), "x") == document


@pytest.mark.parametrize("text", ["- 1", "just words", "a: [", "a: 1\na: 2"])
def test_text_that_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cfg\.yaml"):
        from_yaml(text, "cfg.yaml")


def test_empty_text_is_an_empty_configuration() -> None:
    assert from_yaml("# nothing\n", "x") == {}


def test_overrides_reach_inside_and_make_what_is_missing() -> None:
    assert overridden({"a": {"b": 1, "c": 2}}, ["a.b=1e-3", "d.e=[1, x]", r"f\.g=on"]) == {
        "a": {"b": 0.001, "c": 2},
        "d": {"e": [1, "x"]},
        "f.g": "on",
    }


@pytest.mark.parametrize("setting", ["a", "=1", "a..b=1", "a=[1"])
def test_override_that_makes_no_sense_is_refused(setting: str) -> None:
    with pytest.raises(ConfigurationError):
        overridden({}, [setting])


def test_overlay_of_a_model_says_only_what_was_set() -> None:
    assert overlay_of(Model(lr=0.1)) == {"lr": 0.1}
    assert overlay_of(Optimizer(lr=0.2)) == {"lr": 0.2, "betas": [0.9, 0.99]}
    assert overlay_of({"lr": 0.3}) == {"lr": 0.3}


def test_lists_are_replaced_not_merged() -> None:
    assert overlaid({"a": [1, 2], "b": {"c": 1}}, {"a": [3], "b": 4}) == {"a": [3], "b": 4}


def test_differences_are_readable_and_complete() -> None:
    old, new = plain(Config(steps=1, tag="x")), plain(Config(steps=2, optimizer=Optimizer(betas=(0.5, 0.9))))
    assert differences(old, new) == [
        "steps: 1 -> 2",
        "optimizer.betas: [0.9, 0.99] -> [0.5, 0.9]",
        'tag: "x" -> ""',
    ]
    assert differences(old, old) == []


def test_differences_ignore_order_and_tell_numbers_apart() -> None:
    assert differences({"a": 1, "b": [{"c": 1, "d": 2}]}, {"b": [{"d": 2, "c": 1}], "a": 1}) == []
    assert differences({"a": 1, "b": 1}, {"a": 1.0, "b": True}) == ["a: 1 -> 1.0", "b: 1 -> true"]


T = TypeVar("T")


class Middle(BasicJob[T], Generic[T]):
    def run(self) -> None: ...


class Leaf(Middle[Config]):
    pass


class Below(Leaf):
    pass


class Free(BasicJob):  # type: ignore[type-arg]
    def run(self) -> None: ...


class Wrong(BasicJob[int]):
    def run(self) -> None: ...


def test_configuration_class_is_found_through_generic_bases() -> None:
    assert config_type(Leaf) is Config
    assert config_type(Below) is Config
    assert config_type(Free) is dict


def test_configuration_class_that_has_no_fields_is_refused() -> None:
    with pytest.raises(TypeError, match="dataclass or a pydantic model"):
        config_type(Wrong)
