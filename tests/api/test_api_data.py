"""A look at training data over HTTP: real rows, read by a process of its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_world import Api, Served, World

from data_tokenizer import make_tokenizer
from patience import PATIENCE_S
from process_signals import kill_marked
from trainmaster.server.coordinator import data_checks as checking
from trainmaster.server.coordinator.data_checks import DataCheck, DataChecks
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import ConflictError, RefusedError
from trainmaster.server.settings.settings import Settings

ROWS = [{"prompt": "q:", "completion": "yes"}, {"prompt": "r:", "completion": 3}]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with a tokenizer and rows."""
    directory = tmp_path_factory.mktemp("root")
    make_tokenizer().save_pretrained(directory / "model")
    (directory / "good.jsonl").write_bytes(lines(ROWS[:1]))
    return directory


@pytest.fixture(scope="module")
def settings(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data_dir=tmp_path_factory.mktemp("data"), data_roots=(root,), shared_uid=True)


@pytest.fixture(scope="module")
def served(world: World, settings: Settings) -> Iterator[Served]:
    with Served.serve(world.context(data_checks=DataChecks(settings))) as served:
        yield served


@pytest.fixture
def api(world: World, served: Served) -> Iterator[Api]:
    account_id = f"account-{secrets.token_hex(4)}"
    key = world.key(account_id)
    with httpx.Client(
        base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S, verify=False
    ) as http:
        yield Api(http=http, world=world, account_id=account_id, key=key)


def test_rows_are_shown_as_the_model_will_see_them_and_wrong_ones_named(api: Api, root: Path) -> None:
    data = lines(ROWS)
    digest = hashlib.sha256(data).hexdigest()
    api.call("PUT", f"/v1/blobs/{digest}", 201, content=data)
    found = api.call(
        "POST",
        "/v1/data/validate",
        json={
            "data_config": {
                "sources": [{"path": "sent/rows.jsonl"}, {"path": str(root / "good.jsonl")}, {"path": "/etc/passwd"}],
                "max_seq_length": 64,
            },
            "base_model": {"model_id": str(root / "model")},
            "files": [{"path": "sent/rows.jsonl", "sha256": digest}],
            "limit": 1,
        },
    )
    sent, local, refused = found["sources"]
    assert not found["ok"]
    assert sent["samples"][0]["segments"] == [
        {"text": "q:", "tokens": 2, "trained": False},
        {"text": "yes</s>", "tokens": 4, "trained": True},
    ]
    assert sent["problems"] == [
        {
            "message": "sent/rows.jsonl, line 2, column 'completion': is a number; expected text",
            "file": "rows.jsonl",
            "row": 2,
            "column": "completion",
        }
    ]
    assert local["ok"]
    assert "data roots alone" in refused["problems"][0]["message"]


@pytest.mark.long  # the next one has this without a tokenizer
def test_sources_and_preprocess_may_be_given_without_the_rest_of_a_data_config(api: Api, root: Path) -> None:
    body = {
        "sources": [{"path": str(root / "good.jsonl")}],
        "preprocess": {"tokenizer_id": str(root / "model"), "add_eos": False},
    }
    (source,) = api.call("POST", "/v1/data/validate", json=body)["sources"]
    assert [segment["text"] for segment in source["samples"][0]["segments"]] == ["q:", "yes"]


