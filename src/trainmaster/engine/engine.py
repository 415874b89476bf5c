"""The engine, for one thread: a base model, the models that are trained on it, and the commands that train them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainmaster.engine import losses
from trainmaster.engine.adapter_files import export_adapter, read_adapter
from trainmaster.engine.adapters import Adapter, check_shapes
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.factor_stacks import FactorStacks
from trainmaster.engine.memory import check_memory, free_bytes
from trainmaster.engine.model import Transformer
from trainmaster.engine.packs import Launched, compute
from trainmaster.engine.parallel import Ranks, as_engine_error, command
from trainmaster.engine.passes import CheckedPass, Chunk, ChunkResult, Computed, check_pass, cut, pack, share
from trainmaster.engine.quantized import check_fp8
from trainmaster.engine.trained_model import ANOTHER_MODEL, State, TrainedModel, WeightsSnapshot, weights_state
from trainmaster.engine.types import AdamOptions, EngineError, LoraOptions, Pass, PassResult, Trained
from trainmaster.engine.weight_files import export_model

PACK_TOKENS = 8192
"""Tokens that are computed together: enough to keep a GPU busy, few enough for the memory of a backward pass."""


class Engine:
    """Trains models on one base model, whose weights have the `dtype`; adapters, moments and gradients are float32.

    `fp8`: the base model's linear layers have weights of 8 bits instead, for adapters and for sampling alike. On a GPU,
    `dtype` has to be bfloat16 then. `max_context_length` None: the model's own limit. `gradient_accumulation_steps`
    calls of `optim_step` are one step.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fp8: bool = False,
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
        if fp8:
            check_fp8(torch.device(device), dtype)
        self.base = Transformer(self.config).load(self.model_dir, torch.device(device), dtype, fp8=fp8)
        self.ranks = process or Ranks()
        self._pack_tokens = pack_tokens
        self._steps_in_one = gradient_accumulation_steps
        self._models: dict[str, TrainedModel] = {}
        self._stacks = FactorStacks()

    @property
    def models(self) -> Mapping[str, TrainedModel]:
        return self._models

    @command
    def create_model(self, model_id: str, trained: Trained, lora: LoraOptions | None = None) -> None:
        if model_id in self._models:
            raise EngineError(f"there is a model {model_id!r} already")
        if trained is Trained.ALL:
            self._require_whole_weights()
        self._models[model_id] = TrainedModel(model_id, self.base, trained, lora)

    @command
    def unload(self, model_id: str) -> None:
        del self._models[self._model(model_id).model_id]
        self._stacks.clear()

    @command
    def run(self, passes: Sequence[Pass]) -> list[PassResult | EngineError]:
        """Compute passes: of models together, of one in order. A failed one adds no gradients and fails no other."""
        checked = [self._check(each) for each in passes]
        own = {n: _own_part(each, self.ranks) for n, each in enumerate(checked) if isinstance(each, CheckedPass)}
        computed = self._compute(own)
        by_rank = self.ranks.exchange("the outcomes", {n: replace(each, gradients={}) for n, each in computed.items()})
        return [
            each if isinstance(each, EngineError) else _ended(own[n], computed[n], [rank[n] for rank in by_rank])
            for n, each in enumerate(checked)
        ]

    @command
    def optim_step(self, model_id: str, options: AdamOptions) -> dict[str, float]:
        """Step by the gradients since the last step, and clear them; without any, the metrics have `SKIPPED`."""
        return self._model(model_id).step(options, self.ranks, self._steps_in_one)

    @command
    def state(self, model_id: str) -> dict[str, Any]:
        """All that a model's training continues from. Not a copy: write or copy it before the next command."""
        return self._model(model_id).state(self.ranks)

    @command
    def load_state(self, model_id: str, state: State, *, optimizer: bool) -> None:
        """Continue from a state; without the optimizer, from its weights alone. On an error the model is unchanged."""
        self._model(model_id).load_state(state, self.ranks, optimizer=optimizer)

    @command
    def load_adapter(self, model_id: str, directory: Path) -> None:
        """Load the weights of a PEFT adapter, of the same rank and for the same layers."""
        model = self._model(model_id)
        adapter = read_adapter(self.config, Path(directory))
        weights = dict(adapter.named_parameters())
        model.load_state(weights_state(Trained.ADAPTER, adapter.options, weights), self.ranks, optimizer=False)

    def snapshot(self, model_id: str | None) -> WeightsSnapshot:
        """A model's weights as they are now; None: the base model's."""
        return WeightsSnapshot(transformer=self.base) if model_id is None else self._model(model_id).snapshot()

    def snapshot_from(self, state: State) -> WeightsSnapshot:
        weights = state["weights"]
        if state["trained"] == Trained.NOTHING:
            return WeightsSnapshot(transformer=self.base)
        if state["trained"] == Trained.ADAPTER:
            adapter = Adapter(self.config, LoraOptions(**state["lora"]), device=self.base.device)
            check_shapes(ANOTHER_MODEL, dict(adapter.named_parameters()), weights)
            adapter.load(weights)
            return WeightsSnapshot(transformer=self.base, adapter=adapter.copy())
        self._require_whole_weights()
        check_shapes(ANOTHER_MODEL, dict(self.base.named_parameters()), weights)
        transformer = copy.deepcopy(self.base)
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                parameter.copy_(weights[name])
        return WeightsSnapshot(transformer=transformer)

    def export(self, snapshot: WeightsSnapshot, directory: Path, *, merged: bool, tinker_names: bool = False) -> None:
        """Write a snapshot as a PEFT adapter (`tinker_names`: for Tinker's tools), or merged as a checkpoint."""
        transformer, adapter = snapshot.transformer, snapshot.adapter
        if merged:
            trained = transformer is not self.base
            export_model(transformer, self.config, adapter, self.model_dir, Path(directory), trained=trained)
        elif adapter is None:
            raise EngineError("these weights have no adapter: export them merged, as a model")
        else:
            export_adapter(adapter, self.model_dir, Path(directory), tinker_names=tinker_names)

    def drop(self, model_id: object) -> bool:
        """Remove a model in this rank, if there is one: its state can no longer be trusted."""
        self._stacks.clear()
        return isinstance(model_id, str) and self._models.pop(model_id, None) is not None

    def _require_whole_weights(self) -> None:
        if self.base.is_quantized:
            raise EngineError(
                "the service holds its base model in fp8, which is never trained: train an adapter, or start the "
                "service with precision bfloat16"
            )

    def _model(self, model_id: str) -> TrainedModel:
        if model := self._models.get(model_id):
            return model
        raise EngineError(f"there is no model {model_id!r}")

    def _check(self, request: Pass) -> CheckedPass | EngineError:
        try:
            model = self._model(request.model_id)
            checked = check_pass(request, model, vocabulary=self.config.vocab_size, context=self.max_context_length)
            if request.backward and self.base.device.type == "cuda":
                check_memory(checked, free_bytes(self.base.device))
            return checked
        except EngineError as error:
            return error

    def _compute(self, passes: Mapping[int, CheckedPass]) -> dict[int, Computed]:
        computed = {n: Computed() for n in passes}
        chunks = [
            Chunk(number=n, of=each, data=data)
            for n, each in passes.items()
            if each.inputs
            for data in cut(each.lengths, each.widths, self._pack_tokens)
        ]
        waiting: _Started | None = None
        for together in pack(chunks, self._pack_tokens):
            if wanted := [chunk for chunk in together if computed[chunk.number].failure is None]:
                started = _Started(wanted, self._stacks)
                # A GPU has the next pack before the host looks at what came of the last one.
                if waiting is not None:
                    waiting.end(computed)
                waiting = started if started.may_wait else None
                if waiting is None:
                    started.end(computed)
        if waiting is not None:
            waiting.end(computed)
        return computed


