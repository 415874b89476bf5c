"""`trainmaster config`, and servers that start with settings files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_server import Server, retire_fork_server
from typer.testing import Result

from patience import PATIENCE_S
from trainmaster.client import Client, local
from webhook_receiver import receiving


def written(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "config.toml"
    file.write_text(text)
    return file


def test_config_shows_every_setting_with_where_it_comes_from(
    tm: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path / "data", "port = 8080\nsecret_key = 'canary'\n[queues.research]\nweight = 2\n")
    monkeypatch.setenv("TRAINMASTER_HOST", "127.0.0.9")
    result = tm("config", "--data-dir", str(tmp_path / "data"))
    assert result.exit_code == 0, result.stderr
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["port"][1:3] == ["8080", f"{file}:1"]
    assert lines["host"][1:3] == ["127.0.0.9", "TRAINMASTER_HOST"]
    assert lines["lease_s"][1:3] == ["5.0", "default"]
    assert lines["data_dir"][2] == "--data-dir"
    assert lines["secret_key"][1] == "***"
    assert "[queues.research]" in lines
    assert "canary" not in result.stdout


def test_config_is_told_to_programs(tm: Callable[..., Result], tmp_path: Path) -> None:
    written(tmp_path / "data", "roles = ['api']\n[webhooks.a]\nurl = 'http://a'\nsecret = 'sixteen characters'\n")
    told = json.loads(tm("config", "--data-dir", str(tmp_path / "data"), "--json").stdout)
    assert told["problems"] == []
    assert (told["settings"]["roles"]["value"], told["settings"]["roles"]["source"]) == (["api"], "file")
    assert told["webhooks"]["a"] == {"url": "http://a", "secret": "***", "account": "default", "statuses": []}


def test_config_check_fails_with_every_problem(tm: Callable[..., Result], tmp_path: Path) -> None:
    file = written(tmp_path, "prot = 1\nport = 'x'\n")
    result = tm("config", "--config", str(file), "--check")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"error: {file}:1: prot: unknown setting; did you mean 'port'?",
        f"error: {file}:2: port: must be a whole number",
    ]
    told = json.loads(tm("config", "--config", str(file), "--json").stdout)
    assert [problem["place"] for problem in told["problems"]] == [f"{file}:1: prot", f"{file}:2: port"]
    file.write_text("port = 1\n")
    assert tm("config", "--config", str(file), "--check").exit_code == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("host = '0.0.0.0'", "on 0.0.0.0 keys and jobs would travel in the clear"),
        ("tls_cert = 'nothing.pem'", "tls_cert and tls_key belong together"),
        ("backends = ['slurm']", "backends: there is no backend 'slurm'; there are: local"),
        ("simulated_gpus = 'H100*8'", "simulated_gpus: 'H100*8' is not TYPE:COUNT"),
        ("simulated_gpus = 'H100:-1'", "simulated_gpus: 'H100:-1' is not TYPE:COUNT"),
        ("database_url = 'mysql://x'", "database_url: mysql://x: no such kind of database is known"),
        ("database_url = 'postgresql://x/y'", "needs the setting secret_key"),
        ("secret_key = 'abc'", "secret_key holds no key"),
        ("token_exchange = 'http://x.example'", "token_exchange must be https"),
        ("[accounts.a]\nuid = 0", "jobs of account a would run as root"),
        ("[webhooks.a]\nurl = 'ftp://x'\nsecret = 'sixteen characters'", "webhooks.a.url: must begin with http"),
        ("[webhooks.a]\nurl = 'http://x'\nsecret = 'short'", "webhooks.a.secret: must have 16 to 256 printable"),
    ],
)
def test_check_tells_what_keeps_a_server_from_starting(
    tm: Callable[..., Result], tmp_path: Path, text: str, problem: str
) -> None:
    data = tmp_path / "data"
    file = written(tmp_path, f"{text}\n")
    for command in (("config", "--check"), ("serve", "--port", "0")):
        result = tm(*command, "--config", str(file), "--data-dir", str(data))
        assert result.exit_code == 1
        assert problem in result.stderr
    assert not data.exists()


def test_example_is_a_file_that_a_server_takes(tm: Callable[..., Result], tmp_path: Path) -> None:
    example = tm("config", "--example")
    file = written(tmp_path, example.stdout)
    assert tm("config", "--config", str(file), "--check").exit_code == 0


def test_server_with_an_unknown_setting_does_not_start(tm: Callable[..., Result], tmp_path: Path) -> None:
    file = written(tmp_path, "prot = 1\n")
    result = tm("serve", "--config", str(file), "--data-dir", str(tmp_path / "data"))
    assert result.exit_code == 2
    assert f"{file}:1: prot: unknown setting; did you mean 'port'?" in result.stderr
    assert not (tmp_path / "data").exists()


def test_local_server_starts_with_its_file(tm: Callable[..., Result], tmp_path: Path) -> None:
    home = tmp_path / "home"
    with receiving() as receiver:
        text = f"""
            simulated_gpus = "H100-80GB:2"
            [queues.research]
            weight = 2.5
            quota_gpus = 4
            [accounts.vision]
            uid = 1500
            [webhooks.chat]
            url = "{receiver.url}"
            secret = "{receiver.secret}"
            statuses = ["CANCELLED"]
        """
        written(home, text)
        try:
            assert tm("up").exit_code == 0
            with Client() as client:
                (node,) = client.nodes()
                assert [gpu["type"] for gpu in node["gpus"]] == ["H100-80GB"] * 2
                queue = next(queue for queue in client.cluster.queues() if queue["name"] == "research")
                assert (queue["weight"], queue["quota_gpus"]) == (2.5, 4)
                client.webhooks.change("chat", statuses=["FAILED"])
                client.webhooks.create("http://127.0.0.1:1/kept")
            tm("down")
            written(home, f'{text}\n[nodes."{node["id"]}"]\nlabels = ["rack-3"]\n')
            assert tm("up").exit_code == 0
            with Client() as client:
                assert "rack-3" in client.nodes()[0]["labels"]
                hooks = {hook["webhook_id"]: hook for hook in client.webhooks.list()}
                assert hooks["chat"]["statuses"] == ["CANCELLED"]
                assert len(hooks) == 2
                assert client.webhooks.test("chat")["delivered"]
                assert receiver.taken[-1]["type"] == "test"
        finally:
            local.stop()
            retire_fork_server(home)


def test_variables_of_settings_are_not_passed_on(tmp_path: Path) -> None:
    """What a server starts, the fork server and through it every worker, must not find the server's keys."""
    code = (
        "import os; os.environ['TRAINMASTER_SECRET_KEY'] = 'x'; os.environ['TRAINMASTER_URL'] = 'y'\n"
        "from trainmaster.server.settings.resolution import forget_variables\n"
        "forget_variables(); print(sorted(name for name in os.environ if name.startswith('TRAINMASTER_')))"
    )
    command: list[Any] = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True, env={"HOME": str(tmp_path)}
    )
    assert ran.stdout == "['TRAINMASTER_URL']\n"


