from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from trainmaster.backends import BACKENDS, CLUSTER_KINDS
from trainmaster.backends.base import Capabilities, FilesBy, PlacementBy
from trainmaster.server.coordinator.account_users import ROOT, AccountIsolation, is_confined, runs_as
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.settings.settings import Settings
from trainmaster.server.store import accounts
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

SERVER = 1000
LOCAL = BACKENDS["local"].capabilities


def ask(
    account_id: str, uid: int | None = None, *, server_uid: int = SERVER, isolated: bool = False, **changes: Any
) -> int | None:
    settings = Settings(data_dir=Path("/nowhere"), **changes)
    account = Account(account_id=account_id, uid=uid)
    return runs_as(account, settings, server_uid=server_uid, isolated=isolated)


def test_default_account_runs_as_the_server() -> None:
    assert ask("default") is None


def test_second_account_without_a_uid_is_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedError, match=r"trainmaster accounts edit vision --uid UID.*shared_uid"):
        ask("vision")


def test_shared_uid_lets_every_account_run_as_the_server() -> None:
    assert ask("vision", shared_uid=True) is None


def test_uid_of_the_server_is_nothing_to_change_to() -> None:
    assert ask("vision", SERVER) is None


def test_root_becomes_whom_it_is_told() -> None:
    assert ask("vision", 1500, server_uid=ROOT) == 1500
    assert ask("default", 1500, server_uid=ROOT) == 1500
    assert ask("vision", 1500, server_uid=ROOT, shared_uid=True) == 1500


def test_server_that_is_not_root_cannot_become_another() -> None:
    with pytest.raises(RefusedError, match=r"uid 1500.*uid 1000"):
        ask("vision", 1500)


def test_containers_part_accounts_that_have_no_user_of_their_own() -> None:
    assert ask("default", isolated=True) is None
    assert ask("vision", isolated=True) is None
    assert ask("vision", SERVER, isolated=True) is None
    with pytest.raises(RefusedError, match=r"uid 1500.*use the backend local"):
        ask("vision", 1500, server_uid=ROOT, isolated=True)


def test_who_may_run_nothing_but_containers() -> None:
    settings = Settings(data_dir=Path("/nowhere"))
    vision = Account(account_id="vision")
    assert is_confined(vision, settings)
    assert not is_confined(Account(account_id="default"), settings)
    assert not is_confined(Account(account_id="vision", uid=1500), settings)
    assert not is_confined(vision, Settings(data_dir=Path("/nowhere"), shared_uid=True))


def test_no_account_runs_as_root() -> None:
    with pytest.raises(RefusedError, match="root"):
        ask("vision", ROOT)


def test_answer_is_asked_for_again_after_a_while(tmp_path: Path) -> None:
    now = [0.0]
    tenants = AccountIsolation(Settings(data_dir=tmp_path), clock=lambda: now[0])
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    everything, scope = Scope.everything(), Scope("vision")
    try:
        account = Account(account_id="vision", uid=os.geteuid() or 1500)
        database.write_now(lambda connection: accounts.create(connection, everything, account))
        with database.read() as connection:
            tenants.require(connection, scope, "vision", LOCAL)
        database.write_now(lambda connection: accounts.set_uid(connection, everything, "vision", None))
        with database.read() as connection:
            tenants.require(connection, scope, "vision", LOCAL)
            now[0] += 5.0
            with pytest.raises(RefusedError, match="vision"):
                tenants.require(connection, scope, "vision", LOCAL)
            with pytest.raises(RefusedError, match="vision"):
                tenants.require(connection, scope, "vision", LOCAL)
    finally:
        database.close()


def test_user_of_an_account_matters_only_to_backends_that_run_jobs_here(tmp_path: Path) -> None:
    elsewhere = Capabilities(placement=PlacementBy.US, lifetimes=frozenset())
    shared = replace(elsewhere, isolates_accounts=False)
    elsewhere = replace(elsewhere, isolates_accounts=True)
    isolating = replace(elsewhere, runs_here=True)
    tenants = AccountIsolation(Settings(data_dir=tmp_path))
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    account = Account(account_id="vision")
    try:
        database.write_now(lambda connection: accounts.create(connection, Scope.everything(), account))
        with database.read() as connection:
            for capable in (elsewhere, isolating):
                tenants.require(connection, Scope("vision"), "vision", capable)
            with pytest.raises(RefusedError, match="vision"):
                tenants.require(connection, Scope("vision"), "vision", replace(shared, runs_here=True))
            with pytest.raises(RefusedError, match="one user there"):
                tenants.require(connection, Scope("vision"), "vision", shared)
            tenants.require(connection, Scope("default"), "default", shared)
    finally:
        database.close()


