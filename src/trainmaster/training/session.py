"""What one rank does beside TRL's loop: checkpoints, resuming from one of the same course, and requests to the job."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainmaster.jobs.attempt import Stop
from trainmaster.jobs.basic_job import StopRequests
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.checkpoint_reader import BEST, LATEST, InexactResumeError
from trainmaster.jobs.checkpoint_saver import SaveError, Saver, to_remove
from trainmaster.jobs.objects import AccessRefusedError
from trainmaster.jobs.process import Process
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import Root, found_again, open_checkpoint
from trainmaster.jobs.trees import ANYTHING
from trainmaster.protocol import environment
from trainmaster.training.document import Document, Prepared
from trainmaster.training.early_stopping import Patience
from trainmaster.training.progress_report import Reporting, reported_metrics

NEEDS = ("model", "optimizer", "scheduler", "trainer_state")
"""The parts of a trainer's checkpoint; a resume without one of them would not be exact."""
_ADVICE = "Bring it back, resume from another checkpoint of the job, or start over without one"


@dataclass(slots=True, kw_only=True)
class Resumed:
    where: str
    manifest: Manifest
    metadata: Mapping[str, Any]
    rng_state: Mapping[str, Any] | None
    """Of this rank; None where the number of ranks changed."""
    tree: Any = field(repr=False, default=None)
    """None where it is read later, into a template."""
    _saver: Saver = field(repr=False)
    _rel_path: str = field(repr=False)

    def take_tree(self, template: Any) -> Any:
        """Weights, optimizer and the rest, once. A sharded tree is read now, into the template's shards."""
        if self.tree is None:
            return self._saver.load(self._rel_path, template, verify=False).tree
        tree, self.tree = self.tree, None
        return tree


def find_checkpoint(where: str, *, process: Process, reporter: Reporter, sharded: bool) -> Resumed:
    """The checkpoint at a path or URI; where it is corrupt, the newest good one before it. Collective."""
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
            f"{name} was saved by {loaded.manifest.world_size} ranks, and {process.count} resume from it: weights and "
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
    """Refuse an adapter of another base model (InexactResumeError), and note other rows than the checkpoint's."""
    model, rows = (resumed.metadata.get(name) for name in ("model_key", "rows_key"))
    if adapter and model and model != prepared.model_key:
        raise InexactResumeError(
            f"{resumed.where} has an adapter, and the base model is not the one that it was trained beside: it was "
            "changed, or is another. Bring it back (base_model.revision pins it), or start over without a checkpoint"
        )
    if rows and rows != prepared.rows_key and process.index == 0:
        reporter.note(
            "the rows are not those that the checkpoint was trained on: the data, its configuration, the tokenizer or "
            "a package changed; training continues with them at the same place in the epochs"
        )


def step_to_resume_at(
    resumed: Resumed, *, steps_per_epoch: int, steps: int, fixed: bool, note: Callable[[str], None] | None
) -> int:
    """The checkpoint's step; where an epoch has another number of steps now, the same place in the epochs.

    `steps` are those of the training; `fixed`: the job says how many, and not how many epochs.
    """
    before, epoch = resumed.metadata["steps_per_epoch"], resumed.manifest.epoch
    if fixed or before == steps_per_epoch or epoch is None:
        return resumed.manifest.step
    if note is not None:
        note(
            f"an epoch has {steps_per_epoch} steps now, and had {before}: training continues at the same place in the "
            "epochs"
        )
    return min(round(epoch * steps_per_epoch), steps)


def _require_all_files(root: Root, name: str) -> None:
    """Refuse a checkpoint with missing files: somebody removed them. (Corrupt bytes lead to an earlier checkpoint.)"""
    manifest, place = root.manifest(name), Path(root.locate(name))
    if manifest is None:
        raise InexactResumeError(f"{root.locate(name)}: there is no checkpoint any more. {_ADVICE}")
    if not place.is_dir():
        return
    missing = [file.path for file in manifest.files if not (place / manifest.data / file.path).exists()]
    if missing:
        raise InexactResumeError(f"{place} lacks {missing[0]}: training cannot continue exactly without it. {_ADVICE}")


