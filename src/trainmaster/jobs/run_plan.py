"""How a run of a job class begins: anew, from its own latest checkpoint, or from another run's; and what is refused."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmaster.jobs import ambient
from trainmaster.jobs.basic_job import BasicJob, completed_document
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.checkpoint_lookup import LATEST, find, pointed
from trainmaster.jobs.config_document import (
    ConfigurationError,
    differences,
    overlaid,
    overridden,
)
from trainmaster.jobs.hardware import HardwareRequest
from trainmaster.jobs.restoreable_job import RestoreableJob, identity_and_configuration
from trainmaster.jobs.roots import Root
from trainmaster.jobs.spec import DEFAULT_GROUP, DEFAULT_PROJECT, ExecutionSpec
from trainmaster.jobs.tracker import NONE
from trainmaster.protocol import environment


class RunError(Exception):
    """A job class cannot be run as it was asked for; the message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run, and as whom."""

    target: str
    """`module:Class`, or a registered name."""
    name: str
    project: str = DEFAULT_PROJECT
    group: str = DEFAULT_GROUP
    module: str | None = None
    """Imported first, so that a registered name is known."""
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    """`key=value`, over the configuration."""
    restore: str | None = None
    """Another run's checkpoint to begin with, while this one has none of its own."""
    overlay: bool = False
    """Go on with another configuration than the checkpoint's."""
    elastic: bool = False
    """Go on from a checkpoint of another number of processes, without its random-number generators."""
    checkpoints: str | None = None
    """The root of its checkpoints, if it is another than the job's: `s3://bucket/prefix`."""
    tracker: str = NONE
    nodes: int = 1
    hardware: HardwareRequest | None = None

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> RunRequest:
        """The request of a plain form; what a newer writer added is ignored."""
        known = {name: document[name] for name in RunRequest.__dataclass_fields__ if name in document}
        known["overrides"] = tuple(known.get("overrides", ()))
        if known.get("hardware") is not None:
            known["hardware"] = HardwareRequest(**known["hardware"])
        return RunRequest(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a run begins."""

    document: Mapping[str, Any]
    """Its whole configuration."""
    own: tuple[str, ...] = ()
    """Its own checkpoints to go on from: the first that is whole."""
    other: str | None = None
    """Another run's checkpoint to begin with, as it was named."""
    other_place: str | None = None
    """Where that one lies: the newest save to its path."""
    notes: tuple[str, ...] = ()
    """What to tell whoever watches."""


def plan_run(cls: type[BasicJob[Any]], spec: ExecutionSpec, root: Root, request: RunRequest) -> Plan:
    """How this class begins under this identity now.

    Raises:
        RunError, ConfigurationError: it must not be run like this.
        CorruptCheckpointError: the checkpoint to begin with cannot be read.
    """
    given = overridden(request.config, request.overrides)
    if not issubclass(cls, RestoreableJob):
        if request.restore is not None:
            raise RunError(f"{request.target} is no RestoreableJob: it cannot begin from {request.restore}")
        return Plan(document=completed_document(cls, given))
    own, other = _beginnings(spec, root, request)
    if own:
        return _going_on(cls, spec, root, request, own, other=other, given=given)
    document = completed_document(cls, given)
    if other is None:
        return Plan(document=document)
    try:
        # What the server chose is this very checkpoint, whatever was saved to its path since.
        place = find(root, other) if request.restore is not None or root.manifest(other) is None else other
    except FileNotFoundError:
        raise RunError(f"there is no checkpoint {other} below {root.uri}") from None
    return Plan(document=document, other=other, other_place=place, notes=(f"begins from {other}",))


def next_after(own: Sequence[str], error: CorruptCheckpointError) -> str:
    """What to say when the first of some checkpoints is damaged and the second is used.

    Raises:
        RunError: there is no second.
    """
    if len(own) == 1:
        raise RunError(f"{own[0]} is damaged, and there is none before it: {error}") from error
    return f"{own[0]} is damaged, and {own[1]} is used instead: {error}"


def _beginnings(spec: ExecutionSpec, root: Root, request: RunRequest) -> tuple[list[str], str | None]:
    """The run's own checkpoints that it may go on from, the newest first; and another's to begin with."""
    own = []
    if (latest := pointed(root, spec.path, LATEST)) is not None:
        committed = root.committed(spec.path)
        own = committed[: committed.index(latest) + 1][::-1]
    chosen = _chosen_by_server(spec, root)
    if chosen in own:
        own = own[own.index(chosen) :]
    # One of its own that was never registered is no place to go on from, whoever says so.
    foreign = chosen if chosen and not chosen.startswith(f"{spec.path}/") else None
    return own, request.restore or foreign


def _chosen_by_server(spec: ExecutionSpec, root: Root) -> str | None:
    path = os.environ.get(environment.RESUME_FROM)
    if not path:
        return None
    if not path.startswith(f"{root.uri}/"):
        raise RunError(f"{path} is no checkpoint of a job class: {spec.path} cannot go on from it")
    return path.removeprefix(f"{root.uri}/")


def _going_on(
    cls: type[BasicJob[Any]],
    spec: ExecutionSpec,
    root: Root,
    request: RunRequest,
    own: list[str],
    *,
    other: str | None,
    given: Mapping[str, Any],
) -> Plan:
    notes = []
    while True:
        try:
            began_from, before = _papers(cls, root, own[0])
            break
        except CorruptCheckpointError as error:
            notes.append(next_after(own, error))
            own = own[1:]
    if other not in (None, began_from):
        raise RunError(
            f"{spec.path} has checkpoints of its own and began from {began_from or 'nothing'}; "
            f"give another name to begin from {other}"
        )
    manifest = root.manifest(own[0])
    where = f"{own[0]} (step {manifest.step})" if manifest is not None else own[0]
    document = completed_document(cls, overlaid(before, given) if request.overlay else given)
    changed = differences(before, document)
    if changed and not request.overlay:
        raise RunError(
            f"{where} has another configuration:\n  "
            + "\n  ".join(changed)
            + "\nset `overlay` (--overlay) to go on with the new one, or give another name to begin anew"
        )
    notes.append(f"goes on from {where}")
    if changed:
        notes.append("goes on with another configuration: " + "; ".join(changed))
    return Plan(document=document, own=tuple(own), notes=tuple(notes))


def _papers(cls: type[BasicJob[Any]], root: Root, place: str) -> tuple[str | None, dict[str, Any]]:
    """What a run began from, and its configuration as its class fills it today.

    A configuration that does not fit the class any more is compared as it was written.
    """
    saved, document = identity_and_configuration(root, place)
    if ambient.declares(cls):
        # Code may have added to it while it ran.
        document = ambient.known_part(document, ambient.defaults(ambient.declared(cls)))
    with contextlib.suppress(ConfigurationError):
        document = completed_document(cls, document)
    return saved.get("restored_from"), document
