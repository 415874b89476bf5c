"""A real server that knows a small model under the names that public clients ask for, and the clients themselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from client_model import COOKBOOK_NAME, FIREWORKS_NAME, HUB_NAME, make_hub, make_model
from client_programs import Client
from real_server import RealServer, running

SCRIPT = Path(__file__).parents[2] / "scripts" / "compatibility.py"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and one that stands for the hub."""
    directory = tmp_path_factory.mktemp("clients")
    make_model(directory / "model")
    make_hub(directory / "hub")
    return directory


@pytest.fixture(scope="module")
def service_server(ground: Path) -> Iterator[RealServer]:
    """A server with trainer services for that model, shared by the tests of a file."""
    aliases = [f"{name}={ground / 'model'}" for name in (HUB_NAME, FIREWORKS_NAME, COOKBOOK_NAME)]
    flags = [word for alias in aliases for word in ("--model-alias", alias)]
    with running(ground / "data", "--data-root", str(ground), *flags) as started:
        yield started
        # Clients try again, and hide what went wrong the first time.
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]


@pytest.fixture(scope="module")
def compatibility() -> ModuleType:
    """The script that writes `docs/reference/compatibility.md`."""
    spec = importlib.util.spec_from_file_location("compatibility", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compatibility"] = module
    sys.path.append(str(SCRIPT.parent))  # for what the script imports
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def clients(compatibility: ModuleType) -> list[dict[str, Any]]:
    """What every installed version of `tinker` can ask for, the latest last."""
    return [compatibility.reflect(environment) for environment in compatibility.ENVIRONMENTS]


@pytest.fixture(scope="module")
def latest(compatibility: ModuleType) -> dict[str, Any]:
    """What the latest of them can ask for."""
    return dict(compatibility.reflect(compatibility.ENVIRONMENTS[-1]))


@pytest.fixture(scope="module")
def client(service_server: RealServer, ground: Path) -> Callable[[str], Client]:
    """Makes the client of an environment: `client("tinker")`."""
    return lambda name: Client(name, service_server, ground / "hub")