def _verified(root: Root, start: str, process: Process, reporter: Reporter) -> str:
    """The newest intact checkpoint up to `start`; the first rank reads, and broadcasts its name."""
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
    said = process.broadcast(said, "the checkpoint to resume from")
    if "name" not in said:
        raise CorruptCheckpointError(said.get("error", f"{start}: nothing is committed there"))
    return said["name"]


class NodeCopies:
    """Copies every checkpoint below `node-<index>`, by the first rank of each further node. They are not registered."""

    def __init__(self, root: Root, reporter: Reporter, *, keep: int) -> None:
        self._root = root
        self._reporter = reporter
        self._keep = keep
        self._node = int(os.environ.get(environment.NODE, "0"))
        self._copies = self._node > 0 and os.environ.get("LOCAL_RANK", "0") == "0"

    def make(self, rel_path: str) -> None:
        manifest = self._root.manifest(rel_path) if self._copies else None
        if manifest is None:
            return
        home = f"node-{self._node}"
        target = f"{home}/{rel_path}"
        made = self._root.draft(
            target, job_id=manifest.job_id, attempt=manifest.attempt, expected_bytes=manifest.size_bytes
        )
        with made as draft, self._root.fetch(rel_path, verify=False) as source:
            for file in manifest.files:
                (draft / file.path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / file.path, draft / file.path)
            self._root.commit(draft, target, manifest, check_owner=self._reporter.require_ownership)
        for old in to_remove(self._root.committed(home), limit=self._keep):
            self._root.remove(old)


KIND = "trainer"


class Stopped(Exception):  # noqa: N818 - no error
    """The job was asked to stop, and has saved what it should."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.cause)
        self.stop = stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    step: int
    value: float
    where: str | None = None
    """None until it is committed; in a checkpoint's metadata: this very checkpoint."""