def _own_part(checked: CheckedPass, ranks: Ranks) -> CheckedPass:
    own = share(checked.lengths, ranks.size)[ranks.rank]
    data = checked.request.data[own.start : own.stop]
    return replace(checked, request=replace(checked.request, data=data), inputs=checked.inputs[own.start : own.stop])


def _ended(own: CheckedPass, computed: Computed, outcomes: Sequence[Computed]) -> PassResult | EngineError:
    """The result of a pass, from the outcomes of all ranks. Gradients are added only now that no rank can fail."""
    for outcome in outcomes:
        if outcome.failure is not None:
            return outcome.failure
    if computed.gradients:
        loss_tokens = sum(losses.count_loss_tokens(own.loss, inputs) for inputs in own.inputs)
        own.model.gradients.add(computed.gradients, loss_tokens, len(own.inputs))
    return PassResult(
        outputs=tuple(output for outcome in outcomes for output in outcome.outputs),
        metrics=losses.merge([metrics for outcome in outcomes for metrics in outcome.metrics]),
    )


class _Started:
    """A pack that is computed; if it failed, each chunk alone, to find out which one does."""

    def __init__(self, chunks: Sequence[Chunk], stacks: FactorStacks) -> None:
        self._chunks = chunks
        self._launched: Launched | None = None
        self._parts: list[ChunkResult | EngineError] = []
        recompute: float | None = None
        try:
            self._launched = compute(chunks, stacks=stacks)
            return
        except torch.OutOfMemoryError:
            recompute = 1.0
        except Exception as error:
            if len(chunks) == 1:
                _forget_gradients(chunks[0])
                self._parts = [as_engine_error(error)]
                return
        # Not while the error is handled: it would keep what the failed pack computed in memory.
        self._parts = [_part_alone(chunk, stacks, recompute=recompute) for chunk in chunks]

    @property
    def may_wait(self) -> bool:
        """Whether it is still computed, and its gradients are few enough to be there beside those of the next pack."""
        heavy = any(chunk.of.model.trained is Trained.ALL for chunk in self._chunks)
        return self._launched is not None and not self._launched.is_done and not heavy

    def end(self, computed: Mapping[int, Computed]) -> None:
        """Add what came of the chunks to their passes."""
        if self._launched is not None:
            try:
                self._parts = self._launched.parts()
            except Exception as error:
                self._parts = [as_engine_error(error)] * len(self._chunks)
        for chunk, part in zip(self._chunks, self._parts, strict=True):
            computed[chunk.number].add(part)


def _part_alone(chunk: Chunk, stacks: FactorStacks, *, recompute: float | None) -> ChunkResult | EngineError:
    _forget_gradients(chunk)
    try:
        return compute([chunk], recompute=recompute, stacks=stacks).parts()[0]
    except Exception as error:
        _forget_gradients(chunk)
        return as_engine_error(error)


def _forget_gradients(chunk: Chunk) -> None:
    """Clear what a failed backward pass may have left."""
    for parameter in chunk.of.model.parameters.values():
        parameter.grad = None
