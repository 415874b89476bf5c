from __future__ import annotations

import base64
import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.server.assembly import ensure_key
from trainmaster.server.core.accounts import key_digest, key_id_of
from trainmaster.server.store import accounts
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{tmp_path / 'tm.db'}")
    yield database
    database.close()


def is_known(database: Database, key: str) -> bool:
    with database.read() as connection:
        return accounts.find_key(connection, Scope.everything(), key_digest(key)) is not None


def test_first_key_is_made_once_for_its_owner_alone(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    ensure_key(database, path)
    key = path.read_text().strip()
    header, claims, _ = key.split(".")  # clients take it for a JSON Web Token, and read from it when it expires
    assert json.loads(base64.urlsafe_b64decode(header + "=")) == {"alg": "none"}
    assert json.loads(base64.urlsafe_b64decode(claims + "=="))["exp"] > time.time() + 100 * 365 * 86400
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert is_known(database, key)
    ensure_key(database, path)
    assert path.read_text().strip() == key


def test_key_whose_writing_was_cut_short_is_made_anew(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "api-key"
    (tmp_path / ".api-key").write_text("eyJ")
    ensure_key(database, path)
    assert len(path.read_text()) > 20
    assert not is_known(database, "eyJ")


def test_revoked_key_stays_revoked_until_its_file_is_removed(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "api-key"
    ensure_key(database, path)
    key = path.read_text().strip()
    everything = Scope.everything()
    database.write_now(lambda connection: accounts.revoke_key(connection, everything, key_id_of(key), 1.0))
    ensure_key(database, path)
    assert not is_known(database, key)
    assert "remove the file" in caplog.text
    path.unlink()
    ensure_key(database, path)
    assert is_known(database, path.read_text().strip())
