"""Files of the operator: the cluster in the settings file, training runtimes and training shapes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from trainmaster.plain_yaml import parse_yaml, parse_yaml_documents
from trainmaster.server.coordinator.clusters import Clusters
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.errors import ConflictError, NotFoundError, RefusedError, SpecError
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.core.shapes import Shape, Shapes
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.settings.declared import Declared
from trainmaster.server.store import accounts, nodes, queues
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

# The cluster in the settings file: accounts, queues and webhooks at the start, nodes when they are reported.
#
# The file overrides what was set before under the same name, and leaves the rest alone. Changes through the API last
# until the next start.

_EVERYTHING = Scope.everything()
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class DeclaredCluster:
    """Applies what the settings file says of the cluster."""

    database: Database
    declared: Declared
    subscriptions: Subscriptions
    clusters: Clusters
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._awaited = set(self.declared.nodes)
        """Nodes that nobody has reported yet."""
        self._warned = False

    def apply(self) -> None:
        """Apply everything in one transaction; RefusedError when a webhook cannot be as the file says."""
        declared = self.declared
        if declared.accounts or declared.queues or declared.webhooks or declared.clusters:
            self.database.write_now(self._write)
        self.settle_nodes()

    def settle_nodes(self) -> None:
        """Set labels and capabilities of the declared nodes that were reported since the last call."""
        if not self._awaited:
            return
        with self.database.read() as connection:
            known = {node.node_id for node in nodes.all(connection, _EVERYTHING)}
        there = self._awaited & known
        if known and self._awaited - known and not self._warned:
            self._warned = True
            missing, present = (", ".join(sorted(names)) for names in (self._awaited - known, known))
            _log.warning(
                "nobody has reported these nodes of the settings file yet: %s; there are: %s", missing, present
            )

        def work(connection: Connection) -> None:
            for name in sorted(there):
                given = self.declared.nodes[name]
                try:
                    nodes.give(
                        connection,
                        _EVERYTHING,
                        name,
                        self.clock(),
                        labels=given.labels,
                        capabilities=given.capabilities,
                    )
                except ConflictError as error:
                    _log.warning("the entry of %s in the settings file has no effect: %s", name, error)

        if there:
            self.database.write_now(work)
            self._awaited -= there

    def _write(self, connection: Connection) -> None:
        now = self.clock()
        for name, account in self.declared.accounts.items():
            accounts.ensure(connection, _EVERYTHING, name, now)
            accounts.set_uid(connection, _EVERYTHING, name, account.uid)
        for name, queue in self.declared.queues.items():
            queues.put(
                connection, _EVERYTHING, JobQueue(name=name, weight=queue.weight, quota_gpus=queue.quota_gpus), now
            )
        for name, cluster in self.declared.clusters.items():
            try:
                self.clusters.put(connection, name, cluster.kind, cluster.options)
            except SpecError as error:
                raise RefusedError(f"clusters.{name}: {error.message}") from None
        for name, webhook in self.declared.webhooks.items():
            try:
                accounts.get(connection, _EVERYTHING, webhook.account)
                self.subscriptions.declare(connection, name, webhook)
            except NotFoundError:
                known = ", ".join(account.account_id for account in accounts.all(connection, _EVERYTHING))
                raise RefusedError(
                    f"webhooks.{name}.account: there is no account {webhook.account!r}; there are: {known}. "
                    "Declare it under [accounts], or make it first"
                ) from None
            except SpecError as error:
                raise RefusedError(f"webhooks.{name}: {error.message}") from None


# Training runtimes: YAML files in the format of Kubeflow's.
#
# Clients interpret them; the server only returns them. So it reads them on request: a new file counts at once, and a
# broken one is reported to whoever asks instead of keeping the server down.

SUFFIXES = (".yaml", ".yml")
KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeDocument:
    name: str
    kind: str
    file: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    file: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFiles:
    runtimes: tuple[RuntimeDocument, ...] = ()
    broken: tuple[BrokenFile, ...] = ()

    def get(self, name: str) -> RuntimeDocument:
        for runtime in self.runtimes:
            if runtime.name == name:
                return runtime
        broken = "".join(f"; {each.file} cannot be used: {each.message}" for each in self.broken)
        raise NotFoundError(f"there is no runtime {name} on this server{broken}")


def load_runtimes(directory: Path) -> RuntimeFiles:
    """The runtimes of a directory, in the order of the files; a missing directory has none."""
    found: dict[str, RuntimeDocument] = {}
    broken: list[BrokenFile] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.suffix not in SUFFIXES:
            continue
        for number, document in enumerate(_documents(path, broken), start=1):
            try:
                runtime = _runtime(document, path.name)
                if runtime is not None and runtime.name in found:
                    raise ValueError(f"metadata.name: {found[runtime.name].file} has a {runtime.name} already")
                if runtime is not None:
                    found[runtime.name] = runtime
            except ValueError as error:
                broken.append(BrokenFile(file=path.name, message=f"document {number}: {error}"))
    return RuntimeFiles(runtimes=tuple(found.values()), broken=tuple(broken))


def _documents(path: Path, broken: list[BrokenFile]) -> list[Any]:
    try:
        return [each for each in parse_yaml_documents(path.read_text(encoding="utf-8"), path.name) if each is not None]
    except (OSError, ValueError) as error:  # YamlError is a ValueError
        broken.append(BrokenFile(file=path.name, message=str(error)))
        return []


def _runtime(document: Any, file: str) -> RuntimeDocument | None:
    """Check what is needed to return a document; clients check the rest. None: it is something else."""
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"kind: must be {' or '.join(KINDS)}")
    if kind not in KINDS:
        return None
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("metadata.name: is required")
    try:
        plain = json.loads(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error
    return RuntimeDocument(name=name, kind=kind, file=file, document=plain)


# Training shapes: one YAML file each.


class ShapeFileError(ValueError): ...


def load_shapes(directory: Path) -> Shapes:
    """The built-in shapes and those of a directory, which may be missing; an error has the problems of all files."""
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES) if directory.is_dir() else []
    found: dict[str, Shape] = {}
    problems: list[str] = []
    for path in files:
        try:
            document = parse_yaml(path.read_text(encoding="utf-8"), path.name)
            # A shape without a name gets the file's.
            shape = parse(Shape, {"name": path.stem, **document} if isinstance(document, dict) else document)
            if shape.name in found:
                problems.append(f"{path}: name: another file has a shape {shape.name} already")
            found[shape.name] = shape
        except SpecError as error:
            problems += [f"{path}: {problem.field}: {problem.message}" for problem in error.problems]
        except (OSError, ValueError) as error:  # YamlError is a ValueError
            problems.append(f"{path}: {error}")
    if problems:
        raise ShapeFileError("\n".join(problems))
    return Shapes(tuple(found.values()))
