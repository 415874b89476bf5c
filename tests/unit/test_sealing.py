"""Sealing: what is sealed opens in its own row, with a key that the server has, and nowhere else."""

from __future__ import annotations

import base64
import dataclasses
import os
import stat
from pathlib import Path

import pytest

from trainmaster.server.settings.encryption import KEY_FILE, Sealer, SealError, key_id_of
from trainmaster.server.settings.settings import Settings

ABOUT = "secrets/default/job-1/env.WANDB_API_KEY"


def load(settings: Settings, *, may_make_key: bool = True) -> Sealer:
    return Sealer.load(settings, may_make_key=lambda: may_make_key)


def text_key() -> str:
    return base64.b64encode(os.urandom(32)).decode()


@pytest.mark.parametrize("value", ["", "hunter2", "snow ☃ and \U0001f98a", "x" * 65536, "line\nline"])
def test_sealed_value_opens_in_its_row(value: str) -> None:
    sealer = Sealer(os.urandom(32))
    sealed = sealer.seal(value, about=ABOUT)
    assert sealed.startswith("v1.")
    assert not value or value not in sealed
    assert sealer.open(sealed, about=ABOUT) == value


def test_seal_twice_differs() -> None:
    sealer = Sealer(os.urandom(32))
    assert sealer.seal("hunter2", about=ABOUT) != sealer.seal("hunter2", about=ABOUT)


def test_open_in_another_row_is_refused() -> None:
    sealer = Sealer(os.urandom(32))
    sealed = sealer.seal("hunter2", about=ABOUT)
    with pytest.raises(SealError, match="another row"):
        sealer.open(sealed, about=ABOUT.replace("job-1", "job-2"))


def test_open_of_changed_value_is_refused_without_saying_it() -> None:
    sealer = Sealer(os.urandom(32))
    form, key_id, body = sealer.seal("hunter2", about=ABOUT).split(".")
    data = bytearray(base64.b64decode(body))
    data[-1] ^= 1
    for changed in (base64.b64encode(bytes(data)).decode(), "", "AAAA", "not base64!"):
        with pytest.raises(SealError) as refused:
            sealer.open(f"{form}.{key_id}.{changed}", about=ABOUT)
        assert "hunter2" not in str(refused.value)


def test_open_with_unknown_key_names_key_and_remedy() -> None:
    key = os.urandom(32)
    sealed = Sealer(key).seal("hunter2", about=ABOUT)
    with pytest.raises(SealError, match=f"{key_id_of(key)}.*old_secret_keys"):
        Sealer(os.urandom(32)).open(sealed, about=ABOUT)


def test_open_of_unknown_form_is_refused() -> None:
    with pytest.raises(SealError, match="newer version"):
        Sealer(os.urandom(32)).open("v9.0000.AAAA", about=ABOUT)


def test_rotation_seals_with_new_key_and_opens_both(tmp_path: Path) -> None:
    first, second = text_key(), text_key()
    before = load(Settings(data_dir=tmp_path, secret_key=first))
    sealed = before.seal("hunter2", about=ABOUT)
    after = load(Settings(data_dir=tmp_path, secret_key=second, old_secret_keys=(first,)))
    assert after.open(sealed, about=ABOUT) == "hunter2"
    with pytest.raises(SealError):
        before.open(after.seal("hunter2", about=ABOUT), about=ABOUT)


def test_load_on_sqlite_makes_key_that_only_its_user_reads_and_keeps_it(tmp_path: Path) -> None:
    sealed = load(Settings(data_dir=tmp_path)).seal("hunter2", about=ABOUT)
    path = tmp_path / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(base64.b64decode(path.read_text())) == 32
    assert [entry.name for entry in tmp_path.iterdir()] == [KEY_FILE]
    assert load(Settings(data_dir=tmp_path)).open(sealed, about=ABOUT) == "hunter2"


def test_load_of_servers_that_share_sqlite_file_shares_key(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/shared/trainmaster.db"
    sealed = load(Settings(data_dir=tmp_path / "a", database_url=url)).seal("hunter2", about=ABOUT)
    assert load(Settings(data_dir=tmp_path / "b", database_url=url)).open(sealed, about=ABOUT) == "hunter2"


def test_load_on_postgresql_without_key_says_how_to_make_one(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url="postgresql://db/trainmaster")
    with pytest.raises(SealError, match="openssl rand -base64 32"):
        load(settings)
    load(dataclasses.replace(settings, secret_key=text_key()))
    assert list(tmp_path.iterdir()) == []


def test_load_makes_no_key_where_secrets_need_the_one_that_is_missing(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with pytest.raises(SealError, match="put it back"):
        load(settings, may_make_key=False)
    assert list(tmp_path.iterdir()) == []
    first = load(settings)
    assert load(settings, may_make_key=False).key_id == first.key_id


@pytest.mark.parametrize("text", ["short", base64.b64encode(b"x" * 31).decode(), "é" * 44])
def test_load_of_malformed_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(SealError, match="secret_key") as refused:
        load(Settings(data_dir=tmp_path, secret_key=text))
    assert text not in str(refused.value)


def test_settings_do_not_show_their_keys_in_their_representation(tmp_path: Path) -> None:
    key = text_key()
    assert key not in repr(Settings(data_dir=tmp_path, secret_key=key, old_secret_keys=(key,)))