def test_sources_and_preprocess_reach_the_check_as_a_data_config(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[DataCheck] = []

    async def run(checks: DataChecks, account: Account, check: DataCheck) -> Any:
        checked.append(check)
        raise RefusedError("seen")

    monkeypatch.setattr(DataChecks, "run", run)
    body = {"sources": [{"path": "/a.jsonl"}], "preprocess": {"tokenizer_id": "/model", "add_eos": False}}
    assert api.call("POST", "/v1/data/validate", 400, json=body)["message"] == "seen"
    config = checked[0].document["data_config"]
    assert [source["path"] for source in config["sources"]] == ["/a.jsonl"]
    assert body["preprocess"].items() <= config["preprocess"].items()


def test_server_without_the_training_stack_says_what_to_install(world: World, settings: Settings, root: Path) -> None:
    checks = DataChecks(settings, installed=lambda name: name != "transformers")
    with Served.serve(world.context(data_checks=checks)) as served:
        headers = {"Authorization": f"Bearer {world.key('poor')}"}
        response = httpx.post(
            f"{served.url}/v1/data/validate",
            headers=headers,
            json={"data_config": {"sources": [{"path": "a.jsonl"}]}},
            verify=False,
        )
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message == "this server cannot read training data: it lacks transformers; pip install 'trainmaster[train]'"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 422, "data_config"),
        ({"data_config": {"sources": [{"path": "a"}]}, "sources": [{"path": "b"}]}, 422, "part of data_config"),
        ({"data_config": {"sources": [{"path": "a"}]}, "preprocess": {}}, 422, "part of data_config"),
        ({"data_config": {"sources": []}}, 422, "data_config.sources"),
        ({"data_config": {"sources": [{"path": "ftp://a"}]}}, 422, "unknown scheme 'ftp'"),
        ({"data_config": {"sources": [{"path": "a"}]}, "limit": 101}, 422, "limit"),
        (
            {"data_config": {"sources": [{"path": "a"}]}, "hyperparameters": {"lerning_rate": "1"}},
            400,
            "learning_rate",
        ),
        ({"data_config": {"sources": [{"path": "a"}]}, "files": [{"path": "a", "sha256": "0" * 64}]}, 404, "uploaded"),
        (
            {"data_config": {"sources": [{"path": "a"}]}, "base_model": {"model_id": "a", "trust_remote_code": True}},
            400,
            "allow_trust_remote_code",
        ),
    ],
)
def test_request_that_makes_no_sense_is_refused(api: Api, body: dict[str, Any], status: int, message: str) -> None:
    error = api.call("POST", "/v1/data/validate", status, json=body)
    assert message in json.dumps(error)


def test_blob_of_another_account_cannot_be_looked_at(api: Api, world: World) -> None:
    data = b"{}\n"
    digest = hashlib.sha256(data).hexdigest()
    other = {"Authorization": f"Bearer {world.key('data-other')}"}
    api.call("PUT", f"/v1/blobs/{digest}", 201, content=data, headers=other)
    body = {"data_config": {"sources": [{"path": "a.jsonl"}]}, "files": [{"path": "a.jsonl", "sha256": digest}]}
    assert api.call("POST", "/v1/data/validate", 404, json=body)["code"] == "NOT_FOUND"


# The process, without the API


ACCOUNT = Account(account_id="default", created_at=0.0)


def check_of(*paths: Path | str, **more: Any) -> DataCheck:
    sources = [{"path": str(path)} for path in paths]
    document = {"training_config": {"training_type": "SFT"}, "data_config": {"sources": sources}}
    return DataCheck(document=document, **more)


async def run(settings: Settings, check: DataCheck, account: Account = ACCOUNT) -> dict[str, Any]:
    return await DataChecks(settings).run(account, check)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may pass through."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