def test_accounts_get_no_keys_with_which_they_could_read_the_files_of_others(tmp_path: Path) -> None:
    capable = Capabilities(
        placement=PlacementBy.ENGINE, lifetimes=frozenset(), isolates_accounts=True, files=FilesBy.OBJECT_ROOT
    )
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    try:
        with database.read() as connection:
            tenants = AccountIsolation(Settings(data_dir=tmp_path))
            tenants.require(connection, Scope("default"), "default", capable)
            for each in (capable, replace(capable, submits_as_users=True)):
                with pytest.raises(RefusedError, match=r"keys of the object store.*option `files`"):
                    tenants.require(connection, Scope("vision"), "vision", each)
            sharing = AccountIsolation(Settings(data_dir=tmp_path, shared_uid=True))
            sharing.require(connection, Scope("vision"), "vision", capable)
    finally:
        database.close()


@pytest.mark.parametrize(
    "patch",
    [
        {"spec": {"volumes": [{"name": "x", "secret": {"secretName": "tm-k3f9-job-1-1"}}]}},
        {"spec": {"nodeSelector": {"a": "b"}, "serviceAccountName": "admin"}},
        {"spec": {"containers": [{"name": "node", "envFrom": [{"secretRef": {"name": "tm-k3f9-job-1-1"}}]}]}},
        {"spec": {"hostPID": True}},
        {"metadata": {"ownerReferences": []}},
    ],
)
def test_accounts_patch_nothing_by_which_they_could_reach_others(patch: Any, tmp_path: Path) -> None:
    tenants = AccountIsolation(Settings(data_dir=tmp_path))
    tenants.require_patches("default", [patch])
    with pytest.raises(RefusedError, match="account vision may not patch"):
        tenants.require_patches("vision", [patch])
    AccountIsolation(Settings(data_dir=tmp_path, shared_uid=True)).require_patches("vision", [patch])


def test_submission_with_such_a_patch_is_refused(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    backends = {"k8s": CLUSTER_KINDS["kubernetes"].capabilities}
    tenants = AccountIsolation(Settings(data_dir=tmp_path))
    commands = Commands(
        database,
        admission=Admission(backends=backends, default_backend="k8s", tenants=tenants),
        vault=JobSecrets(Sealer(bytes(32))),
        hint=lambda _: None,
    )

    def ensure(account_id: str, connection: Connection) -> None:
        accounts.ensure(connection, Scope.everything(), account_id, 0.0)

    def submit(account_id: str, spec: dict[str, Any]) -> Any:
        patch = {
            "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": spec}]}}}
        }
        workload = {"kind": "command", "argv": ["x"], "image": "python", "kubernetes": {"runtime_patches": [patch]}}
        request = parse_submit({"name": "j", "workload": workload, "resource_config": {}})
        return commands.submit(Scope(account_id), request, created_by="t").result()

    try:
        for account_id in ("default", "vision"):
            database.write_now(functools.partial(ensure, account_id))
        host = {"spec": {"template": {"spec": {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}}}}
        submit("default", host)
        with pytest.raises(RefusedError, match=r"may not patch spec\.volumes"):
            submit("vision", host)
        submit("vision", {"spec": {"template": {"spec": {"nodeSelector": {"pool": "a"}}}}})
    finally:
        database.close()


def test_accounts_choose_nodes_by_patches(tmp_path: Path) -> None:
    chosen = {"metadata": {"labels": {"a": "b"}}, "spec": {"nodeSelector": {"pool": "a"}, "tolerations": []}}
    AccountIsolation(Settings(data_dir=tmp_path)).require_patches("vision", [chosen, {"spec": None}, {}])
