"""The server process: checks the settings, locks the data directory, listens, and serves until a signal."""

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn

import trainmaster
from trainmaster.backends import check_names
from trainmaster.backends.local.inventory import parse_simulated
from trainmaster.protocol.documents import write_document
from trainmaster.protocol.environment import CA
from trainmaster.protocol.processes import AT_REST, KEPT, boot_id, identity_of
from trainmaster.server import failpoints
from trainmaster.server.assembly import running
from trainmaster.server.coordinator.account_users import check_uid
from trainmaster.server.coordinator.base_models import check_aliases
from trainmaster.server.coordinator.operator_files import load_shapes
from trainmaster.server.coordinator.webhook_subscriptions import check_webhook
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import RefusedError, SpecError, TrainmasterError
from trainmaster.server.http.token_exchange import TokenExchange
from trainmaster.server.settings import telemetry
from trainmaster.server.settings.declared import Declared
from trainmaster.server.settings.encryption import keys_of
from trainmaster.server.settings.listener import CIPHERS, BoundedProtocol, check_listener, open_listener, url_of
from trainmaster.server.settings.settings import Settings
from trainmaster.server.store.database import check_url

_log = logging.getLogger(__name__)


class DataDirectoryInUseError(TrainmasterError):
    """Another server runs on this data directory."""

    code = "DATA_DIRECTORY_IN_USE"


def serve(settings: Settings, declared: Declared | None = None, *, file: Path | None = None, kept: bool = True) -> None:
    """Run a server until SIGTERM or SIGINT; running jobs are left running.

    `declared` are the cluster's tables of the settings file. `kept` says that a service manager restarts the server, so
    that no command starts another one while it is down.
    """
    failpoints.arm_from_environment()
    declared = declared or Declared()
    if wrong := problems(settings, declared):
        raise RefusedError("\n  ".join(wrong))
    telemetry.configure(settings)
    if settings.ca is not None:
        os.environ[CA] = str(settings.ca)
    # Every follower of a log holds an open file, and the usual limit is 1,024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0o077)  # what the server makes is its own; what others may reach is opened on purpose
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_locked(settings.data_dir))
        mark = settings.data_dir / KEPT
        mark.touch() if kept else mark.unlink(missing_ok=True)
        (settings.data_dir / AT_REST).unlink(missing_ok=True)
        listener = stack.enter_context(open_listener(settings))
        url = url_of(settings, listener)
        app = stack.enter_context(
            running(settings, declared, file=file, url=url, holder=_name_of_lock(settings.data_dir))
        )
        server = _HttpServer(
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
                ssl_ciphers=CIPHERS,
            ),
            on_ready=(app.open, lambda: _announce(settings, url)),
            on_stop=app.close,
        )
        # Present objects stay out of garbage collections, of which there are fewer: each one stops every thread.
        gc.freeze()
        gc.set_threshold(10_000)
        server.run(sockets=[listener])
        with contextlib.suppress(FileNotFoundError):
            (settings.data_dir / "server.json").unlink()


def problems(settings: Settings, declared: Declared) -> list[str]:
    """What would keep a server with these settings from starting, as far as reading alone can tell."""
    checks: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: check_listener(settings)),
        ("database_url: ", lambda: check_url(settings.database)),
        ("", lambda: keys_of(settings)),
        ("backends: ", lambda: check_names(settings.backends, declared.clusters)),
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


class _HttpServer(uvicorn.Server):
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
        """Handle SIGTERM and SIGINT without raising them again after the shutdown, as uvicorn does."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Lock the data directory for this server; the kernel releases the lock when the process dies."""
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
    """A name for the lease that only the server which has locked the data directory can use.

    A server that follows a killed one leads at once: the holder of a lease by this name is dead.
    """
    status = os.stat(data_dir / "lock")
    return f"{socket.gethostname()}:{boot_id()}:{status.st_dev}:{status.st_ino}"


def _announce(settings: Settings, url: str) -> None:
    """Tell clients by a file, and people and scripts by a line, that the server answers."""
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