def test_check_runs_as_the_accounts_user_and_leaves_nothing(
    settings: Settings, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (public / "temporary").mkdir(mode=0o711)
    (public / "shipped").write_bytes(b"mine")
    (public / "shipped").chmod(0o600)
    # In the place of Python, which need not be executable for everybody on a machine that runs tests.
    program = public / "program"
    program.write_text(
        '#!/bin/sh\nprintf \'{"uid": %s, "sent": "%s", "modes": "%s"}\' '
        '"$(id -u)" "$(cat a.jsonl)" "$(stat -c %a . ../in ../out ../err | tr "\\n" " ")"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(checking.sys, "executable", str(program))
    monkeypatch.setattr(tempfile, "tempdir", str(public / "temporary"))
    theirs = Account(account_id="theirs", uid=65534, created_at=0.0)
    found = asyncio.run(run(settings, check_of("a.jsonl", files={"a.jsonl": public / "shipped"}), theirs))
    assert found == {"uid": 65534, "sent": "mine", "modes": "700 600 600 600 "}
    assert not list((public / "temporary").iterdir())
    assert (public / "shipped").stat().st_uid == 0
    program.chmod(0o700)
    with pytest.raises(
        RefusedError, match=r"uid 65534, .* may not execute .*program: install Trainmaster where it may"
    ):
        asyncio.run(run(settings, check_of("a.jsonl"), theirs))


@pytest.mark.parametrize("name", ["json.py", "trainmaster.py"])
def test_shipped_file_is_not_run_in_the_place_of_a_module(settings: Settings, public: Path, name: str) -> None:
    (public / "code").write_text(f"import os; os.mkdir({str(public / 'was-run')!r})\n")
    (public / "rows").write_bytes(lines(ROWS[:1]))
    files = {name: public / "code", "a.jsonl": public / "rows"}
    assert asyncio.run(run(settings, check_of("a.jsonl", files=files)))["ok"]
    assert not (public / "was-run").exists()


def test_check_that_takes_too_long_is_ended(settings: Settings, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "TIMEOUT_S", 0.01)
    with pytest.raises(RefusedError, match=r"the check took longer than 0\.01 s, and was stopped"):
        asyncio.run(run(settings, check_of(root / "good.jsonl")))


def test_check_that_needs_too_much_memory_is_ended(
    settings: Settings, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "MEMORY_BYTES", 100 << 20)
    large = root / "large.jsonl"
    large.write_text(json.dumps({"text": "word " * 4_000_000}) + "\n")
    with pytest.raises(RefusedError, match="the check "):
        asyncio.run(run(settings, check_of(large)))


def test_callers_variables_reach_the_check_where_they_may(
    settings: Settings, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = public / "program"
    program.write_text('#!/bin/sh\nprintf \'{"token": "%s", "other": "%s"}\' "$HF_TOKEN" "$PYTHONPATH$AWS_PROXY_URL"\n')
    program.chmod(0o755)
    monkeypatch.setattr(checking.sys, "executable", str(program))
    for name in ("PYTHONPATH", "AWS_PROXY_URL"):
        monkeypatch.delenv(name, raising=False)
    variables = {
        "HF_TOKEN": "hf_mine",
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "PYTHONPATH": "/evil",
        "AWS_PROXY_URL": "http://127.0.0.1:1",
    }
    found = asyncio.run(run(settings, check_of("a.jsonl", environment=variables)))
    assert found == {"token": "hf_mine", "other": ""}
    others_can_reach = replace(settings, host="0.0.0.0")
    with pytest.raises(RefusedError, match=r"environment\.HF_ENDPOINT: a check on this server asks the usual services"):
        asyncio.run(run(others_can_reach, check_of("a.jsonl", environment=variables)))


def test_third_check_of_an_account_has_to_wait(settings: Settings, root: Path) -> None:
    async def three() -> list[Any]:
        checks = DataChecks(settings)
        looks = [checks.run(ACCOUNT, check_of(root / "good.jsonl")) for _ in range(3)]
        return await asyncio.gather(*looks, return_exceptions=True)

    first, second, third = asyncio.run(three())
    assert first["ok"]
    assert second["ok"]
    assert isinstance(third, ConflictError)


def test_checks_of_all_accounts_are_bounded(settings: Settings, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = public / "program"
    program.write_text(f"#!/bin/sh\nwhile [ ! -e {public}/go ]; do sleep 0.05; done; echo '{{}}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(checking.sys, "executable", str(program))

    async def many() -> list[Any]:
        checks = DataChecks(settings)
        accounts = [Account(account_id=f"account-{number}", created_at=0.0) for number in range(checking.AT_ONCE + 1)]
        looks = [asyncio.ensure_future(checks.run(account, check_of("a.jsonl"))) for account in accounts]
        await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
        (public / "go").touch()
        return await asyncio.gather(*looks, return_exceptions=True)

    *done, last = asyncio.run(many())
    assert done == [{}] * checking.AT_ONCE
    assert isinstance(last, ConflictError)


def test_check_is_over_with_its_process_whoever_holds_its_streams(
    settings: Settings, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = public / "program"
    lines = (
        "#!/bin/sh",
        "setsid sh -c 'echo $$ > stray; exec sleep 600' &",
        "while [ ! -s stray ]; do sleep 0.05; done",
        f"mv stray {public}",
        "echo {}",
    )
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.setattr(checking.sys, "executable", str(program))
    try:
        assert asyncio.run(run(settings, check_of("a.jsonl"))) == {}
    finally:
        kill_marked(int((public / "stray").read_text()), "sleep")


def test_answer_that_is_too_large_is_not_read(settings: Settings, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "MAX_ANSWER_BYTES", 100)
    with pytest.raises(RefusedError, match="is too large; set a lower limit"):
        asyncio.run(run(settings, check_of(root / "good.jsonl")))
