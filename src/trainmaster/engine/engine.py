"""The engine: a base model, the models that are trained on it, and the commands that train them.

It is for one thread. Where several ranks work together, rank 0 is given the commands and the others follow it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainmaster.engine import losses
from trainmaster.engine.adapters import Adapter
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.export import export_adapter, export_model, read_adapter
from trainmaster.engine.model import Transformer
from trainmaster.engine.parallel import OneRank, Ranks, as_engine_error, command
from trainmaster.engine.passes import CheckedPass, Chunk, Computed, Part, check_pass, compute, cut, pack, share
from trainmaster.engine.trained_model import Snapshot, State, TrainedModel, check_shapes, weights_state
from trainmaster.engine.types import AdamOptions, EngineError, LoraOptions, Pass, PassResult, Trained

PACK_TOKENS = 8192
"""Tokens that are computed together: enough to keep a GPU busy, few enough that what a backward pass needs has room."""


class Engine:
    """Trains models on one base model.

    Args:
        model_dir: A transformers checkpoint.
        device: Where to compute.
        dtype: Of the base model's weights. Adapters, moments and gradients are float32.
        max_context_length: Of a sequence; None: what the model was made for.
        process: The ranks that work together; None: this one alone.
        pack_tokens: How many tokens are computed together.
        gradient_accumulation_steps: How many calls of `optim_step` make one step.

    Raises:
        EngineError: the checkpoint cannot be used, or not so.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_context_length: int | None = None,
        process: Ranks | None = None,
        pack_tokens: int = PACK_TOKENS,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        self.model_dir = Path(model_dir)
        self.config = ModelConfig.read(self.model_dir)
        if max_context_length is not None and not 0 < max_context_length <= self.config.max_positions:
            raise EngineError(
                f"max_context_length is {max_context_length}; the model was made for 1 to {self.config.max_positions}"
            )
        if gradient_accumulation_steps < 1:
            raise EngineError(f"gradient_accumulation_steps is {gradient_accumulation_steps}; it has to be 1 or more")
        self.max_context_length = max_context_length or self.config.max_positions
        self.base = Transformer(self.config).load(self.model_dir, torch.device(device), dtype)
        self.ranks: Ranks = process or OneRank()
        self._pack_tokens = pack_tokens
        self._steps_in_one = gradient_accumulation_steps
        self._models: dict[str, TrainedModel] = {}

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        """By id."""
        return self._models

    @command
    def create_model(self, model_id: str, trained: Trained, lora: LoraOptions | None = None) -> None:
        """Make a model that begins as the base model.

        Raises:
            EngineError: there is one of that id, or there cannot be such a one.
        """
        if model_id in self._models:
            raise EngineError(f"there is a model {model_id!r} already")
        self._models[model_id] = TrainedModel(model_id, self.base, trained, lora)

    @command
    def unload(self, model_id: str) -> None:
        """Forget a model."""
        del self._models[self._model(model_id).model_id]

    @command
    def run(self, passes: Sequence[Pass]) -> list[PassResult | EngineError]:
        """Compute passes, those of different models together; those of one model in order.

        Returns:
            For each pass its result, or why there is none. One that failed added nothing to any gradients, and no other
            failed with it.
        """
        checked = [self._check(each) for each in passes]
        own = {n: _own_part(each, self.ranks) for n, each in enumerate(checked) if isinstance(each, CheckedPass)}
        computed = self._compute(own)
        told = {n: Outcome(each.failure, each.outputs, each.metrics) for n, each in computed.items()}
        by_rank = self.ranks.exchange("the outcomes", told)
        return [
            each if isinstance(each, EngineError) else _ended(own[n], computed[n], [rank[n] for rank in by_rank])
            for n, each in enumerate(checked)
        ]

    @command
    def optim_step(self, model_id: str, options: AdamOptions) -> dict[str, float]:
        """Step by the gradients of all passes since the last step, and forget them; without any, do nothing.

        Returns:
            The metrics that were asked for; `models.SKIPPED` is among them when there were no gradients.

        Raises:
            EngineError: the gradients or the options are no good.
        """
        return self._model(model_id).step(options, self.ranks, self._steps_in_one)

    @command
    def state(self, model_id: str) -> dict[str, Any]:
        """All that a model's training goes on from: write or copy it before the next command, it is not a copy."""
        return self._model(model_id).state(self.ranks)

    @command
    def load_state(self, model_id: str, state: State, *, optimizer: bool) -> None:
        """Let a model go on from a state; without the optimizer, from its weights alone.

        Raises:
            EngineError: the state is not one of such a model, which then is as it was.
        """
        self._model(model_id).load_state(state, self.ranks, optimizer=optimizer)

    @command
    def load_adapter(self, model_id: str, directory: Path) -> None:
        """Let a model begin with the weights of a PEFT adapter, of the same rank and beside the same layers.

        Raises:
            EngineError: there is none, or not one for this model.
        """
        model = self._model(model_id)
        adapter = read_adapter(self.config, Path(directory))
        weights = dict(adapter.named_parameters())
        model.load_state(weights_state(Trained.ADAPTER, adapter.options, weights), self.ranks, optimizer=False)

    def snapshot(self, model_id: str | None) -> Snapshot:
        """A model's weights as they are now; None: the base model's."""
        return Snapshot(transformer=self.base) if model_id is None else self._model(model_id).snapshot()

    def snapshot_state(self, snapshot: Snapshot) -> dict[str, Any]:
        """A snapshot as a tree, from which `snapshot_from` makes it again; its tensors are the snapshot's own."""
        if snapshot.adapter is not None:
            weights = {name: each.detach() for name, each in snapshot.adapter.named_parameters()}
            return weights_state(Trained.ADAPTER, snapshot.adapter.options, weights)
        if snapshot.transformer is self.base:
            return weights_state(Trained.NOTHING, None, {})
        return weights_state(Trained.ALL, None, dict(snapshot.transformer.named_parameters()))

    def snapshot_from(self, state: State) -> Snapshot:
        """The weights of a state.

        Raises:
            EngineError: it is of another base model.
        """
        weights = state["weights"]
        if state["trained"] == Trained.NOTHING:
            return Snapshot(transformer=self.base)
        if state["trained"] == Trained.ADAPTER:
            adapter = Adapter(self.config, LoraOptions(**state["lora"]), device=self.base.unembedding.weight.device)
            check_shapes(dict(adapter.named_parameters()), weights)
            adapter.load(weights)
            return Snapshot(transformer=self.base, adapter=adapter.copy())
        check_shapes(dict(self.base.named_parameters()), weights)
        transformer = copy.deepcopy(self.base)
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                parameter.copy_(weights[name])
        return Snapshot(transformer=transformer)

    def export(self, snapshot: Snapshot, directory: Path, *, merged: bool, tinker_names: bool = False) -> None:
        """Write a snapshot for others: a PEFT adapter, or a transformers checkpoint that needs none.

        With `tinker_names`, an adapter of a tied model calls the unembedding as Tinker's tools do.

        Raises:
            EngineError: there is no adapter to write.
        """
        if merged:
            trained = snapshot.transformer is not self.base
            export_model(snapshot, self.model_dir, Path(directory), trained=trained)
        else:
            export_adapter(snapshot, self.model_dir, Path(directory), tinker_names=tinker_names)

    def drop(self, model_id: object) -> bool:
        """Forget a model in this rank, if there is one: it can be trusted no more."""
        return isinstance(model_id, str) and self._models.pop(model_id, None) is not None

    def _model(self, model_id: str) -> TrainedModel:
        if model := self._models.get(model_id):
            return model
        raise EngineError(f"there is no model {model_id!r}")

    def _check(self, request: Pass) -> CheckedPass | EngineError:
        try:
            model = self._model(request.model_id)
            return check_pass(request, model, vocabulary=self.config.vocab_size, context=self.max_context_length)
        except EngineError as error:
            return error

    def _compute(self, passes: Mapping[int, CheckedPass]) -> dict[int, Computed]:
        """All chunks of all passes."""
        computed = {n: Computed() for n in passes}
        chunks = [
            Chunk(number=n, of=each, data=data)
            for n, each in passes.items()
            if each.inputs
            for data in cut(each.lengths, each.widths, self._pack_tokens)
        ]
        for together in pack(chunks, self._pack_tokens):
            wanted = [chunk for chunk in together if computed[chunk.number].failure is None]
            for chunk, part in zip(wanted, _parts(wanted), strict=True):
                computed[chunk.number].add(part)
        return computed


