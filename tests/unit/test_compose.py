"""The compose file: its server takes its arguments, and runs on PostgreSQL with its settings."""

from __future__ import annotations

import base64
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from postgres_server import running_postgres
from real_server import RealServer
from trainmaster.plain_yaml import parse_yaml
from trainmaster.server.process import problems
from trainmaster.server.settings.resolution import resolve

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "compose.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """What the compose file declares."""
    document = parse_yaml(FILE.read_text(), FILE.name)
    assert set(document["services"]) == {"database", "server"}
    used = [volume.partition(":")[0] for service in document["services"].values() for volume in service["volumes"]]
    assert set(document["volumes"]) == set(used)
    return dict(document["services"])


def test_server_is_reached_from_its_own_machine_alone(services: dict[str, Any]) -> None:
    assert services["server"]["ports"] == ["127.0.0.1:7070:7070"]
    assert "ports" not in services["database"]


def test_settings_of_the_server_are_good(services: dict[str, Any], tmp_path: Path) -> None:
    server = services["server"]
    command, *arguments = server["command"]
    assert command == "serve"
    values = {"host": arguments[1], "port": int(arguments[3]), "behind_proxy": True, "data_dir": tmp_path}
    assert arguments == ["--host", "0.0.0.0", "--port", "7070", "--behind-proxy"]
    resolved = resolve(values, environment=_interpolated(server["environment"]))
    assert problems(resolved.settings, resolved.declared) == []
    database = services["database"]["environment"]
    user, name = database["POSTGRES_USER"], database["POSTGRES_DB"]
    assert resolved.settings.database == f"postgresql://{user}:secret@database/{name}"


def test_server_runs_on_postgresql_and_its_health_check_passes(services: dict[str, Any], tmp_path: Path) -> None:
    with running_postgres() as postgres:
        environment = {**_interpolated(services["server"]["environment"])}
        environment["TRAINMASTER_DATABASE_URL"] = postgres.url(postgres.new_database())
        server = RealServer(
            tmp_path / "data", *services["server"]["command"][1:], "--port", "0", environment=environment
        )
        try:
            server.start()
            assert server.until(server.submit("echo", "hello"))["status"] == "COMPLETED"
            kind, python, *check = services["server"]["healthcheck"]["test"]
            assert (kind, python) == ("CMD", "python")
            port = server.url.rpartition(":")[2]
            subprocess.run(
                [sys.executable, *(word.replace("7070", port) for word in check)], check=True, timeout=PATIENCE_S
            )
        finally:
            server.clean_up()


def test_image_installs_extras_that_exist() -> None:
    text = DOCKERFILE.read_text()
    (extras,) = re.findall(r"/src\[(.*?)\]", text)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(declared)
    copied = [word for line in text.splitlines() if line.startswith("COPY") for word in shlex.split(line)[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)


def _interpolated(environment: dict[str, str]) -> dict[str, str]:
    values = {"POSTGRES_PASSWORD": "secret", "TRAINMASTER_SECRET_KEY": base64.b64encode(bytes(32)).decode()}
    return {
        name: re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]], value) for name, value in environment.items()
    }