def test_webhooks_are_added_listed_tested_and_removed(
    tm: Callable[..., Result], connected: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No webhooks" in tm("webhooks").stdout
    with receiving(200, 500) as receiver:
        monkeypatch.setenv("HOOK_SECRET", receiver.secret)
        added = tm("webhooks", "add", receiver.url, "--status", "failed", "--secret-from-env", "HOOK_SECRET")
        assert added.exit_code == 0, added.stderr
        assert receiver.secret not in added.stdout
        (hook,) = json.loads(tm("webhooks", "--json").stdout)
        assert hook["statuses"] == ["FAILED"]
        assert hook["webhook_id"] in tm("webhooks").stdout
        assert "answered with 200" in tm("webhooks", "test", hook["webhook_id"]).stdout
        assert receiver.taken[0]["type"] == "test"
        failed = tm("webhooks", "test", hook["webhook_id"])
        assert failed.exit_code == 1
        assert "answered with 500" in failed.stderr
        assert tm("webhooks", "remove", hook["webhook_id"]).exit_code == 0
        assert tm("webhooks", "remove", hook["webhook_id"]).exit_code == 1
    made = json.loads(tm("webhooks", "add", "http://127.0.0.1:1/", "--json").stdout)
    assert made["secret"]
    tm("webhooks", "remove", made["webhook_id"])


def test_webhook_with_a_secret_that_is_not_set_is_wrong_usage(tm: Callable[..., Result], connected: Server) -> None:
    result = tm("webhooks", "add", "http://127.0.0.1:1/", "--secret-from-env", "NOT_SET_AT_ALL")
    assert result.exit_code == 2
    assert "NOT_SET_AT_ALL" in result.stderr
