"""Saves models as checkpoints of the job, in the background and one at a time, and reads them back.

Training checkpoints are trees (weights, moments, accumulated gradients), sampler checkpoints what others load: a PEFT
adapter, a transformers checkpoint, or a delta to one.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch

from trainmaster.engine.adapter_files import read_adapter
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.model import Transformer
from trainmaster.engine.trained_model import WeightsSnapshot, weights_state
from trainmaster.engine.types import Blame, EngineError, Trained
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.checkpoint_saver import Saver
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import commit_beside, found_again
from trainmaster.jobs.trees import TreeError
from trainmaster.protocol.trainer_requests import TINKER
from trainmaster.trainer_service import checkpoint_names, export_files
from trainmaster.trainer_service.checkpoint_names import CheckpointKind, CheckpointLabel, CommittedCheckpoint
from trainmaster.trainer_service.models import LoadedModel, metadata
from trainmaster.trainer_service.schema import whole

MIN_TTL_S = 3600
"""As the public clients document it."""
MAX_TTL_S = 10 * 366 * 86400
LEFT_BEHIND_TTL_S = 7 * 86400
"""How long what was saved of a model is kept whose client fell silent: a laptop may sleep over a weekend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    label: CheckpointLabel
    step: int
    attributes: Mapping[str, Any]


Export = Callable[[Path], None]
"""Writes the weights that a sampler checkpoint holds, in another thread than the one that trains."""
Done = Callable[[CommittedCheckpoint | Exception], None]
"""Called by `poll` when a save has ended: with the checkpoint, or with what went wrong."""


class Saving:
    def __init__(self, reporter: Reporter, *, base_model: str) -> None:
        self._reporter = reporter
        self._base_model = base_model
        self._root = reporter.checkpoint_root()
        self.named = checkpoint_names.NamedCheckpoints(self._root)
        self._saver = Saver(self._root, reporter=reporter)
        self._exporter = ThreadPoolExecutor(1, thread_name_prefix="export")
        self._under_way: tuple[SavePlan, Callable[[], bool], Callable[[], CommittedCheckpoint], Done] | None = None

    @property
    def busy(self) -> bool:
        """Nothing can be saved or read meanwhile."""
        return self._under_way is not None

    def plan(
        self,
        model: LoadedModel,
        label: CheckpointLabel,
        fields: Mapping[str, Any],
        *,
        step: int,
        overwrite: bool,
        **attributes: Any,
    ) -> SavePlan:
        before = self.named.versions(label)
        if before and not overwrite:
            raise EngineError(
                f"there is a {label.kind} checkpoint {label.path!r} already: save under another name, or with overwrite"
            )
        ttl_s = whole(fields, "ttl_seconds", None, low=MIN_TTL_S, high=MAX_TTL_S)
        lora = model.lora
        said = {
            "model_id": model.model_id,
            "session_id": model.session_id,
            "door": model.door,
            "base_model": self._base_model,
            "is_lora": model.trained is Trained.ADAPTER,
            "lora_rank": lora.rank if lora else None,
            "lora_alpha": lora.alpha if lora else None,
            **{name: getattr(lora, name, None) for name in ("train_unembed", "train_mlp", "train_attn")},
            "user_metadata": dict(model.user_metadata) if (given := metadata(fields)) is None else given,
            **attributes,
        }
        if ttl_s is not None:
            said["expires_at"] = time.time() + ttl_s
        if before:
            # Those go when this one is committed.
            said["replaces"] = [manifest.checkpoint_id for path in before if (manifest := self._root.manifest(path))]
        return SavePlan(label=label, step=step, attributes=said)

    def begin_training(self, plan: SavePlan, tree: Any, done: Done) -> None:
        """When this returns, the tree may change."""
        self._require_idle()
        self._saver.save(
            tree,
            rel_path=self.named.new_place(plan.label),
            step=plan.step,
            kind=plan.label.kind,
            name=plan.label.name,
            attributes=plan.attributes,
        )

        def result() -> CommittedCheckpoint:
            saved = self._saver.wait()
            assert saved is not None
            return CommittedCheckpoint(root=self._root, rel_path=saved.rel_path, manifest=saved.manifest)

        self._under_way = (plan, lambda: not self._saver.busy, result, done)

    def begin_export(
        self, plan: SavePlan, export: Export, done: Done, *, base: CommittedCheckpoint | None = None
    ) -> None:
        """With a `base`, the checkpoint is a delta to it."""
        self._require_idle()
        manifest = replace(
            self._reporter.new_manifest(step=plan.step),
            kind=plan.label.kind,
            name=plan.label.name,
            attributes=dict(plan.attributes),
        )
        future: Future[CommittedCheckpoint] = self._exporter.submit(self._export, plan, manifest, export, base)
        self._under_way = (plan, future.done, future.result, done)

    def poll(self, *, wait: bool = False) -> None:
        """Finish a save that has ended; with `wait`, the one that is under way."""
        if self._under_way is None:
            return
        plan, finished, result, done = self._under_way
        if not wait and not finished():
            return
        self._under_way = None
        try:
            found = result()
        except Exception as error:
            done(error)
            return
        self._remove_replaced(plan, found)
        done(found)

    def find(self, path: object, source: str, kind: CheckpointKind) -> CommittedCheckpoint:
        """The checkpoint at `source`, or else the one of this job. Raises EngineError where there is none."""
        with _reading(str(path)):
            return self.named.open(source) if source else self.named.find(CheckpointLabel.read(path, kind))

    def read_tree(self, found: CommittedCheckpoint) -> Any:
        """Raises EngineError where it cannot be read, or is not what was committed."""
        with _reading(found.where), Saver(found.root, reporter=self._reporter) as saver:
            return saver.load(found.rel_path).tree

    @contextlib.contextmanager
    def exported(self, found: CommittedCheckpoint) -> Iterator[Path]:
        """The files of a sampler checkpoint, of a delta, too. Raises EngineError where they cannot be read."""
        with contextlib.ExitStack() as scope:
            with _reading(found.where):
                directory = scope.enter_context(found.root.fetch(found.rel_path))
                if (directory / export_files.DELTA_INDEX).is_file():
                    noted = export_files.base_of_delta(directory)["where"]
                    base = self.named.open(found_again(self._root, noted, self._reporter.job_id()))
                    whole_base = scope.enter_context(base.root.fetch(base.rel_path))
                    target = Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="trainmaster-export-")))
                    export_files.apply_delta(directory, whole_base, target)
                    directory = target
            yield directory

    def close(self) -> None:
        self.poll(wait=True)
        self._exporter.shutdown()
        self._saver.close()

    def _export(
        self, plan: SavePlan, manifest: Manifest, export: Export, base: CommittedCheckpoint | None
    ) -> CommittedCheckpoint:
        place = self.named.new_place(plan.label)
        began = time.monotonic()
        drafted = self._root.draft(place, job_id=manifest.job_id, attempt=manifest.attempt)
        with self._reporter.saving(), drafted as draft:
            if base is None:
                export(draft)
            else:
                self._export_delta(draft, export, base)
            check = self._reporter.require_ownership
            rel_path, committed = commit_beside(self._root, draft, place, manifest, check_owner=check)
        found = CommittedCheckpoint(root=self._root, rel_path=rel_path, manifest=committed)
        self._reporter.committed(committed, found.where, took_s=time.monotonic() - began)
        return found

    def _export_delta(self, draft: Path, export: Export, base: CommittedCheckpoint) -> None:
        whole_export = draft / "whole"
        whole_export.mkdir()
        export(whole_export)
        of = {"checkpoint_id": base.manifest.checkpoint_id, "name": base.manifest.name, "where": base.where}
        with base.root.fetch(base.rel_path, verify=False) as directory:
            export_files.write_delta(whole_export, directory, draft, of=of)
        rmtree(whole_export)

    def _remove_replaced(self, plan: SavePlan, found: CommittedCheckpoint) -> None:
        for rel_path in self.named.versions(plan.label):
            if rel_path == found.rel_path:
                break
            try:
                self._root.remove(rel_path)
            except OSError as error:
                self._reporter.note(f"the checkpoint {rel_path}, which was replaced, could not be removed: {error}")

    def _require_idle(self) -> None:
        if self.busy:
            raise RuntimeError("a save is under way already")


