"""`docs/compatibility.md` says what the installed clients can ask for, and nothing that they ask for is unanswered."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "compatibility.py"


@pytest.fixture(scope="module")
def compatibility() -> ModuleType:
    """The script that writes the page."""
    spec = importlib.util.spec_from_file_location("compatibility", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compatibility"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def clients(compatibility: ModuleType) -> list[dict[str, Any]]:
    return [compatibility.reflect(environment) for environment in compatibility.ENVIRONMENTS]


def test_every_request_of_every_client_is_answered(compatibility: ModuleType, clients: list[dict[str, Any]]) -> None:
    assert compatibility.unanswered(clients) == []


def test_latest_client_is_read_to_the_last_path(clients: list[dict[str, Any]]) -> None:
    latest = clients[-1]
    paths = {request.partition(" ")[2] for request in latest["requests"]}
    assert latest["version"] != "0.36.0" or len(paths) == 44
    assert latest["methods"]["TrainingClient.optim_step"] == ["POST /optim_step", "POST /retrieve_future"]
    assert "POST /create_model" in latest["methods"]["ServiceClient.create_training_client_from_state"]


def test_page_is_up_to_date(compatibility: ModuleType, clients: list[dict[str, Any]]) -> None:
    page = compatibility.PAGE.read_text()
    versions = ", ".join(client["version"] for client in clients)
    if f"The clients are {versions}." not in page:
        pytest.skip(f"the page is about other versions than {versions}")
    assert compatibility.page(clients) == page
