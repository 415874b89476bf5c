"""`--json` prints one JSON document when a command fails, too: for every command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import Result

from trainmaster.cli.app import app
from trainmaster.client import connection, local

Tm = Callable[..., Result]

NOWHERE = "http://127.0.0.1:1"
LOCAL_FAILURES: dict[str, tuple[str, ...]] = {
    "init": ("taken.yaml",),
    "simulate": ("--trace", "missing.csv"),
    "config": ("--config", "missing.toml"),
    "up": ("--config", "missing.toml"),
}
"""Commands that need no server, with arguments that make them fail."""
CANNOT_FAIL = {"down", "logout"}
"""Nothing that a test can arrange makes them fail, beside wrong usage."""
FINDINGS = {"config", "doctor"}
"""They list what they found, good and bad; that is their document."""


def with_json(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from with_json(each, (*path, name))
    if any("--json" in param.opts for param in command.params):
        yield " ".join(path), command


COMMANDS = dict(with_json(typer.main.get_command(app)))


def filled(command: Any) -> list[str]:
    """A value for everything that the command requires."""
    words: list[str] = []
    for param in command.params:
        if param.required:
            words += [param.opts[0], "1"] if param.param_type_name == "option" else ["some-name"]
    return words


def document_of(result: Result) -> Any:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    return json.loads(result.stdout)


def test_commands_with_json_are_found() -> None:
    assert {"ps", "submit", "accounts create", "checkpoints verify"} <= set(COMMANDS)
    assert CANNOT_FAIL | FINDINGS | set(LOCAL_FAILURES) <= set(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_wrong_usage_is_a_document(tm: Tm, name: str) -> None:
    result = tm(*name.split(), *filled(COMMANDS[name]), "--no-such-option", "--json")

    document = document_of(result)
    assert document["exit_code"] == result.exit_code == 2
    assert document["error"]["code"] == "USAGE"
    assert "--no-such-option" in document["error"]["message"]


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - CANNOT_FAIL))
def test_failure_is_a_document(tm: Tm, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINMASTER_URL", NOWHERE)
    monkeypatch.setenv("TRAINMASTER_API_KEY", "a-key")
    monkeypatch.setattr(connection, "RETRY_DELAYS_S", ())
    monkeypatch.setattr(local, "START_TIMEOUT_S", 5.0)
    (tmp_path / "taken.yaml").write_text("name: a\nworkload: {kind: command, argv: ['true']}\n")
    words = [*LOCAL_FAILURES.get(name, filled(COMMANDS[name]))]
    if name in ("submit", "data check"):
        words = ["taken.yaml"]
    if name == "compare":
        words = ["one", "other"]
    if name == "delete":
        words.append("--yes")

    result = tm(*name.split(), *words, "--json")

    document = document_of(result)
    if name in FINDINGS:
        assert "fail" in result.stdout if name == "doctor" else document["problems"]
        return
    assert document["exit_code"] == result.exit_code
    assert document["error"]["message"]
    if name not in LOCAL_FAILURES:
        assert document["error"]["code"] in ("UNREACHABLE", "USAGE"), document
    assert result.stderr, "people are told, too"


def test_refusal_of_the_server_is_a_document(tm: Tm, connected: object) -> None:
    result = tm("show", "job-000000000000", "--json")

    document = document_of(result)
    assert document["exit_code"] == result.exit_code == 1
    assert document["error"]["code"] == "JOB_NOT_FOUND"
    assert document["error"]["request_id"]


def test_several_jobs_are_one_document_with_an_error_in_place_of_a_job(
    tm: Tm,
    connected: object,
    submit: Callable[..., str],
) -> None:
    job_id = submit("sleep 60")

    result = tm("cancel", job_id, "job-000000000000", "--json")

    refused, cancelled = sorted(document_of(result), key=lambda each: "error" not in each or "job_id" in each)
    assert cancelled["job_id"] == job_id
    assert refused["job"] == "job-000000000000"
    assert refused["error"]["code"] == "JOB_NOT_FOUND"