def interrupted_name(model: LoadedModel, step: int) -> str:
    """The name of a save that nobody named: a DNS label, valid for either door."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in model.model_id.lower() if letter.isascii())
    end = f"-step-{step}"
    return f"{stem[-(63 - len(end)) :].strip('-')}{end}"


def label_for(kind: CheckpointKind, model: LoadedModel, name: object) -> CheckpointLabel:
    return CheckpointLabel.of(kind, name, model_id=model.model_id, door=model.door)


def may_replace(model: LoadedModel, fields: Mapping[str, Any]) -> bool:
    """Clients of the Fireworks door always may."""
    return bool(fields.get("overwrite")) or model.door != TINKER


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise EngineError(f"{what}: there is no such checkpoint any more") from error
    except (CorruptCheckpointError, export_files.DeltaError) as error:
        raise EngineError(f"{what} is damaged: {error}", Blame.SERVER) from error
    except TreeError as error:
        raise EngineError(f"{what} is no training checkpoint: {error}") from error


# Exported weights, read back: a PEFT adapter, or a transformers checkpoint.


def is_adapter(directory: Path) -> bool:
    return (directory / "adapter_config.json").is_file()


def exported_snapshot(engine: Engine, directory: Path) -> WeightsSnapshot:
    """Raises EngineError where it is of another base model, or cannot be read."""
    if is_adapter(directory):
        adapter = read_adapter(engine.config, directory)
        return engine.snapshot_from(weights_state(Trained.ADAPTER, adapter.options, dict(adapter.named_parameters())))
    like = engine.base.unembedding.weight
    return WeightsSnapshot(transformer=_transformer(directory, like.device, like.dtype))


def load_export(engine: Engine, model_id: str, directory: Path) -> None:
    """Raises EngineError where it is not of such a model, or cannot be read."""
    if is_adapter(directory):
        engine.load_adapter(model_id, directory)
    else:
        whole = _transformer(directory, torch.device("cpu"), engine.base.unembedding.weight.dtype)
        weights = dict(whole.named_parameters())
        engine.load_state(model_id, weights_state(Trained.ALL, None, weights), optimizer=False)


def _transformer(directory: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    # An adapter of the unembedding parts it from the embedding: the configuration may be another than the base's.
    return Transformer(ModelConfig.read(directory)).load(directory, device, dtype)
