"""Tables of a settings file: queues, nodes, accounts, webhooks, clusters. A server applies them when it starts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, is_account_id
from trainmaster.server.core.states import JobStatus
from trainmaster.server.settings.values import Complain, in_words, kinds_of, read_table

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ABOUT_NAMES = (
    "names have letters, digits, '.', '_' and '-', with a letter or digit first, and at most 128 of them, accounts 63"
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredQueue:
    """`[queues.NAME]`."""

    weight: float = field(default=1.0, metadata={"minimum": 0.001, "maximum": 1_000_000})
    """Its share of the cluster, in proportion to those of the other queues that have work."""
    quota_gpus: int | None = field(default=None, metadata={"minimum": 0, "maximum": 2**31 - 1})
    """The most GPUs that its jobs may hold at a time; not set means no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredNode:
    """`[nodes."NAME"]`; what is not set stays as it is."""

    labels: tuple[str, ...] | None = None
    """Labels beside those that its backend reports."""
    capabilities: tuple[str, ...] | None = None
    """Capabilities beside those that its backend reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredAccount:
    """`[accounts.NAME]`."""

    uid: int | None = field(default=None, metadata={"minimum": 0, "maximum": 2**31 - 1})
    """The system user that runs its jobs on this machine; not set means none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredWebhook:
    """`[webhooks.NAME]`."""

    url: str
    """Where events are sent."""
    secret: str = field(repr=False, metadata={"secret": True})
    """The secret that signs them."""
    account: str = DEFAULT_ACCOUNT
    """The account whose events are sent."""
    statuses: tuple[JobStatus, ...] = ()
    """Only events of these statuses are sent; empty means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredBackend:
    """`[clusters.NAME]`: a cluster that jobs name as their backend."""

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, metadata={"secret": True})
    """What else the table says; the kind of the cluster decides what that may be, and what of it is secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    queues: Mapping[str, DeclaredQueue] = field(default_factory=dict)
    nodes: Mapping[str, DeclaredNode] = field(default_factory=dict)
    accounts: Mapping[str, DeclaredAccount] = field(default_factory=dict)
    webhooks: Mapping[str, DeclaredWebhook] = field(default_factory=dict)
    clusters: Mapping[str, DeclaredBackend] = field(default_factory=dict)


TABLES: Mapping[str, type[Any]] = {
    "queues": DeclaredQueue,
    "nodes": DeclaredNode,
    "accounts": DeclaredAccount,
    "webhooks": DeclaredWebhook,
    "clusters": DeclaredBackend,
}
"""The tables of a settings file, and what an entry of each may say."""


def read_declared(document: Mapping[str, object], base: Path, complain: Complain) -> Declared:
    found: dict[str, dict[str, Any]] = {}
    for table, model in TABLES.items():
        found[table] = {}
        entries = document.get(table, {})
        if not isinstance(entries, Mapping):
            complain((table,), f"must be a table: write [{table}.NAME]")
            continue
        for name, entry in entries.items():
            path = (table, name)
            if not _may_be_called(table, name):
                complain(path, _ABOUT_NAMES)
            elif not isinstance(entry, Mapping):
                complain(path, f"must be a table: write [{table}.{name}]")
            elif (value := _read_any(model, path, entry, base, complain)) is not None:
                found[table][name] = value
                if isinstance(value, DeclaredWebhook) and not is_account_id(value.account):
                    complain((*path, "account"), _ABOUT_NAMES)
    return Declared(**found)


def _read_any(
    model: type[Any], path: tuple[str, ...], entry: Mapping[str, object], base: Path, complain: Complain
) -> object | None:
    if model is not DeclaredBackend:
        return _read_entry(model, path, entry, base, complain)
    if not isinstance(kind := entry.get("kind"), str):
        complain(path, "needs kind: a text")
        return None
    return DeclaredBackend(kind=kind, options={name: value for name, value in entry.items() if name != "kind"})


def _may_be_called(table: str, name: str) -> bool:
    match table:
        case "nodes":
            return True  # backends choose the names of nodes
        case "accounts":
            return is_account_id(name)
        case _:
            return _NAME.fullmatch(name) is not None


def _read_entry(
    model: type[T], path: tuple[str, ...], entry: Mapping[str, object], base: Path, complain: Complain
) -> T | None:
    """An entry of a table; None where a value that it needs is missing or wrong."""
    values = read_table(model, path, entry, base, complain, noun="key")
    required = {each.name for each in dataclasses.fields(model) if each.default is dataclasses.MISSING}  # type: ignore[arg-type]
    for name in sorted(required - entry.keys()):
        complain(path, f"needs {name}: {in_words(kinds_of(model)[name])}")
    return model(**values) if required <= values.keys() else None
