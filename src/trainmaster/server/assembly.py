"""Builds the application of a server from its settings, and runs what the application needs."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.backends import capabilities_of, names_from
from trainmaster.backends.worker_package import packed_worker
from trainmaster.protocol.processes import AT_REST
from trainmaster.protocol.run_directory import OWNER
from trainmaster.protocol.sockets import send_hint
from trainmaster.server.app import DOORS, create_app
from trainmaster.server.archive import Archive, ObjectStoreAwayError
from trainmaster.server.coordinator.account_users import AccountIsolation, check_uid
from trainmaster.server.coordinator.admission import SERVICES, Admission, importable
from trainmaster.server.coordinator.admission_checks import Capacity
from trainmaster.server.coordinator.assembly import CoordinatorRole
from trainmaster.server.coordinator.base_models import BaseModels
from trainmaster.server.coordinator.clusters import Clusters, KnownBackends
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.data_checks import DataChecks
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.coordinator.moving import Mover
from trainmaster.server.coordinator.operator_files import DeclaredCluster, load_runtimes, load_shapes
from trainmaster.server.coordinator.retention import Collector, keep_from_settings
from trainmaster.server.coordinator.upload_collection import collect_uploads
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, KeyScope, key_digest, key_id_of, new_key
from trainmaster.server.core.errors import RefusedError, TrainmasterError
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.middleware import ServerApp
from trainmaster.server.http.token_exchange import TokenExchange
from trainmaster.server.settings.declared import Declared
from trainmaster.server.settings.encryption import Sealer, private_text
from trainmaster.server.settings.settings import Role, Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots
from trainmaster.server.store import accounts, job_inputs, jobs
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

START_PATIENCE_S = 60.0
"""How long a start waits for a database that another process holds: a server that was frozen in the middle of a
write has it until it thaws or is killed."""


@contextlib.contextmanager
def running(settings: Settings, declared: Declared, *, file: Path | None, url: str, holder: str) -> Iterator[ServerApp]:
    """The application, with everything behind it running. `holder` is the name by which this server takes the lease."""
    with contextlib.ExitStack() as stack:
        sealer = load_sealer(settings)
        vault = JobSecrets(sealer)
        token_exchange = TokenExchange(settings.token_exchange) if settings.token_exchange else None
        with contextlib.closing(Database.open(settings.database, lock_timeout_s=START_PATIENCE_S)) as patient:
            require_jobs_of_runs(patient, settings.runs)
            ensure_key(patient, settings.data_dir / "api-key")
        database = Database.open(settings.database)
        stack.callback(database.close)
        stack.callback(_mark_at_rest, settings, database)
        subscriptions = Subscriptions(database, sealer, private_addresses=settings.private_webhooks, ca=settings.ca)
        clusters = Clusters(database, sealer)
        declared_cluster = DeclaredCluster(database, declared, subscriptions, clusters)
        declared_cluster.apply()
        archive = open_archive(settings)
        roots = Roots({RUNS: settings.runs, ARTIFACTS: settings.artifacts, BLOBS: settings.blobs}, archive)
        collector = Collector(
            database,
            roots,
            keep_from_settings(settings),
            spool=settings.data_dir / "spool",
            also=[functools.partial(collect_uploads, roots), *(collect for door in DOORS for collect in door.collect)],
        )
        hint_socket = settings.data_dir / "hints.sock"
        role: CoordinatorRole | None = None
        models = BaseModels(settings.model_aliases, artifacts=settings.artifacts.absolute())
        own = names_from(settings.backends)
        backends = KnownBackends({name: capabilities_of(name, settings) for name in own}, clusters)
        admission = Admission(
            backends=backends,
            default_backend=(settings.backends or own)[0],
            tenants=AccountIsolation(settings),
            capacity=Capacity(autoscaling=settings.autoscaling),
            allow_trust_remote_code=settings.allow_trust_remote_code,
            data_roots=settings.readable_roots,
            artifacts=settings.artifacts,
            archive=archive,
            services=[name for name in SERVICES if getattr(settings, f"{name}_url")],
            models=models,
            server_url=settings.advertise_url.rstrip("/") or url,
            # Without that role the workers are elsewhere, and the leader there looks when it admits a job.
            installed=importable if Role.COORDINATOR in settings.roles else lambda _: True,
        )
        if Role.COORDINATOR in settings.roles:
            role = CoordinatorRole(
                settings,
                settings_file=file,
                url=url,
                holder=holder,
                database=database,
                roots=roots,
                admission=admission,
                vault=vault,
                clusters=clusters,
                subscriptions=subscriptions,
                declared_cluster=declared_cluster,
                collector=collector,
                hint_socket=hint_socket,
            )
            role.start()
            stack.callback(role.stop)
        if archive is not None:
            mover = Mover(database, roots, archive)
            mover.start()
            stack.callback(mover.stop)
        hint: Callable[[str], None] = role.hint if role else functools.partial(send_hint, str(hint_socket))
        commands = Commands(database, admission=admission, vault=vault, hint=hint)
        yield create_app(
            ApiContext(
                settings=settings,
                database=database,
                commands=commands,
                explainer=Explainer(database, role.outages if role else dict),
                vault=vault,
                clusters=clusters,
                worker_package=functools.partial(packed_worker, settings.data_dir.absolute() / "workers"),
                subscriptions=subscriptions,
                roots=roots,
                hint=hint,
                collector=collector,
                check_account=check_uid,
                healthy=role.problem if role else lambda: None,
                disks={
                    "the database": settings.database_file.parent if settings.database_file else settings.data_dir,
                    "run directories": settings.runs,
                },
                leads=role.leads if role else lambda: False,
                engine=role.engine if role else lambda _: None,
                foreign_jobs=role.foreign_jobs if role else lambda _: None,
                render=role.render if role else lambda _job, _launch: None,
                token_exchange=token_exchange,
                data_checks=DataChecks(settings),
                models=models,
                shapes=load_shapes(settings.shapes),
                runtimes=functools.partial(load_runtimes, settings.runtimes),
            )
        )


def open_archive(settings: Settings) -> Archive | None:
    """The object store of a server; a server starts without reaching it."""
    if not settings.object_root:
        return None
    try:
        archive = Archive.open(settings.object_root)
    except ImportError as error:
        raise RefusedError(f"object_root: {error}") from None
    try:
        archive.check()
    except ObjectStoreAwayError as error:
        _log.warning("object_root: %s", error.message)
    return archive


def _mark_at_rest(settings: Settings, database: Database) -> None:
    """Mark that no job waits or runs, so that commands need not start a server to find that out."""
    if settings.database_url:  # which others may share, and submit jobs there
        return
    try:
        with database.read() as connection:
            unfinished = jobs.count_unfinished(connection, Scope.everything())
        if not unfinished:
            (settings.data_dir / AT_REST).touch()
    except (TrainmasterError, OSError) as error:
        _log.warning("cannot tell whether jobs are unfinished: %s", error)


def load_sealer(settings: Settings) -> Sealer:
    """The sealer of secrets. The first start makes its key; a later start never does, as it could decrypt nothing."""

    def nothing_is_encrypted() -> bool:
        with (
            contextlib.closing(Database.open(settings.database, lock_timeout_s=START_PATIENCE_S)) as database,
            database.read() as connection,
        ):
            return not job_inputs.secrets_exist(connection, Scope.everything())

    sealer = Sealer.load(settings, may_make_key=nothing_is_encrypted)
    _log.info("secrets are encrypted with the key %s", sealer.key_id)
    return sealer


def require_jobs_of_runs(database: Database, runs: Path) -> None:
    """Check that a database without jobs is new, and not one that was lost while the run directories stayed."""
    with database.read() as connection:
        if jobs.exist(connection, Scope.everything()):
            return
    left = next(runs.glob(f"*/{OWNER}"), None)
    if left is not None:
        raise RefusedError(
            f"the database has no jobs, but {runs} has run directories, such as {left.parent.name}: the database was "
            f"lost, or it is another one. Restore it from a backup; or, to begin anew, move {runs} away"
        )


def ensure_key(database: Database, path: Path) -> None:
    """Make the first API key, in a file that only the server's user can read, unless the file exists.

    A revoked key stays revoked; removing the file has another key made at the next start.
    """
    key = private_text(path, new_key).strip()

    def work(connection: Connection) -> None:
        accounts.ensure(connection, Scope.everything(), DEFAULT_ACCOUNT, time.time())
        if not accounts.key_was_known(connection, Scope.everything(), key_digest(key)):
            accounts.create_key(
                connection,
                Scope(account_id=DEFAULT_ACCOUNT),
                ApiKey(
                    key_id=key_id_of(key),
                    account_id=DEFAULT_ACCOUNT,
                    name="first",
                    scopes=tuple(KeyScope),
                    hash=key_digest(key),
                    created_at=time.time(),
                ),
            )
        elif accounts.find_key(connection, Scope.everything(), key_digest(key)) is None:
            _log.warning("the key in %s was revoked; remove the file to have another one made at the next start", path)

    database.write_now(work)
