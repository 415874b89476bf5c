from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import Result

from patience import PATIENCE_S
from trainmaster import __version__
from trainmaster.cli.app import GROUPS

NAMES = [name for commands in GROUPS.values() for name in commands]
IN_THE_FOREGROUND = ("serve", "run")
"""What they write is what runs in them."""
HEAVY = ("httpx", "rich.console", "yaml", "pydantic", "sqlalchemy", "fastapi", "trainmaster.server.process")


def test_help_lists_every_command_and_the_exit_codes(tm: Callable[..., Result]) -> None:
    result = tm("--help")

    assert result.exit_code == 0
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.startswith("  ") and line.split()}
    assert set(NAMES) <= listed
    assert "4 FAILED" in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_command_explains_itself(tm: Callable[..., Result], name: str) -> None:
    result = tm(name, "-h")

    assert result.exit_code == 0
    assert f" {name} " in result.stdout.splitlines()[0]
    shown = tm("data", "check", "-h").stdout if name == "data" else result.stdout
    assert name in IN_THE_FOREGROUND or "--json" in shown


def test_version_is_told(tm: Callable[..., Result]) -> None:
    assert tm("--version").stdout == f"trainmaster {__version__}\n"


def test_mistyped_command_leads_to_the_nearest(tm: Callable[..., Result]) -> None:
    result = tm("sumbit")

    assert result.exit_code == 2
    assert "submit" in result.stderr


@pytest.mark.parametrize(
    ("other", "ours"), [("list", "ps"), ("status", "show"), ("train", "submit"), ("stop", "cancel")]
)
def test_command_of_another_tool_leads_to_ours(tm: Callable[..., Result], other: str, ours: str) -> None:
    result = tm(other, "job")

    assert result.exit_code == 2
    assert f"No such command '{other}'. Did you mean '{ours}'?" in result.stderr


def test_help_imports_nothing_that_takes_long() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trainmaster", "--help"]

    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)

    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines() if line.startswith("import time:")}
    assert "trainmaster.cli.app" in imported
    assert imported.isdisjoint(HEAVY)
