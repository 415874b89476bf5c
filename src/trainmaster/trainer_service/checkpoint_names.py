"""The checkpoints of a service job by the names that clients gave them: directories of numbered saves.

Replacing one commits the next number first and removes the old one then, so that a name never leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainmaster.engine.types import EngineError
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.roots import Root, open_checkpoint
from trainmaster.protocol.trainer_requests import PLACE_OF_KIND, TINKER, WeightsPath

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""Names of states that the clients of the other door load."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,254}")
_NUMBER = re.compile(r"[0-9]+")


class CheckpointKind(StrEnum):
    TRAINING = "training"
    SAMPLER = "sampler"
    EXTERNAL = "external"
    """To be downloaded, in the form that Tinker's own tools read; may be encrypted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLabel:
    kind: CheckpointKind
    name: str
    owner: str = ""

    @staticmethod
    def of(kind: CheckpointKind, name: object, *, model_id: str, door: str) -> CheckpointLabel:
        """The label of a save by a model of a door. Raises EngineError where this is no name."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise EngineError(
                f"{name!r} cannot be the name of a checkpoint: that is up to 128 letters, digits, dots, dashes and "
                "underscores, the first a letter or a digit"
            )
        if door != TINKER and kind is CheckpointKind.TRAINING and not _DNS_LABEL.fullmatch(name):
            raise EngineError(
                f"{name!r} cannot be the name of a state: clients load only names of up to 63 lower-case letters, "
                "digits and '-', the first and the last a letter or a digit"
            )
        return CheckpointLabel(kind=kind, name=name, owner=model_id if door == TINKER else "")

    @staticmethod
    def read(path: object, kind: CheckpointKind) -> CheckpointLabel:
        """The label in a path; `kind` is that of a bare name. Raises EngineError where the path has no label."""
        if isinstance(path, str):
            if found := WeightsPath.parse(path):
                if _OWNER.fullmatch(found.run) and _NAME.fullmatch(found.name):
                    return CheckpointLabel(kind=CheckpointKind(found.kind), name=found.name, owner=found.run)
            elif _NAME.fullmatch(path):
                return CheckpointLabel(kind=kind, name=path)
        raise EngineError(f"{path!r} leads to no checkpoint that this trainer knows")

    @property
    def path(self) -> str:
        if not self.owner:
            return self.name
        return str(WeightsPath(run=self.owner, place=PLACE_OF_KIND[self.kind], name=self.name))

    @property
    def directory(self) -> str:
        top = "weights" if self.kind is CheckpointKind.TRAINING else self.kind
        return "/".join(part for part in (top, self.owner, self.name) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    root: Root
    rel_path: str
    manifest: Manifest

    @property
    def where(self) -> str:
        return self.root.locate(self.rel_path)


class NamedCheckpoints:
    def __init__(self, root: Root) -> None:
        self.root = root

    def versions(self, label: CheckpointLabel) -> list[str]:
        """Committed ones, the newest last."""
        return self.root.committed(label.directory)

    def new_place(self, label: CheckpointLabel) -> str:
        numbers = [int(last) for path in self.versions(label) if _NUMBER.fullmatch(last := path.rpartition("/")[2])]
        return f"{label.directory}/{max(numbers, default=0) + 1}"

    def find(self, label: CheckpointLabel) -> CommittedCheckpoint:
        for rel_path in reversed(self.versions(label)):
            manifest = self.root.manifest(rel_path)
            if manifest is not None:
                return CommittedCheckpoint(root=self.root, rel_path=rel_path, manifest=manifest)
        beside = {each["path"] for each in self.listing() if each["kind"] == label.kind}
        said = f"there are {', '.join(sorted(beside)[-10:])}" if beside else "there are none yet"
        raise EngineError(f"there is no {label.kind} checkpoint {label.path!r} in this job; {said}")

    def open(self, where: str) -> CommittedCheckpoint:
        """The checkpoint at a path or URI, of any job. Raises EngineError where nothing is committed there."""
        try:
            root, rel_path = open_checkpoint(where)
            manifest = root.manifest(rel_path)
        except ValueError as error:
            raise EngineError(str(error)) from error
        if manifest is None:
            raise EngineError("the checkpoint that the path leads to is gone")
        return CommittedCheckpoint(root=root, rel_path=rel_path, manifest=manifest)

    def listing(self) -> list[dict[str, Any]]:
        """Oldest first."""
        listed = []
        for rel_path in self.root.committed():
            try:
                manifest = self.root.manifest(rel_path)
            except CorruptCheckpointError:
                continue
            if manifest is not None and manifest.name and manifest.kind in tuple(CheckpointKind):
                listed.append(description(manifest))
        return listed


def description(manifest: Manifest) -> dict[str, Any]:
    attributes: Mapping[str, Any] = manifest.attributes
    names = ("model_id", "door", "base_model", "is_lora", "lora_rank", "train_unembed", "train_mlp", "train_attn")
    owner = attributes.get("model_id", "") if attributes.get("door") == TINKER else ""
    label = CheckpointLabel(kind=CheckpointKind(manifest.kind), name=manifest.name, owner=owner)
    return {"path": label.path, "kind": manifest.kind, **{name: attributes.get(name) for name in names}}
