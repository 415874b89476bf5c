"""Older versions of `tinker`: 0.24.1 speaks JSON both ways, 0.25.0 is the first that speaks protobuf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from client_programs import Client, facts

SAME = ("train", "pipelined", "chunked", "sample", "prompt_logprobs")
SCENARIOS = (*SAME, "save_and_resume", "saved_sampler", "mistakes")


@pytest.fixture(scope="module", params=["tinker-0.24.1", pytest.param("tinker-0.25.0", marks=pytest.mark.long)])
def results(request: pytest.FixtureRequest, client: Callable[[str], Client]) -> dict[str, Any]:
    """What the scenarios of a version have to say."""
    return client(request.param).scenarios("tinker_client.py", *SCENARIOS)


@pytest.fixture(scope="module")
def latest(client: Callable[[str], Client]) -> dict[str, Any]:
    """The same scenarios with the latest version."""
    return client("tinker").scenarios("tinker_client.py", *SCENARIOS)


@pytest.mark.parametrize("scenario", SAME)
def test_older_clients_see_the_same_numbers(results: dict[str, Any], latest: dict[str, Any], scenario: str) -> None:
    assert facts(results, scenario) == facts(latest, scenario)


def test_older_clients_save_and_resume(results: dict[str, Any]) -> None:
    found = facts(results, "save_and_resume")
    assert found["resumed"] == found["went_on"]
    saved = facts(results, "saved_sampler")
    assert all(one["other"] == saved["own"] for one in saved["others"])


def test_older_clients_are_told_of_mistakes(results: dict[str, Any], latest: dict[str, Any]) -> None:
    found, expected = facts(results, "mistakes"), facts(latest, "mistakes")
    assert {name: error["type"] for name, error in found["mistakes"].items()} == {
        name: error["type"] for name, error in expected["mistakes"].items()
    }
    assert found["losses"] == expected["losses"]
