"""Clusters: what operators declare, stored with its secrets encrypted; what jobs may use; and the backends that run."""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection

from trainmaster.backends import BACKENDS, CLUSTER_KINDS, BackendContext, missing
from trainmaster.backends.base import Backend, Capabilities
from trainmaster.backends.cluster.context import ClusterContext
from trainmaster.backends.cluster.engine import ClusterOptions
from trainmaster.backends.cluster.kinds import (
    WrongOptionsError,
    cluster_capabilities,
    make_cluster,
    options_model,
    parse_options,
    secret_names,
)
from trainmaster.backends.stand_ins import UnavailableBackend
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.settings.encryption import Sealer, SealError
from trainmaster.server.store import clusters
from trainmaster.server.store.clusters import Cluster
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
ABOUT_NAMES = "a cluster's name has at most 32 lower-case letters, digits and dashes, with no dash at either end"
HIDDEN = "***"
"""Stands for a secret that is set."""
_FRESH_S = 5.0
"""How long a server goes without asking what other servers have added."""
_EVERYTHING = Scope.everything()


class Clusters:
    """The clusters of all servers on this database."""

    def __init__(self, database: Database, sealer: Sealer, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._sealer = sealer
        self._clock = clock
        self.on_change: list[Callable[[], None]] = []
        """Called when this server has changed a cluster, after the commit."""

    def has_changed(self) -> None:
        for each in self.on_change:
            each()

    def put(self, connection: Connection, name: str, kind: str, options: Mapping[str, Any]) -> Cluster:
        """Add a cluster or change it, within a transaction; SpecError when something is wrong with it.

        A secret that is given as `***`, as it is shown, stays as it is.
        """
        if name in BACKENDS or not NAME.fullmatch(name):
            raise _wrong("name", f"{name!r} is a backend of every server" if name in BACKENDS else ABOUT_NAMES)
        before = next((each for each in clusters.all(connection, _EVERYTHING) if each.name == name), None)
        given = dict(options)
        try:
            hidden = secret_names(kind)
            if before is not None and before.kind == kind:
                kept = self._secrets_of(before)
                given |= {each: kept[each] for each in hidden & given.keys() & kept.keys() if given[each] == HIDDEN}
            parse_options(kind, given)
        except WrongOptionsError as error:
            raise _wrong("kind" if kind not in CLUSTER_KINDS else "options", str(error)) from None
        except SealError as error:
            raise _wrong("options", str(error)) from None
        now = self._clock()
        sealed = {each: str(given.pop(each)) for each in hidden & given.keys()}
        cluster = Cluster(
            name=name,
            kind=kind,
            options=given,
            sealed=self._sealer.seal(json.dumps(sealed), about=_row(name)) if sealed else "",
            instance=secrets.token_hex(3) if before is None else before.instance,
            created_at=now,
            changed_at=now,
        )
        unchanged = before is not None and (before.kind, before.options) == (kind, given)
        if unchanged and before is not None and self._secrets_of(before) == sealed:
            return before
        clusters.put(connection, _EVERYTHING, cluster)
        return clusters.get(connection, _EVERYTHING, name)

    def remove(self, connection: Connection, name: str) -> None:
        clusters.remove(connection, _EVERYTHING, name, self._clock())

    def all(self) -> list[Cluster]:
        with self._database.read() as connection:
            return clusters.all(connection, _EVERYTHING)

    def options_of(self, cluster: Cluster) -> ClusterOptions:
        """Raises WrongOptionsError or SealError where another version, or a server with another key, stored it."""
        return parse_options(cluster.kind, {**cluster.options, **self._secrets_of(cluster)})

    def shown(self, cluster: Cluster) -> dict[str, Any]:
        """The options as anybody may see them: with what was not set, and without secrets."""
        try:
            fields, hidden = options_model(cluster.kind).model_fields, secret_names(cluster.kind)
        except WrongOptionsError:
            return dict(cluster.options)
        known = self._secrets_of(cluster)
        shown = {name: cluster.options.get(name, field.default) for name, field in fields.items()}
        return shown | {name: HIDDEN if name in known else None for name in hidden}

    def _secrets_of(self, cluster: Cluster) -> dict[str, str]:
        if not cluster.sealed:
            return {}
        found: dict[str, str] = json.loads(self._sealer.open(cluster.sealed, about=_row(cluster.name)))
        return found


def _row(name: str) -> str:
    return f"clusters/{name}"


def _wrong(field: str, message: str) -> SpecError:
    return SpecError([Problem(field=field, message=line) for line in message.split("\n")])


class KnownBackends(Mapping[str, Capabilities]):
    """The backends that jobs may name, by name: those of this server, then the clusters. Any thread may use it."""

    def __init__(
        self, fixed: Mapping[str, Capabilities], known: Clusters, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fixed = dict(fixed)
        self._clusters = known
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, Capabilities] = {}
        self._read_at = float("-inf")
        known.on_change.append(self._read_again)

    def __getitem__(self, name: str) -> Capabilities:
        if name in self._fixed:
            return self._fixed[name]
        return self._current()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._fixed or name in self._current()

    def __iter__(self) -> Iterator[str]:
        yield from self._fixed
        yield from self._current()

    def __len__(self) -> int:
        return len(self._fixed) + len(self._current())

    def _read_again(self) -> None:
        self._read_at = float("-inf")

    def _current(self) -> dict[str, Capabilities]:
        with self._lock:
            if self._clock() - self._read_at > _FRESH_S:
                found = {}
                for cluster in self._clusters.all():
                    try:
                        options = self._clusters.options_of(cluster)
                        found[cluster.name] = cluster_capabilities(cluster.kind, options)
                    except (WrongOptionsError, SealError) as error:
                        _log.error("cluster %s cannot be used: %s", cluster.name, error)
                self._found, self._read_at = found, self._clock()
            return self._found


class RunningBackends(Mapping[str, Backend]):
    """The backends of a coordinator: those of this machine, and one for each cluster. For the coordinator's thread;
    `engine` may be called from any."""

    def __init__(
        self,
        fixed: Mapping[str, Backend],
        known: Clusters,
        context: BackendContext,
        *,
        ca_pem: str,
        hint: Callable[[str], None],
        leads: Callable[[], bool],
    ) -> None:
        self._fixed = dict(fixed)
        self._clusters = known
        self._context = context
        self._ca_pem = ca_pem
        self._hint = hint
        self._leads = leads
        self._running: dict[str, tuple[Cluster, Backend]] = {}
        self._absent: dict[str, Backend] = {}
        self._refreshing = threading.Lock()
        self._news = threading.Event()

    def take_news(self) -> bool:
        """Whether nodes of a cluster have changed since the last call."""
        news = self._news.is_set()
        self._news.clear()
        return news

    def __getitem__(self, name: str) -> Backend:
        """A stand-in for one that this server does not have: a job may have been accepted for it before."""
        if name in self._fixed:
            return self._fixed[name]
        if name in self._running:
            return self._running[name][1]
        if name not in self._absent:
            why = missing(name, (*self._fixed, *self._running))
            capabilities = next(iter(CLUSTER_KINDS.values())).capabilities
            self._absent[name] = UnavailableBackend(name, capabilities, self._context.run_directory, why=why)
        return self._absent[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._fixed
        yield from list(self._running)

    def __len__(self) -> int:
        return len(self._fixed) + len(self._running)

    def refresh(self) -> None:
        """Run what is declared now, and nothing else. Any thread may call it."""
        with self._refreshing:
            self._refresh()

    def _refresh(self) -> None:
        declared = {cluster.name: cluster for cluster in self._clusters.all()}
        for name, (cluster, backend) in list(self._running.items()):
            if declared.get(name) != cluster:
                del self._running[name]
                backend.close()
        for name in declared.keys() - self._running.keys():
            cluster = declared[name]
            try:
                backend = make_cluster(cluster.kind, self._clusters.options_of(cluster), self._context_of(cluster))
            except (WrongOptionsError, SealError, OSError, ImportError) as error:
                _log.error("cluster %s cannot be used: %s", name, error)
                continue
            self._running[name] = (cluster, backend)
            self._absent.pop(name, None)
            backend.open()

    def _context_of(self, cluster: Cluster) -> ClusterContext:
        return ClusterContext(
            name=cluster.name,
            instance=cluster.instance,
            run_directory=self._context.run_directory,
            runs=self._context.runs,
            workers=self._context.data_dir.absolute() / "workers",
            ca_pem=self._ca_pem,
            hint=self._hint,
            on_nodes=self._on_nodes,
            leads=self._leads,
        )

    def _on_nodes(self) -> None:
        self._news.set()
        self._hint("")
