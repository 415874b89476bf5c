"""The operations on models: create, run forward and backward, step, save, load, unload."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmaster.engine.engine import Engine
from trainmaster.engine.trained_model import SKIPPED
from trainmaster.engine.types import Blame, EngineError, Pass, PassResult, Trained
from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.trainer_service import checkpoint_names, export_files
from trainmaster.trainer_service.checkpoint_names import CheckpointKind, CheckpointLabel, CommittedCheckpoint
from trainmaster.trainer_service.configuration import Configuration
from trainmaster.trainer_service.messages import Reply, Request
from trainmaster.trainer_service.model_checkpoints import (
    LEFT_BEHIND_TTL_S,
    Done,
    Saving,
    interrupted_name,
    label_for,
    load_export,
    may_replace,
)
from trainmaster.trainer_service.models import (
    LoadedModel,
    LoadedModels,
    adam_options,
    choice,
    decision_calibration,
    flag,
)
from trainmaster.trainer_service.reports import Gauges, reply_to_failure
from trainmaster.trainer_service.sampling import SamplingSessions
from trainmaster.trainer_service.wire import decode_pass, encode_pass_result

PASSES = frozenset({"forward", "forward_backward"})
"""What runs together with that of other models."""
_STORED = frozenset(
    {"save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "load_adapter", "leave_model"}
)
"""What waits for a save that is under way."""
CHECKPOINT_TYPES = ("base", "delta", "merged_base")
DECISION = "decision.json"
"""In a sampler checkpoint: the temperatures that its user found for decisions, which whoever serves it applies."""


@dataclass(eq=False)
class ModelOperations:
    _configuration: Configuration
    _engine: Engine
    _saving: Saving
    _sampling: SamplingSessions
    _gauges: Gauges
    _reply: Callable[[Reply], None]

    def __post_init__(self) -> None:
        self.models = LoadedModels(self._configuration, self._engine)

    def must_wait(self, request: Request) -> bool:
        return request.op in _STORED and self._saving.busy

    def perform(self, request: Request) -> None:
        """A save is answered when it is committed. Raises FatalError where nothing can be done any more."""
        try:
            reply = _OPERATIONS[request.op](self, request)
        except Exception as error:
            reply = reply_to_failure(request.request_id, error)
        if reply is not None:
            self._reply(reply)

    def run(self, requests: Sequence[Request]) -> None:
        """Run passes of different models together. Raises FatalError where nothing can be done any more."""
        asked: list[tuple[Request, Pass]] = []
        for request in requests:
            try:
                asked.append((request, self._pass(request)))
            except Exception as error:
                self._reply(reply_to_failure(request.request_id, error))
        if not asked:
            return
        try:
            with _changing(*(self.models.get(each.model_id) for _, each in asked if each.backward)):
                results = self._engine.run([each for _, each in asked])
                replies = [
                    self._answered(request, each, result)
                    for (request, each), result in zip(asked, results, strict=True)
                ]
        except Exception as error:
            replies = [reply_to_failure(request.request_id, error) for request, _ in asked]
        for reply in replies:
            self._reply(reply)

    def save_all(self) -> list[CommittedCheckpoint]:
        saved: list[CommittedCheckpoint] = []
        self._saving.poll(wait=True)
        for model in self.models:
            if model.trained is Trained.NOTHING or self._configuration.mode is ModelMode.FORWARD_ONLY:
                continue

            def done(outcome: CommittedCheckpoint | Exception, model: LoadedModel = model) -> None:
                if isinstance(outcome, Exception):
                    self._gauges.note(f"{model.model_id} could not be saved: {outcome}")
                else:
                    saved.append(outcome)

            try:
                _sound(self.models.get(model.model_id))
                self._begin_save(model, self._label(model), {}, done, overwrite=True)
            except Exception as error:
                done(error)
                continue
            self._saving.poll(wait=True)
        return saved

    def _pass(self, request: Request) -> Pass:
        _sound(self.models.get(request.model_id))
        asked = decode_pass(request.body or b"", request.content_type, request.encoding)
        if asked.backward and request.op == "forward_backward":
            self.models.require_trained(request.model_id)
        return replace(asked, model_id=request.model_id, backward=asked.backward and request.op == "forward_backward")

    def _answered(self, request: Request, ran: Pass, result: PassResult | EngineError) -> Reply:
        if isinstance(result, EngineError):
            return reply_to_failure(request.request_id, result)
        self._gauges.ran(ran, result)
        return Reply(request_id=request.request_id, body=encode_pass_result(result))

    def _create_model(self, request: Request) -> Reply:
        model = self.models.create(request.model_id, request.fields, door=request.door)
        info = {
            "base_model": self._configuration.base_model,
            "tokenizer_id": self._configuration.base_model,
            "is_lora": model.trained is Trained.ADAPTER,
            "lora_rank": model.lora.rank if model.lora else None,
        }
        # Clients of the Fireworks door send this loss only where it is announced.
        fields = {"model_id": model.model_id, "type": "create_model", "supports_reinforce": True}
        return Reply(request_id=request.request_id, fields=fields, info=info)

    def _unload_model(self, request: Request) -> Reply:
        self.models.unload(request.model_id)
        return _done(request, model_id=request.model_id)

    def _leave_model(self, request: Request) -> Reply | None:
        """Unload a model whose client is gone, once it is saved; if it cannot be saved, it stays."""
        model_id = request.model_id
        model = next((each for each in self.models if each.model_id == model_id), None)
        if model is None or model_id not in self._engine.models or not model.unsaved:
            return self._unload_model(request)

        def done(outcome: CommittedCheckpoint | Exception) -> None:
            if isinstance(outcome, Exception):
                self._gauges.note(f"{model_id}, whose client is gone, could not be saved, and stays: {outcome}")
            else:
                self.models.unload(model_id)
            self._answer_save(request, outcome)

        try:
            label = self._label(model)
            # What its client had saved under this name was to stay, and so is what comes in its place.
            fields = {} if self._saving.named.versions(label) else {"ttl_seconds": LEFT_BEHIND_TTL_S}
            self._begin_save(model, label, fields, done, overwrite=True)
        except Exception as error:
            done(error)
        return None

    def _optim_step(self, request: Request) -> Reply:
        model = _sound(self.models.require_trained(request.model_id))
        options = adam_options(request.fields, learning_rate=self._configuration.learning_rate)
        before = self.models.steps(model.model_id)
        with _changing(model):
            metrics = self._engine.optim_step(model.model_id, options)
        if SKIPPED in metrics:
            model.changes -= 1  # nothing changed that would have to be saved
        self._gauges.stepped(self.models.steps(model.model_id) - before)
        return _done(request, metrics=metrics)

    def _save_weights(self, request: Request) -> None:
        model = _sound(self.models.require_trained(request.model_id))
        self._begin_save(
            model,
            self._label(model, request.fields.get("path")),
            request.fields,
            lambda outcome: self._answer_save(request, outcome),
            overwrite=may_replace(model, request.fields),
        )

    def _label(self, model: LoadedModel, name: object = None) -> CheckpointLabel:
        if name is None:
            name = interrupted_name(model, self.models.steps(model.model_id))
        return label_for(CheckpointKind.TRAINING, model, name)

    def _begin_save(
        self, model: LoadedModel, label: CheckpointLabel, fields: Mapping[str, Any], done: Done, *, overwrite: bool
    ) -> None:
        step, changes = self.models.steps(model.model_id), model.changes
        plan = self._saving.plan(model, label, fields, step=step, overwrite=overwrite)

        def ended(outcome: CommittedCheckpoint | Exception) -> None:
            if not isinstance(outcome, Exception):
                model.saved_path, model.saved_changes = label.path, changes
            done(outcome)

        self._saving.begin_training(plan, self._engine.state(model.model_id), ended)

    def _save_weights_for_sampler(self, request: Request) -> Reply | None:
        model = _sound(self.models.get(request.model_id))
        fields = request.fields
        if fields.get("path") is None:
            session_id = fields.get("sampling_session_id")
            if not isinstance(session_id, str):
                raise EngineError("a path to save under is wanted, or a sampling_session_seq_id")
            self._sampling.open(session_id, self._engine.snapshot(model.model_id))
            return _done(request, sampling_session_id=session_id, path=None)
        if model.trained is Trained.NOTHING:
            raise EngineError(f"{model.model_id} is the base model itself (base_only): there is nothing to save of it")
        asked = choice(fields, "checkpoint_type", "base", CHECKPOINT_TYPES)
        precision = fields.get("export_precision") or "source"
        if precision != "source":
            raise EngineError(f"export_precision: {precision!r} is not supported; weights are written as they are")
        merged = asked == "merged_base" and model.trained is Trained.ADAPTER
        step = self.models.steps(model.model_id)
        if merged and not (step or model.loaded):
            raise EngineError("merged_base: nothing was trained or loaded yet, so that this would be the base model")
        # An adapter is a difference already.
        kind = "delta" if asked == "delta" and model.trained is Trained.ALL else "merged" if merged else "base"
        base = self._base_of_delta(model) if kind == "delta" else None
        label = label_for(CheckpointKind.SAMPLER, model, fields["path"])
        calibration = decision_calibration(fields)
        about = {"sampler_kind": kind, **({"base_checkpoint": base.manifest.checkpoint_id} if base else {})}
        plan = self._saving.plan(model, label, fields, step=step, overwrite=may_replace(model, fields), **about)
        snapshot = self._engine.snapshot(model.model_id)

        def done(outcome: CommittedCheckpoint | Exception) -> None:
            if not isinstance(outcome, Exception) and kind == "base" and model.trained is Trained.ALL:
                model.whole_export = outcome.where
            self._answer_save(request, outcome)

        def export(directory: Path) -> None:
            self._engine.export(snapshot, directory, merged=merged or snapshot.adapter is None)
            if calibration is not None:
                (directory / DECISION).write_text(json.dumps(calibration, indent=1))

        self._saving.begin_export(plan, export, done, base=base)
        return None

    def _save_weights_external(self, request: Request) -> None:
        model = _sound(self.models.get(request.model_id))
        if model.trained is Trained.NOTHING:
            raise EngineError(f"{model.model_id} is the base model itself (base_only): there is nothing to save of it")
        fields = request.fields
        recipients = export_files.read_recipients(fields.get("age_encryption_recipients"))
        label = label_for(CheckpointKind.EXTERNAL, model, fields.get("path"))
        step = self.models.steps(model.model_id)
        plan = self._saving.plan(model, label, fields, step=step, overwrite=False)
        snapshot = self._engine.snapshot(model.model_id)

        def export(directory: Path) -> None:
            self._engine.export(snapshot, directory, merged=snapshot.adapter is None, tinker_names=True)
            if recipients:
                export_files.encrypt_directory(directory, recipients)

        self._saving.begin_export(plan, export, lambda outcome: self._answer_save(request, outcome))

    def _base_of_delta(self, model: LoadedModel) -> CommittedCheckpoint:
        if model.whole_export is None:
            raise EngineError("checkpoint_type: a delta needs a base before it: save one with checkpoint_type base")
        return self._saving.named.open(model.whole_export)

    def _load_weights(self, request: Request) -> Reply:
        path = request.fields.get("path")
        self._load(request, path, CheckpointKind.TRAINING, optimizer=flag(request.fields, "optimizer", default=False))
        return _done(request, path=path, model_id=request.model_id)

    def _load_adapter(self, request: Request) -> Reply:
        path = request.fields.get("adapter_path")
        self._load(request, path, CheckpointKind.SAMPLER, optimizer=False)
        return _done(request, model_id=request.model_id, adapter_path=path)

    def _create_sampling_session(self, request: Request) -> Reply:
        return Reply(request_id=request.request_id, fields=self._sampling.create(request))

    def _load(self, request: Request, path: object, kind: CheckpointKind, *, optimizer: bool) -> None:
        model = self.models.get(request.model_id)
        if model.trained is Trained.NOTHING:
            raise EngineError(f"{model.model_id} is the base model itself (base_only), and takes no other weights")
        found = self._saving.find(path, request.source, kind)
        said = found.manifest.attributes
        if (base_model := said.get("base_model")) and base_model not in self._configuration.names:
            raise EngineError(
                f"{path} was trained from {base_model}; this trainer holds {self._configuration.base_model}"
            )
        if found.manifest.kind != CheckpointKind.TRAINING:
            if optimizer:
                raise EngineError(f"{path} was saved without an optimizer: load its weights alone")
            with self._saving.exported(found) as directory, _changing(model):
                load_export(self._engine, model.model_id, directory)
        else:
            tree = self._saving.read_tree(found)
            with _changing(model):
                self._engine.load_state(model.model_id, tree, optimizer=optimizer)
        model.loaded, model.broken = True, None

    def _answer_save(self, request: Request, outcome: CommittedCheckpoint | Exception) -> None:
        if isinstance(outcome, Exception):
            self._reply(reply_to_failure(request.request_id, outcome))
        else:
            about = checkpoint_names.description(outcome.manifest)
            self._reply(_done(request, about, path=about["path"]))


_OPERATIONS: Mapping[str, Callable[[ModelOperations, Request], Reply | None]] = {
    "create_model": ModelOperations._create_model,
    "unload_model": ModelOperations._unload_model,
    "leave_model": ModelOperations._leave_model,
    "optim_step": ModelOperations._optim_step,
    "save_weights": ModelOperations._save_weights,
    "save_weights_for_sampler": ModelOperations._save_weights_for_sampler,
    "save_weights_external": ModelOperations._save_weights_external,
    "load_weights": ModelOperations._load_weights,
    "load_adapter": ModelOperations._load_adapter,
    "create_sampling_session": ModelOperations._create_sampling_session,
}


def _done(request: Request, info: Mapping[str, Any] | None = None, /, **fields: Any) -> Reply:
    return Reply(request_id=request.request_id, fields={**fields, "type": request.op}, info=info)


@contextlib.contextmanager
def _changing(*models: LoadedModel) -> Iterator[None]:
    """Mark models as broken when an operation on them fails half-way."""
    for model in models:
        model.changes += 1
    try:
        yield
    except Exception as error:
        if not isinstance(error, EngineError) or error.blame is not Blame.USER:
            for model in models:
                model.broken = f"{type(error).__name__}: {error}"
        raise


def _sound(model: LoadedModel) -> LoadedModel:
    if model.broken:
        last = f"; it was saved last as {model.saved_path}" if model.saved_path else ""
        raise EngineError(
            f"an earlier operation on {model.model_id} failed half-way ({model.broken}): load saved weights{last}",
            Blame.SERVER,
        )
    return model
