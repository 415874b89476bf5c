"""The server process: puts the parts together, runs them, and takes them down again."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from sqlalchemy import Connection

import trainmaster
from trainmaster.backends import capabilities_of, check_names, names_from
from trainmaster.backends.local.inventory import parse_simulated
from trainmaster.protocol.documents import write_document
from trainmaster.protocol.environment import CA
from trainmaster.protocol.hints import send_hint
from trainmaster.protocol.processes import AT_REST, KEPT, boot_id, identity_of
from trainmaster.protocol.run_directory import OWNER
from trainmaster.server import failpoints
from trainmaster.server.app import create_app
from trainmaster.server.coordinator.admission import SERVICES, Admission, importable
from trainmaster.server.coordinator.assembly import CoordinatorRole
from trainmaster.server.coordinator.base_models import BaseModels, check_aliases
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.data_checks import DataChecks
from trainmaster.server.coordinator.declared_cluster import Declaring
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.coordinator.operator_files import load_runtimes, load_shapes
from trainmaster.server.coordinator.retention import Collector, keep_from_settings
from trainmaster.server.coordinator.submission_checks import Capacity
from trainmaster.server.coordinator.tenants import Tenants, check_uid
from trainmaster.server.coordinator.vault import Vault
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions, check_webhook
from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, Account, KeyScope, key_digest, key_id_of, new_key
from trainmaster.server.core.errors import RefusedError, SpecError, TrainmasterError
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.doors.tinker.retention import collect_sessions
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.middleware import Front
from trainmaster.server.http.token_exchange import TokenExchange
from trainmaster.server.settings import listener as listening
from trainmaster.server.settings import telemetry
from trainmaster.server.settings.declared import Declared
from trainmaster.server.settings.encryption import Sealer, keys_of
from trainmaster.server.settings.listener import BoundedProtocol
from trainmaster.server.settings.settings import Role, Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots
from trainmaster.server.store import accounts, jobs, keys, secrets
from trainmaster.server.store.database import Database, check_url
from trainmaster.server.store.keys import ApiKey
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

START_PATIENCE_S = 60.0
"""How long a start waits for a database that another process holds: a server that was frozen in the middle of a
write has it until it thaws or is killed."""


class DataDirectoryInUseError(TrainmasterError):
    """Another server runs on this data directory."""

    code = "DATA_DIRECTORY_IN_USE"


def serve(settings: Settings, declared: Declared | None = None, *, file: Path | None = None, kept: bool = True) -> None:
    """Run a server until SIGTERM or SIGINT; running jobs are left running.

    Args:
        settings: the server's own.
        declared: what the settings file says of the cluster.
        file: the settings file, if there is one.
        kept: somebody keeps it running, so that no command starts another one while it is down.

    Raises:
        DataDirectoryInUseError: another server has the data directory.
        RefusedError: the settings make no sense; what is wrong, line by line.
    """
    failpoints.arm_from_environment()
    declared = declared or Declared()
    if wrong := problems(settings, declared):
        raise RefusedError("\n  ".join(wrong))
    telemetry.configure(settings)
    if settings.ca is not None:
        os.environ[CA] = str(settings.ca)
    _allow_open_files()
    os.umask(0o077)  # what the server makes is its own; what others may reach is opened on purpose
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(settings.data_dir))
        mark = settings.data_dir / KEPT
        mark.touch() if kept else mark.unlink(missing_ok=True)
        (settings.data_dir / AT_REST).unlink(missing_ok=True)
        listener = stack.enter_context(listening.listening(settings))
        url = listening.url_of(settings, listener)
        app = stack.enter_context(_running(settings, declared, file, url))
        server = _Server(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=BoundedProtocol,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=2,
                server_header=False,
                proxy_headers=False,  # the front believes a proxy, where there is one
                backlog=4096,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                ssl_ciphers=listening.CIPHERS,
            ),
            on_ready=(app.open, lambda: _announce(settings, url)),
            on_stop=app.close,
        )
        _shorten_collections()
        server.run(sockets=[listener])
        with contextlib.suppress(FileNotFoundError):
            (settings.data_dir / "server.json").unlink()


def problems(settings: Settings, declared: Declared) -> list[str]:
    """What keeps a server with these settings from starting, as far as it can be told without changing anything."""
    checks: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: listening.check(settings)),
        ("database_url: ", lambda: check_url(settings.database)),
        ("", lambda: keys_of(settings)),
        ("backends: ", lambda: check_names(settings.backends)),
        ("", lambda: parse_simulated(settings.simulated_gpus)),
        ("", lambda: TokenExchange(settings.token_exchange) if settings.token_exchange else None),
        ("model_aliases: ", lambda: check_aliases(settings.model_aliases)),
        ("shapes_dir: ", lambda: load_shapes(settings.shapes)),
        ("tinker_shape: ", lambda: settings.tinker_shape and load_shapes(settings.shapes).get(settings.tinker_shape)),
    ]
    for name, account in declared.accounts.items():
        checks.append(("", functools.partial(check_uid, Account(account_id=name, uid=account.uid))))
    for name, webhook in declared.webhooks.items():
        checked = functools.partial(
            check_webhook, webhook.url, webhook.secret, private_addresses=settings.private_webhooks
        )
        checks.append((f"webhooks.{name}.", checked))
    found: list[str] = []
    for place, check in checks:
        try:
            check()
        except SpecError as error:
            found += [f"{place}{problem.field}: {problem.message}" for problem in error.problems]
        except (TrainmasterError, ValueError) as error:
            found.append(f"{place}{error}")
    return found


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, *, on_ready: Sequence[Callable[[], None]], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_ready = on_ready
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for ready in self._on_ready:
            ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A stop that was asked for is a good end: the signal is not raised again, which would cut the rest short."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _running(settings: Settings, declared: Declared, file: Path | None, url: str) -> Iterator[Front]:
    """The application, with everything behind it running."""
    with contextlib.ExitStack() as stack:
        sealer = load_sealer(settings)
        vault = Vault(sealer)
        token_exchange = TokenExchange(settings.token_exchange) if settings.token_exchange else None
        with contextlib.closing(Database.open(settings.database, lock_timeout_s=START_PATIENCE_S)) as patient:
            require_jobs_of_runs(patient, settings.runs)
            ensure_key(patient, settings.data_dir / "api-key")
        database = Database.open(settings.database)
        stack.callback(database.close)
        stack.callback(_mark_at_rest, settings, database)
        subscriptions = Subscriptions(database, sealer, private_addresses=settings.private_webhooks, ca=settings.ca)
        declaring = Declaring(database, declared, subscriptions)
        declaring.apply()
        roots = Roots({RUNS: settings.runs, ARTIFACTS: settings.artifacts, BLOBS: settings.blobs})
        collector = Collector(
            database,
            roots,
            keep_from_settings(settings),
            spool=settings.data_dir / "spool",
            also=(collect_sessions,),
        )
        hint_socket = settings.data_dir / "hints.sock"
        hint: Callable[[str], None] = functools.partial(send_hint, str(hint_socket))
        healthy: Callable[[], str | None] = _always_healthy
        leads: Callable[[], bool] = _never_leads
        engine: Callable[[str], EngineFacts | None] = _knows_no_engine
        models = BaseModels(settings.model_aliases, artifacts=settings.artifacts.absolute())
        admission = Admission(
            data_roots=settings.readable_roots,
            artifacts=settings.artifacts,
            services=[name for name in SERVICES if getattr(settings, f"{name}_url")],
            models=models,
            # Without that role the workers are elsewhere, and the leader there looks when it admits a job.
            installed=importable if Role.COORDINATOR in settings.roles else lambda _: True,
        )
        if Role.COORDINATOR in settings.roles:
            role = CoordinatorRole(
                settings,
                settings_file=file,
                url=url,
                holder=_name_of_lock(settings.data_dir),
                database=database,
                roots=roots,
                admission=admission,
                vault=vault,
                subscriptions=subscriptions,
                declaring=declaring,
                collector=collector,
                hint_socket=hint_socket,
            )
            role.start()
            stack.callback(role.stop)
            hint, healthy, leads, engine = role.hint, role.problem, role.leads, role.engine
        backends = names_from(settings.backends)
        commands = Commands(
            database,
            backends={name: capabilities_of(name, own_image=settings.container_image) for name in backends},
            default_backend=backends[0],
            admission=admission,
            vault=vault,
            hint=hint,
            tenants=Tenants(settings),
            capacity=Capacity(autoscaling=settings.autoscaling),
            models=models,
            allow_trust_remote_code=settings.allow_trust_remote_code,
        )
        yield create_app(
            ApiContext(
                database=database,
                commands=commands,
                explainer=Explainer(database),
                vault=vault,
                subscriptions=subscriptions,
                roots=roots,
                roles=settings.roles,
                hint=hint,
                clock=time.time,
                version=trainmaster.__version__,
                max_blob_bytes=settings.max_blob_bytes,
                collector=collector,
                check_account=check_uid,
                healthy=healthy,
                disks={
                    "the database": settings.database_file.parent if settings.database_file else settings.data_dir,
                    "run directories": settings.runs,
                },
                leads=leads,
                engine=engine,
                token_exchange=token_exchange,
                data_checks=DataChecks(settings),
                allow_trust_remote_code=settings.allow_trust_remote_code,
                rate_limit_per_s=settings.rate_limit,
                rate_burst=settings.rate_burst,
                behind_proxy=settings.behind_proxy,
                open_metrics=settings.open_metrics,
                access_level=telemetry.access_level(settings),
                models=models,
                shapes=load_shapes(settings.shapes),
                runtimes=functools.partial(load_runtimes, settings.runtimes),
                tinker_shape=settings.tinker_shape,
                tinker_tempered_logprobs=settings.tinker_tempered_logprobs,
                tinker_silent_s=settings.tinker_silent_s,
            )
        )


def _mark_at_rest(settings: Settings, database: Database) -> None:
    """Let commands know that they need not start a server to see that no job waits or runs.

    Only for a database of the server's own: in a shared one, others may submit jobs.
    """
    if settings.database_url:
        return
    try:
        with database.read() as connection:
            unfinished = jobs.count_unfinished(connection, Scope.everything())
        if not unfinished:
            (settings.data_dir / AT_REST).touch()
    except (TrainmasterError, OSError) as error:
        _log.warning("cannot tell whether jobs are unfinished: %s", error)


def _always_healthy() -> None:
    """A server without a coordinator of its own has nothing that could be stuck."""


def _never_leads() -> bool:
    """A server without a coordinator of its own does not lead."""
    return False


def _knows_no_engine(backend: str) -> None:
    """A server without a coordinator of its own has no backends of its own."""


def load_sealer(settings: Settings) -> Sealer:
    """What secrets are sealed with. Its key is made at the first start, and never anew: it would open nothing.

    Raises:
        SealError: there is no usable key; the message says what to do.
    """

    def nothing_is_sealed() -> bool:
        with (
            contextlib.closing(Database.open(settings.database, lock_timeout_s=START_PATIENCE_S)) as database,
            database.read() as connection,
        ):
            return not secrets.exist(connection, Scope.everything())

    sealer = Sealer.load(settings, may_make_key=nothing_is_sealed)
    _log.info("secrets are sealed with the key %s", sealer.key_id)
    return sealer


def require_jobs_of_runs(database: Database, runs: Path) -> None:
    """See that a database without any job is new, and not one that was lost.

    Raises:
        RefusedError: there are run directories of jobs; the message says what to do.
    """
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
    """Make the first API key, unless there is one. It lies in a file that only the server's user can read.

    A key that was revoked stays so; whoever removes the file gets another one at the next start.
    """
    if path.exists():
        key = path.read_text().strip()
    else:
        key = new_key()
        # Under its name only when it is whole: half a key would be found, and taken for one, by the next start.
        draft = path.with_name(f".{path.name}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.write(key + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    scope = Scope(account_id=DEFAULT_ACCOUNT)

    def work(connection: Connection) -> None:
        accounts.ensure(connection, Scope.everything(), DEFAULT_ACCOUNT, time.time())
        if not keys.known(connection, Scope.everything(), key_digest(key)):
            keys.create(
                connection,
                scope,
                ApiKey(
                    key_id=key_id_of(key),
                    account_id=DEFAULT_ACCOUNT,
                    name="first",
                    scopes=tuple(KeyScope),
                    hash=key_digest(key),
                    created_at=time.time(),
                ),
            )

        elif keys.find_by_hash(connection, Scope.everything(), key_digest(key)) is None:
            _log.warning("the key in %s was revoked; remove the file to have another one made at the next start", path)

    database.write_now(work)


def _allow_open_files() -> None:
    """Every follower of a log holds one; the usual limit of 1,024 is for programs that have few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _shorten_collections() -> None:
    """Leave what exists by now out of garbage collections, and have fewer of them: each one stops every thread."""
    gc.freeze()
    gc.set_threshold(10_000)


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """The data directory belongs to one server at a time; the kernel frees it when the server dies."""
    with open(data_dir / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirectoryInUseError(
                f"another server runs on {data_dir}; stop it with `trainmaster down`, "
                "or give this one a --data-dir of its own"
            ) from None
        yield


def _name_of_lock(data_dir: Path) -> str:
    """A name that only the server which has locked the data directory can have.

    So a server leads at once where its predecessor was killed: whoever held the lease by this name is dead.
    """
    status = os.stat(data_dir / "lock")
    return f"{socket.gethostname()}:{boot_id()}:{status.st_dev}:{status.st_ino}"


def _announce(settings: Settings, url: str) -> None:
    """Say that the server answers: to clients by a file, to people and scripts by a line."""
    identity = identity_of(os.getpid())
    write_document(
        settings.data_dir / "server.json",
        {
            "url": url,
            "version": trainmaster.__version__,
            "data_roots": [str(root.absolute()) for root in settings.readable_roots],
            **(identity.to_json() if identity else {}),
        },
    )
    print(f"ready {url}", flush=True)  # noqa: T201 - scripts wait for this line
