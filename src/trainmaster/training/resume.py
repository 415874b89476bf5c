"""The checkpoint that a training goes on from: found, checked, and refused when the course would be another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.jobs import rng
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.checkpoint_saver import InexactResumeError, Saver
from trainmaster.jobs.process import Process
from trainmaster.jobs.reporter import Reporter
from trainmaster.jobs.roots import Root, open_checkpoint
from trainmaster.jobs.trees import ANYTHING
from trainmaster.training.document import Prepared

NEEDS = ("model", "optimizer", "scheduler", "trainer_state")
"""What a checkpoint of a trainer has; without any of it a resume would not be exact."""
_ADVICE = "Bring it back, resume from another checkpoint of the job, or start anew without one"


@dataclass(slots=True, kw_only=True)
class Resumed:
    """A checkpoint to go on from."""

    where: str
    manifest: Manifest
    metadata: Mapping[str, Any]
    rng_state: rng.State | None
    """Of this rank; None where the ranks are others now."""
    tree: Any = field(repr=False, default=None)
    """What was read already; None where it is read into the form that it is needed in."""
    _saver: Saver = field(repr=False)
    _rel_path: str = field(repr=False)

    def take_tree(self, template: Any) -> Any:
        """Weights, optimizer and the rest, once; sharded as the template is, where it could not be read before."""
        if self.tree is None:
            return self._saver.load(self._rel_path, template, verify=False).tree
        tree, self.tree = self.tree, None
        return tree


def find(where: str, *, process: Process, reporter: Reporter, sharded: bool) -> Resumed:
    """The checkpoint at a path or URI; where it is corrupt, the newest good one before it. Collective.

    Args:
        where: what the server says to go on from.
        process: this rank among all.
        reporter: for a note when it is another one, or when it cannot be exact.
        sharded: the weights of this training are parted over ranks, so that they are read into their form later.

    Raises:
        InexactResumeError: it, or something in it, is missing without which the training would take another course.
        CorruptCheckpointError: it is corrupt, and so are all before it.
    """
    root, name = open_checkpoint(where)
    _require_all_files(root, name)
    saver = Saver(root, process, reporter=reporter)
    if sharded:
        name = _verified(root, name, process, reporter)
        loaded = saver.load(name, {}, partial=True, needs=NEEDS[-1:])
    else:
        name, loaded = saver.load_latest_good(ANYTHING, start=name, needs=NEEDS)
    same_ranks = loaded.manifest.world_size == process.count
    if not same_ranks and process.index == 0:
        reporter.note(
            f"{name} was saved by {loaded.manifest.world_size} ranks, and {process.count} go on from it: weights and "
            "optimizer are the same, but random numbers and the division of rows are not"
        )
    return Resumed(
        where=root.locate(name),
        manifest=loaded.manifest,
        metadata=loaded.metadata,
        rng_state=saver.load_rng(name) if same_ranks else None,
        tree=None if sharded else loaded.tree,
        _saver=saver,
        _rel_path=name,
    )


def compare_inputs(
    resumed: Resumed, prepared: Prepared, *, process: Process, reporter: Reporter, adapter: bool
) -> None:
    """See whether the training goes on with what it was trained with.

    Raises:
        InexactResumeError: an adapter belongs to another base model.
    """
    model, rows = (resumed.metadata.get(name) for name in ("model_key", "rows_key"))
    if adapter and model and model != prepared.model_key:
        raise InexactResumeError(
            f"{resumed.where} has an adapter, and the base model is not the one that it was trained beside: it was "
            "changed, or is another. Bring it back (base_model.revision pins it), or start anew without a checkpoint"
        )
    if rows and rows != prepared.rows_key and process.index == 0:
        reporter.note(
            "the rows are not those that the checkpoint was trained on: the data, its configuration, the tokenizer or "
            "a package is another; training goes on with them at the same place in the epochs"
        )


def _require_all_files(root: Root, name: str) -> None:
    """Refuse where a file is gone. Bytes rot, and the one before helps; but files go because somebody removed them."""
    manifest, place = root.manifest(name), Path(root.locate(name))
    if manifest is None:
        raise InexactResumeError(f"{root.locate(name)}: there is no checkpoint any more. {_ADVICE}")
    if not place.is_dir():
        return
    missing = [file.path for file in manifest.files if not (place / manifest.data / file.path).exists()]
    if missing:
        raise InexactResumeError(f"{place} lacks {missing[0]}: training cannot go on exactly without it. {_ADVICE}")


def _verified(root: Root, start: str, process: Process, reporter: Reporter) -> str:
    """The newest checkpoint that is whole, not newer than `start`; one rank reads, all hear of it."""
    said: dict[str, str] = {}
    if process.index == 0:
        candidates = root.committed()[::-1]
        for name in candidates[candidates.index(start) :] if start in candidates else [start]:
            try:
                root.verify(name)
                said = {"name": name}
                break
            except CorruptCheckpointError as error:
                reporter.note(f"the checkpoint {name} is corrupt, the one before it is used: {error}")
                said.setdefault("error", str(error))
    said = process.broadcast(said, "the checkpoint to go on from")
    if "name" not in said:
        raise CorruptCheckpointError(said.get("error", f"{start}: nothing is committed there"))
    return said["name"]