class Outcome(NamedTuple):
    """What ranks tell each other of a pass."""

    failure: EngineError | None
    outputs: list[dict[str, np.ndarray]]
    metrics: list[tuple[int, dict[str, float]]]


def _own_part(checked: CheckedPass, ranks: Ranks) -> CheckedPass:
    """What of a pass this rank computes."""
    own = share(checked.lengths, ranks.size)[ranks.rank]
    data = checked.request.data[own.start : own.stop]
    return replace(checked, request=replace(checked.request, data=data), inputs=checked.inputs[own.start : own.stop])


def _ended(own: CheckedPass, computed: Computed, outcomes: Sequence[Outcome]) -> PassResult | EngineError:
    """The result of a pass of all ranks; its gradients are added now that no rank can fail any more."""
    for outcome in outcomes:
        if outcome.failure is not None:
            return outcome.failure
    if computed.gradients:
        loss_tokens = sum(losses.count_loss_tokens(inputs) for inputs in own.inputs)
        own.model.gradients.add(computed.gradients, loss_tokens, len(own.inputs))
    return PassResult(
        outputs=tuple(output for outcome in outcomes for output in outcome.outputs),
        metrics=losses.merge([metrics for outcome in outcomes for metrics in outcome.metrics]),
    )


def _parts(chunks: Sequence[Chunk]) -> list[Part | EngineError]:
    """Of a pack; if it fails, of each chunk alone, to see whose fault it is."""
    if not chunks:
        return []
    recompute = False
    try:
        return compute(chunks)
    except torch.OutOfMemoryError:
        recompute = True
    except Exception as error:
        if len(chunks) == 1:
            return [_failed(chunks[0], error)]
    # Not while the error is handled: it would keep what the failed pack computed in memory.
    return [_part_alone(chunk, recompute=recompute) for chunk in chunks]


def _part_alone(chunk: Chunk, *, recompute: bool) -> Part | EngineError:
    _forget_gradients(chunk)
    try:
        return compute([chunk], recompute=recompute)[0]
    except Exception as error:
        return _failed(chunk, error)


def _failed(chunk: Chunk, error: Exception) -> EngineError:
    _forget_gradients(chunk)
    return as_engine_error(error)


def _forget_gradients(chunk: Chunk) -> None:
    """What a backward pass that failed may have left."""
    for parameter in chunk.of.model.parameters.values():
        parameter.grad = None
