from __future__ import annotations

import json
import secrets
from collections.abc import Callable

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.client import Client, RefusedError, UnauthorizedError

Run = Callable[..., Result]
JOB = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}, "resource_config": {"gpu_count": 0}}


@pytest.fixture
def account(connected: Server, tm: Run) -> str:
    name = f"team-{secrets.token_hex(4)}"
    result = tm("accounts", "create", name)
    assert result.exit_code == 0, result.output
    assert f"keys create --account {name}" in result.stdout
    return name


def make_key(tm: Run, *arguments: str) -> dict[str, str]:
    result = tm("keys", "create", "--name", "ci", *arguments, "--json")
    assert result.exit_code == 0, result.output
    made: dict[str, str] = json.loads(result.stdout)
    return made


def test_key_is_made_used_and_revoked(server: Server, tm: Run, account: str) -> None:
    made = make_key(tm, "--account", account, "--scopes", "view, manage", "--prefix", "tml-")
    assert made["key"].startswith("tml-")
    assert made["scopes"] == ["view", "manage"]
    with Client(server.url, made["key"]) as client:
        assert list(client.list()) == []
        listed = tm("keys", "list").stdout
        assert made["key_id"] in listed
        assert made["key"] not in listed
        assert tm("keys", "revoke", made["key_id"]).exit_code == 0
        with pytest.raises(UnauthorizedError):
            list(client.list())
    assert made["key_id"] not in tm("keys", "list").stdout
    assert made["key_id"] in tm("keys", "list", "--all").stdout
    again = tm("keys", "revoke", made["key_id"])
    assert again.exit_code == 1
    assert made["key_id"] in again.stderr


def test_key_for_people_is_alone_on_stdout(connected: Server, tm: Run) -> None:
    result = tm("keys", "create", "--name", "mine")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 1
    assert result.stdout.startswith("eyJ")
    assert "shown once" in result.stderr


def test_account_is_listed_and_removed_once_it_has_no_keys(tm: Run, account: str) -> None:
    made = make_key(tm, "--account", account)
    assert account in tm("accounts", "list").stdout
    refused = tm("accounts", "remove", account)
    assert refused.exit_code == 1
    assert "revoke them first" in refused.stderr
    tm("keys", "revoke", made["key_id"])
    assert tm("accounts", "remove", account).exit_code == 0
    assert account not in tm("accounts", "list").stdout


def test_job_of_an_account_without_a_user_of_its_own_is_refused_with_the_remedy(
    server: Server, tm: Run, account: str
) -> None:
    made = make_key(tm, "--account", account)
    with Client(server.url, made["key"]) as client:
        with pytest.raises(RefusedError, match=f"accounts edit {account} --uid"):
            client.submit(JOB)
        assert list(client.list()) == []


def test_uid_of_an_account_is_changed(tm: Run, account: str) -> None:
    assert tm("accounts", "edit", account, "--uid", "1500").exit_code == 0
    listed = json.loads(tm("accounts", "list", "--json").stdout)
    assert next(each["uid"] for each in listed if each["account_id"] == account) == 1500
    assert tm("accounts", "edit", account, "--uid", "0").exit_code == 0
    listed = json.loads(tm("accounts", "list", "--json").stdout)
    assert next(each["uid"] for each in listed if each["account_id"] == account) is None


@pytest.mark.parametrize("arguments", [("--scopes", "view,fly"), ("--prefix", "a b"), ("--account", "nobody")])
def test_key_that_makes_no_sense_is_refused_in_a_line(connected: Server, tm: Run, arguments: tuple[str, str]) -> None:
    result = tm("keys", "create", "--name", "x", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


def test_server_in_the_open_is_not_started_without_tls(tm: Run, tmp_path: object) -> None:
    result = tm("serve", "--host", "0.0.0.0", "--port", "0", "--data-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "--behind-proxy" in result.stderr
