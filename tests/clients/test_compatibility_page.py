"""docs/reference/compatibility.md lists every request that the installed clients can make; each one has an answer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tinker_calls import CALLS


@pytest.fixture(scope="module")
def fireworks(compatibility: ModuleType) -> dict[str, Any]:
    """What `fireworks-ai` offers."""
    return dict(compatibility.reflect_fireworks())


def test_every_request_of_every_client_is_made_in_a_test(clients: list[dict[str, Any]]) -> None:
    assert set(CALLS) == {request for client in clients for request in client["requests"]}


def test_every_request_of_every_client_is_answered(compatibility: ModuleType, clients: list[dict[str, Any]]) -> None:
    assert compatibility.unanswered(clients) == []


def test_latest_client_is_read_to_the_last_path(clients: list[dict[str, Any]]) -> None:
    latest = clients[-1]
    paths = {request.partition(" ")[2] for request in latest["requests"]}
    assert latest["version"] != "0.36.0" or len(paths) == 44
    assert latest["methods"]["TrainingClient.optim_step"] == ["POST /optim_step", "POST /retrieve_future"]
    assert "POST /create_model" in latest["methods"]["ServiceClient.create_training_client_from_state"]


def test_methods_work_only_where_no_request_of_theirs_is_refused(
    compatibility: ModuleType, clients: list[dict[str, Any]]
) -> None:
    for client in clients:
        for method, requests in client["methods"].items():
            kinds = {compatibility.kind_of(request) for request in requests}
            assert (compatibility.fate_of(requests)[0] == "refused") == ("refused" in kinds), method
    fates = {method: compatibility.fate_of(requests) for method, requests in clients[-1]["methods"].items()}
    # It reads a token that this server never hands out; and the other runs at the client, which uploads nothing here.
    assert fates["RestClient.whoami"][0] == "refused"
    assert fates["ServiceClient.create_custom_loss"] == ("works", "custom losses run in the client")
    assert all(why for kind, why in fates.values() if kind == "refused")


def test_page_is_up_to_date(
    compatibility: ModuleType, clients: list[dict[str, Any]], fireworks: dict[str, Any]
) -> None:
    page = compatibility.PAGE.read_text()
    versions = ", ".join(client["version"] for client in clients)
    if f"The versions of `tinker` are {versions}." not in page:
        pytest.skip(f"the page is about other versions than {versions}")
    if f"`fireworks.training.sdk` {fireworks['version']} " not in page:
        pytest.skip(f"the page is about another fireworks-ai than {fireworks['version']}")
    assert compatibility.page(clients, fireworks) == page


def test_refused_arguments_are_those_of_methods_that_work(
    compatibility: ModuleType, clients: list[dict[str, Any]]
) -> None:
    methods = clients[-1]["methods"]
    for method in compatibility.REFUSED_ARGUMENTS:
        assert compatibility.fate_of(methods[method])[0] == "works", method


def test_every_method_of_fireworks_has_a_fate_and_a_test(compatibility: ModuleType, fireworks: dict[str, Any]) -> None:
    told = compatibility.fireworks_methods
    fates = told.fates(fireworks)
    assert told.stale(fireworks) == []
    written = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    for method, fate in fates.items():
        assert fate.test or fate.kind in (told.OWN, told.ABSENT), method
        assert fate.why or fate.kind in (told.OWN, told.WORKS), method
        assert not fate.test or f"def {fate.test}(" in written, (method, fate.test)
