"""Checkpoints of a training, and requests to it: what one rank does beside TRL's loop."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainmaster.jobs.attempt import Stop
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.checkpoint_saver import BEST, LATEST, SaveError, Saver, to_remove
from trainmaster.jobs.process import Process
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import Root, open_checkpoint
from trainmaster.jobs.stop_requests import StopRequests
from trainmaster.protocol import environment
from trainmaster.training.document import Document, Prepared
from trainmaster.training.progress_report import Reporting, reported_metrics
from trainmaster.training.resume import Resumed


class NodeCopies:
    """Copies every checkpoint for each further node, where the job wants every node to save.

    The first rank of each node but the first commits copies below `node-<index>`. They are not registered.
    """

    def __init__(self, root: Root, reporter: Reporter, *, keep: int) -> None:
        self._root = root
        self._reporter = reporter
        self._keep = keep
        self._node = int(os.environ.get(environment.NODE, "0"))
        self._copies = self._node > 0 and os.environ.get("LOCAL_RANK", "0") == "0"

    def make(self, rel_path: str) -> None:
        """Copy a committed checkpoint, if this rank is the one that copies."""
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
"""Of these checkpoints, in their manifests."""


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


class Session:
    """Connects one rank to the server, the other ranks and the checkpoints. `save`, `wait`, `look` are collective."""

    def __init__(
        self,
        document: Document,
        prepared: Prepared,
        *,
        process: Process,
        reporter: Reporter,
        reporting: Reporting | None,
        resumed: Resumed | None,
        tracker_run: str | None = None,
    ) -> None:
        """`reporting` is None on all ranks but the first; later attempts join the tracker's run `tracker_run`."""
        checkpoint = document.output.checkpoint
        self._document = document
        self._prepared = prepared
        self._process = process
        self._reporting = reporting
        self._tracker_run = tracker_run
        self._root = reporter.checkpoint_root()
        self._saver = Saver(self._root, process, keep=checkpoint.save_total_limit, reporter=reporter)
        self._copies = (
            NodeCopies(self._root, reporter, keep=checkpoint.save_total_limit) if checkpoint.save_on_each_node else None
        )
        self.reporter = reporter
        self._requests = StopRequests(process)
        self._metrics: dict[str, float] = {}
        self.resumed = resumed
        self._latest = None if resumed is None else resumed.where
        self._best: Best | None = None
        if resumed is not None and (saved := resumed.metadata.get("best")):
            self._best = Best(**{**saved, "where": saved["where"] or resumed.where})
        self._noted_missing_metric = False
        self.saved_step: int | None = None
        """The step at which the last save began."""

    @property
    def stop(self) -> Stop | None:
        """The stop that the ranks agreed on in the last look."""
        return self._requests.stop

    def look(self) -> bool:
        """Look for requests to the job; returns whether a save is requested."""
        return self._requests.look()

    @property
    def best_needs_evaluation(self) -> bool:
        """Whether the metric for the best model comes from evaluations."""
        return (self._document.output.checkpoint.metric_for_best_model or "").startswith("eval_")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        with contextlib.ExitStack() as scope:
            if self._reporting is not None:
                scope.enter_context(self.reporter.phase("evaluating"))
                scope.enter_context(self._reporting.not_training())
            yield

    def take_metrics(self, logs: Mapping[str, Any]) -> None:
        """Take the loop's metrics for the next checkpoint."""
        self._metrics |= {name: value for name, value in reported_metrics(logs).items() if not name.startswith("eval_")}

    def prepare(self, tree: Any) -> None:
        """Allocate the memory for a save of this tree, in the background."""
        self._saver.prepare(tree)

    def save(
        self, tree: Any, *, state: Mapping[str, Any], evaluated: Mapping[str, float], progress: Mapping[str, Any]
    ) -> None:
        """Begin a save; training continues while it is written.

        Args:
            tree: weights, optimizer, scheduler and the like.
            state: the loop's own.
            evaluated: what an evaluation at this very step gave.
            progress: whatever else a resume has to know.
        """
        with self._reporting.not_training() if self._reporting is not None else contextlib.nullcontext(), _writing():
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
                    "tracker_run": self._tracker_run,
                    "rows_key": self._prepared.rows_key,
                    "model_key": self._prepared.model_key,
                    **progress,
                },
                files={"training.json": self._document.text},
                point=(LATEST, BEST) if better else (LATEST,),
                kind=KIND,
            )
        self._best = better or self._best
        self.saved_step = step

    def wait(self) -> None:
        """Wait until no save is under way.

        Raises:
            SaveError: a checkpoint could not be written.
            NotOwnerError: another attempt owns the job now.
        """
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
        root, rel_path = open_checkpoint(self._best.where)
        try:
            return Saver(root, self._process, reporter=self.reporter).load(rel_path, template, partial=True).tree
        except (FileNotFoundError, CorruptCheckpointError) as error:
            if self._process.index == 0:
                self.reporter.note(f"the result is the last model, since the best one cannot be read: {error}")
            return None

    def _require_metric(self, metrics: Mapping[str, float]) -> None:
        """Note once where checkpoints do not have the metric for the best model."""
        name = self._document.output.checkpoint.metric_for_best_model
        if name is None or name in metrics or self._noted_missing_metric or self._process.index != 0:
            return
        self._noted_missing_metric = True
        has = ", ".join(sorted(metrics)) or "none yet"
        self.reporter.note(
            f"no checkpoint is the best: {name} (metric_for_best_model) is none of its metrics; it has {has}"
        )

    def _better(self, step: int, metrics: Mapping[str, float]) -> Best | None:
        checkpoint = self._document.output.checkpoint
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
