"""A root server works for accounts that have a uid, while a process of that user attacks it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from api_world import Api, Served, World
from fireworks_world import MODEL, Door, door_of, knowing

from attacker import UID, give, interfering
from deep_tree import deep_tree
from model_config import model_config
from trainmaster.server.coordinator.data_checks import DataCheck, DataChecks
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root works for other users")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of root's, with a file; both have to stay as they are."""
    directory = tmp_path / "victim"
    directory.mkdir(mode=0o700)
    (directory / "target").touch(mode=0o600)
    yield directory
    assert {path.lstat().st_uid for path in (directory, *directory.iterdir())} == {0}
    assert {path.name for path in directory.iterdir()} == {"target"}


# -- promotion --


@pytest.fixture(scope="module")
def fireworks(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with knowing(world, tmp_path_factory.mktemp("models")) as served:
        yield served


@pytest.fixture
def door(world: World, fireworks: Served) -> Iterator[Door]:
    """A client of an account whose jobs run as a user of their own."""
    account_id = f"account-{secrets.token_hex(4)}"
    account = Account(account_id=account_id, created_at=time.time(), uid=UID)
    world.database.write_now(lambda connection: accounts.create(connection, Scope.everything(), account))
    with door_of(world, fireworks, account_id) as door:
        yield door


def saved_by(door: Door) -> Path:
    """The checkpoint of a running trainer."""
    door.create("trainer")
    saved = door.save(door.run("trainer"), "sampler", "step-1", sampler_kind="base")
    (saved / "f0").touch()
    (saved / "nested").mkdir()
    (saved / "nested" / "more").touch()
    give(saved)
    return saved


def promote(door: Door, name: str = "step-1") -> dict[str, object]:
    body = {
        "output_model": f"accounts/{door.account_id}/models/my-model",
        "trainer_job_id": f"accounts/{door.account_id}/rlorTrainerJobs/trainer",
        "base_model": MODEL,
        "async_promotion": True,
    }
    path = f"/v1/accounts/{door.account_id}/checkpoints/{name}:promote"
    operation: dict[str, object] = door.call("POST", path, json=body)["operation"]
    return operation


@as_root
def test_promotion_touches_nothing_behind_a_link_that_a_job_swaps_in(door: Door, world: World, victim: Path) -> None:
    saved_by(door)
    artifacts = world.roots.path(ARTIFACTS, "")
    artifacts.chmod(0o711)
    top = os.open(artifacts, os.O_RDONLY)
    swapped = []

    def swap() -> None:
        for directory in (f"models/{door.account_id}", ".drafts"):
            with contextlib.suppress(OSError):
                home = os.open(directory, os.O_RDONLY, dir_fd=top)
                try:
                    for name in os.listdir(home):
                        os.rename(name, f"away-{name}", src_dir_fd=home, dst_dir_fd=home)
                        os.symlink(victim, name, dir_fd=home)
                        swapped.append(name)
                finally:
                    os.close(home)

    with interfering(swap):
        assert "error" not in promote(door)
    os.close(top)
    assert swapped == []


@as_root
def test_promoted_model_is_its_accounts_and_the_directory_of_all_models_is_the_servers(
    door: Door, world: World
) -> None:
    saved = saved_by(door)
    home = world.roots.path(ARTIFACTS, f"models/{door.account_id}")
    # As a server of an earlier version left it: given away as a whole.
    home.mkdir(parents=True)
    give(home)
    assert "error" not in promote(door)
    model = home / "my-model"
    assert {path.lstat().st_uid for path in (model, *model.rglob("*"))} == {UID}
    assert [(path.stat().st_uid, path.stat().st_mode & 0o777) for path in (home.parent, home)] == [(0, 0o711)] * 2
    assert os.path.samefile(model / "f0", saved / "f0")
    door.call("DELETE", f"/v1/accounts/{door.account_id}/models/my-model")
    assert list(home.iterdir()) == []
    assert (saved / "f0").exists()


@as_root
def test_hard_link_to_a_file_of_roots_is_not_promoted(door: Door, victim: Path) -> None:
    saved = saved_by(door)
    os.link(victim / "target", saved / "linked")  # as anybody can where fs.protected_hardlinks is 0
    assert "another user" in str(promote(door)["error"])


@as_root
def test_config_of_a_promoted_model_is_not_read_through_a_link(door: Door, world: World, tmp_path: Path) -> None:
    saved = saved_by(door)
    (saved / "adapter_config.json").unlink()
    (saved / "config.json").write_text("{}")
    os.chown(saved / "config.json", UID, UID)
    promote(door)
    config = world.roots.path(ARTIFACTS, f"models/{door.account_id}/my-model/config.json")
    (tmp_path / "secret.json").write_text(json.dumps(model_config()))
    name = f"accounts/{door.account_id}/models/my-model"
    config.unlink()
    config.symlink_to(tmp_path / "secret.json")
    assert "unknown base model" in door.create("second", 400, config_baseModel=name)["message"]
    config.unlink()
    os.mkfifo(config)  # which would hold up whoever opens it
    assert "unknown base model" in door.create("second", 400, config_baseModel=name)["message"]


# -- data validation --


@as_root
def test_data_check_touches_nothing_behind_a_link_that_a_job_swaps_in(
    victim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir(mode=0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    (tmp_path / "blob").write_text("{}")
    top = os.open(place, os.O_RDONLY)
    swapped = []

    def swap() -> None:
        for name in os.listdir(top):
            os.rename(f"{name}/work/sub", f"{name}/work/away", src_dir_fd=top, dst_dir_fd=top)
            os.symlink(victim, f"{name}/work/sub", dir_fd=top)
            swapped.append(name)

    account = Account(account_id="a", created_at=0.0, uid=UID)
    check = DataCheck(document={}, files={"sub/target": tmp_path / "blob"})
    checks = DataChecks(Settings(data_dir=tmp_path / "data"), installed=lambda _: True)
    with interfering(swap), pytest.raises(RefusedError):  # there is nothing to look at
        asyncio.run(checks.run(account, check))
    os.close(top)
    assert swapped  # in the directory that is the user's own by then
    assert list(place.iterdir()) == []


@as_root
def test_files_of_a_data_check_belong_to_the_user_of_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def look(self: DataChecks, check: DataCheck, directory: Path, uid: int | None, streams: list[IO[bytes]]) -> int:
        work = directory / "work"
        seen.update({str(path.relative_to(work)): path.lstat().st_uid for path in (work, *work.rglob("*"))})
        seen["outside"] = (directory.stat().st_uid, directory.stat().st_mode & 0o777)
        streams[1].write(b"{}")
        return 0

    monkeypatch.setattr(DataChecks, "_exit_code", look)
    (tmp_path / "blob").write_text("{}")
    checks = DataChecks(Settings(data_dir=tmp_path / "data"), installed=lambda _: True)
    account = Account(account_id="a", created_at=0.0, uid=UID)
    asyncio.run(checks.run(account, DataCheck(document={}, files={"a/b/rows.jsonl": tmp_path / "blob"})))
    assert seen == {".": UID, "a": UID, "a/b": UID, "a/b/rows.jsonl": UID, "outside": (0, 0o711)}
    both = DataCheck(document={}, files={"a": tmp_path / "blob", "a/b": tmp_path / "blob"})
    with pytest.raises(RefusedError, match="as a file and as a directory"):
        asyncio.run(checks.run(account, both))


LOOKS = """#!/bin/sh
shows() { ls -A "$1" | tr '\\n' ' '; }
echo "{\\"uid\\": $(id -u), \\"home\\": \\"$(shows "$HOME")\\", \\"work\\": \\"$(shows .)\\","
touch "$HOME/own" && echo "\\"cache\\": \\"$TRAINMASTER_CACHE_DIR\\", \\"modules\\": \\"$HF_MODULES_CACHE\\"}"
"""


@as_root
def test_home_of_a_data_check_holds_nothing_that_was_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds tokens, and libraries read settings, credentials and modules from there."""
    shipped = (".netrc", ".cache/huggingface/token", ".cache/modules/evil.py", ".config/pip/pip.conf", ".aws/config")
    (tmp_path / "blob").touch()
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        program = Path(place, "python")
        program.write_text(LOOKS)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        checks = DataChecks(Settings(data_dir=tmp_path / "data"), installed=lambda _: True)
        check = DataCheck(document={}, files=dict.fromkeys(shipped, tmp_path / "blob"))
        seen = asyncio.run(checks.run(Account(account_id="a", created_at=0.0, uid=UID), check))
    assert (seen["uid"], seen["home"]) == (UID, "")
    assert seen["work"].split() == sorted({path.split("/")[0] for path in shipped})
    assert "/work/" not in seen["cache"] + seen["modules"]


# -- one job's trouble --


def test_deep_directory_of_one_job_is_no_trouble_for_lists(api: Api) -> None:
    ended = []
    with contextlib.ExitStack() as stack:
        for name in ("deep", "other"):
            job_id = api.submit(name=name)
            api.world.start(job_id)
            output = api.world.roots.path(ARTIFACTS, f"{job_id}/output")
            output.mkdir(parents=True)
            (output / "result").write_text("content")
            if name == "deep":
                stack.enter_context(deep_tree(output))
            api.world.end(job_id)
            ended.append(job_id)
        for job_id, count in zip(ended, (2, 1), strict=True):
            found = api.call("GET", f"/v1/jobs/{job_id}/artifacts")["artifacts"]
            assert len(found) == count
            for artifact in found:
                assert api.http.get(f"/v1/jobs/{job_id}/artifacts/{artifact['path']}").status_code == 200
        for job_id in ended:
            api.call("DELETE", f"/v1/jobs/{job_id}")
        assert [each["job_id"] for each in api.call("GET", "/v1/tombstones")["tombstones"]] == ended[::-1]