@dataclass(eq=False)
class Session:
    """Connects one rank to the server, the other ranks and the checkpoints. `save`, `wait`, `poll` are collective."""

    document: Document
    prepared: Prepared
    _: KW_ONLY
    process: Process
    reporter: Reporter
    reporting: Reporting | None
    """None on all ranks but the first."""
    resumed: Resumed | None
    tracker_run: str | None = None
    """The tracker's run, which later attempts join."""

    def __post_init__(self) -> None:
        checkpoint, resumed = self.document.output.checkpoint, self.resumed
        keep = checkpoint.save_total_limit
        self._root = self.reporter.checkpoint_root()
        self._saver = Saver(self._root, self.process, keep=keep, reporter=self.reporter)
        self._copies = NodeCopies(self._root, self.reporter, keep=keep) if checkpoint.save_on_each_node else None
        self._requests = StopRequests(self.process)
        self._metrics: dict[str, float] = {}
        self._latest = None if resumed is None else resumed.where
        self._best: Best | None = None
        if resumed is not None and (saved := resumed.metadata.get("best")):
            noted = found_again(self._root, saved["where"] or resumed.where, self.reporter.job_id())
            self._best = Best(**{**saved, "where": noted})
        self._noted_missing_metric = False
        self.patience = Patience.of(self.document, None if resumed is None else resumed.metadata.get("patience"))
        self.saved_step: int | None = None

    @property
    def stop(self) -> Stop | None:
        """The stop that the ranks agreed on in the last look."""
        return self._requests.stop

    def poll(self) -> bool:
        """Look for requests to the job; returns whether a save is requested."""
        return self._requests.poll()

    @property
    def best_needs_evaluation(self) -> bool:
        return (self.document.output.checkpoint.metric_for_best_model or "").startswith("eval_")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as scope:
            if self.reporting is not None:
                scope.enter_context(self.reporter.phase("evaluating"))
                scope.enter_context(self.reporting.not_training())
            yield

    def end_early(self, steps: int) -> None:
        """Tell that the training ends before the last of so many steps, where it was saved or has resumed."""
        step = self.saved_step if self.resumed is None or self.saved_step is not None else self.resumed.manifest.step
        if self.process.index == 0 and step is not None:
            self.reporter.note(self.patience.told(step, steps))
            self.reporter.progress(step, total_steps=step)

    def take_metrics(self, logs: Mapping[str, Any]) -> None:
        self._metrics |= {name: value for name, value in reported_metrics(logs).items() if not name.startswith("eval_")}

    def prepare(self, tree: Any) -> None:
        """Allocate the memory for a save of this tree, in the background."""
        self._saver.prepare(tree)

    def save(
        self, tree: Any, *, state: Mapping[str, Any], evaluated: Mapping[str, float], progress: Mapping[str, Any]
    ) -> None:
        """Begin a save, written while training continues. `evaluated`: at this very step; `progress`: for a resume."""
        with self.reporting.not_training() if self.reporting is not None else contextlib.nullcontext(), _writing():
            self.wait()
            step, metrics = state["global_step"], {**self._metrics, **reported_metrics(evaluated)}
            better = self._better(step, metrics)
            if evaluated or not self.best_needs_evaluation:
                self._require_metric(metrics)
            self._saver.save(
                tree,
                rel_path=f"checkpoint-{step}",
                step=step,
                epoch=state["epoch"],
                metrics=metrics,
                metadata={
                    "trainer_state": state,
                    "best": None if (best := better or self._best) is None else asdict(best),
                    "patience": self.patience.to_json(),
                    "tracker_run": self.tracker_run,
                    "rows_key": self.prepared.rows_key,
                    "model_key": self.prepared.model_key,
                    **progress,
                },
                files={"training.json": self.document.text},
                point=(LATEST, BEST) if better else (LATEST,),
                kind=KIND,
            )
        self._best = better or self._best
        self.saved_step = step

    def wait(self) -> None:
        """Wait until no save is under way. Raises SaveError, or NotOwnerError where another attempt owns the job."""
        with _writing():
            saved = self._saver.wait()
        if saved is None:
            return
        self._latest = self._root.locate(saved.rel_path)
        if self._best is not None and self._best.where is None:
            self._best = replace(self._best, where=self._latest)
        if self._copies is not None:
            self._copies.make(saved.rel_path)

    def load_best(self, template: Any) -> Any:
        """The template's part of the best checkpoint; None where there is none, or it is the latest."""
        if self._best is None or self._best.where is None or self._best.where == self._latest:
            return None
        try:
            root, rel_path = open_checkpoint(self._best.where)
            return Saver(root, self.process, reporter=self.reporter).load(rel_path, template, partial=True).tree
        except (FileNotFoundError, CorruptCheckpointError, AccessRefusedError) as error:
            if self.process.index == 0:
                self.reporter.note(f"the result is the last model, since the best one cannot be read: {error}")
            return None

    def _require_metric(self, metrics: Mapping[str, float]) -> None:
        name = self.document.output.checkpoint.metric_for_best_model
        if name is None or name in metrics or self._noted_missing_metric or self.process.index != 0:
            return
        self._noted_missing_metric = True
        has = ", ".join(sorted(metrics)) or "none yet"
        self.reporter.note(
            f"no checkpoint is the best: {name} (metric_for_best_model) is none of its metrics; it has {has}"
        )

    def _better(self, step: int, metrics: Mapping[str, float]) -> Best | None:
        checkpoint = self.document.output.checkpoint
        value = metrics.get(checkpoint.metric_for_best_model or "")
        if value is None or not math.isfinite(value):
            return None
        if self._best is None or (value > self._best.value if checkpoint.best_is_greater else value < self._best.value):
            return Best(step=step, value=value)
        return None


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"a checkpoint could not be written: {error}") from error
