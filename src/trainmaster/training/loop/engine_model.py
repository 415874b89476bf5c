"""A model that the engine computes, and whose weights stay those of a transformers or PEFT model.

That model is the container: checkpoints, the optimizer and the export know its parameters, whichever loop trains. The
engine computes with the same parameters where they have the type that it computes in, and otherwise with copies. The
factors of an adapter have 32 bits, and the engine rounds them for each batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.architectures.naming import Naming
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.factor_stacks import FactorStacks
from trainmaster.engine.layers import Linear
from trainmaster.engine.memory import PassMemory, free_bytes
from trainmaster.engine.model import Transformer
from trainmaster.engine.products import Factors
from trainmaster.engine.targets import UNEMBEDDING
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_layout import module_naming
from trainmaster.training.loop.batches import Batch
from trainmaster.training.loop.loss_module import LossModule
from trainmaster.training.loop.objectives import Losses, Objective
from trainmaster.training.loop.sharding import ShardedModules, Sharding
from trainmaster.training.loop.weights import TrainedWeights

T = TypeVar("T")


class LackingError(Exception):
    """The engine cannot compute this model; the message says what it lacks."""


def engine_config(config: PretrainedConfig, where: str) -> ModelConfig:
    """The architecture, as the engine knows it. Raises LackingError."""
    described = json.loads(config.to_json_string(use_diff=False))
    try:
        known = ModelConfig.of(described, Path(where) / "config.json")
    except EngineError as error:
        raise LackingError(str(error)) from error
    for part in (described, described.get("text_config") or {}):
        for name, value in part.items():
            if name.endswith(_DROPOUTS) and not name.startswith("classifier") and value:
                raise LackingError(f"the model's {name} is {value:g}, and the engine has no dropout")
        if part.get("router_aux_loss_coef"):
            raise LackingError("experts of the model are balanced by an auxiliary loss, which the engine does not have")
    return known


_DROPOUTS = ("dropout", "_pdrop")


class EngineModel:
    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        lora: LoraConfig | None,
        weights: TrainedWeights,
        objective: Objective,
        *,
        device: torch.device,
        dtype: torch.dtype,
        recompute: float | None,
        fp8: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        """`recompute`: the share of the layers whose activations are recomputed; None: as few as memory asks for.
        `fp8`: frozen weights of linear layers have 8 bits.

        Raises LackingError where the parameters of the model, or of an adapter, are not the engine's.
        """
        self.transformer = Transformer(config)
        naming = module_naming(config)
        originals = _parameters(model, self.transformer, naming)
        self.container: PreTrainedModel | PeftModel = model if lora is None else get_peft_model(model, lora)
        self.weights = weights
        self._adapter = None if lora is None else _adapter(self.container, self.transformer, naming)
        self._stacks = FactorStacks()
        self._recompute = recompute
        self.objective = objective
        self._losses = LossModule(self.transformer, objective)
        self._sharded: ShardedModules | None = None
        buffers = dict(model.named_buffers())
        balances = {name: buffers[naming.theirs(name)].to(device) for name, _ in self.transformer.named_buffers()}
        if sharding is None:
            self._place(originals, balances, device, dtype, fp8=fp8)
        else:
            self._sharded = self._shard(originals, balances, device, dtype, sharding)
        if self._adapter is not None:
            weights.others += self._adapter.parameters()
        self._memory = PassMemory.of(
            config,
            bytes_each=dtype.itemsize,
            rank=0 if lora is None else lora.r,
            gradients=weights.gradient_bytes + (0 if self._sharded is None else self._sharded.gathered_bytes),
            fp8=fp8,
        )

    def require_memory(self, longest: int, device: torch.device) -> None:
        """Raises EngineError where a sample of so many tokens needs more memory than the device has free."""
        self._memory.check("the longest sample", longest, free_bytes(device))

    @property
    def sharded(self) -> bool:
        """Whether the ranks compute each batch together: all must have as many."""
        return self._sharded is not None

    def losses(self, batch: Batch, divisor: Tensor) -> Losses:
        adapters = None if self._adapter is None else AdapterRows([(self._adapter, len(batch.tokens))], self._stacks)
        losses: Losses = self._losses(batch, adapters, divisor, self._recomputed_share(batch))
        return losses

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Of each pair's answers, by the base model, which must not have been trained yet: [pairs, 2]."""
        (logprobs,) = self._losses(batch, None, None, 0.0)
        return logprobs  # type: ignore[no-any-return]

    def step(self, optimizer: Optimizer, *, max_norm: float) -> Tensor:
        """Step by the gradients of all ranks, clipped; returns their norm before that, without waiting for it."""
        norm = self.weights.step(optimizer, max_norm=max_norm)
        self.follow()
        return norm

    def follow(self) -> None:
        """Have the engine compute with weights that have changed."""
        self.weights.follow()
        if self._sharded is not None:
            self._sharded.free()
        if self._adapter is not None:
            self._adapter.changes += 1

    def gather(self) -> None:
        """Bring the container's weights together, where they are on several devices."""
        if len({parameter.device for parameter in self.container.parameters()}) > 1:
            nn.Module.to(self.container, "cpu")

    def _recomputed_share(self, batch: Batch) -> float:
        if self._recompute is not None:
            return self._recompute
        return self._memory.recomputed(batch.lengths, free_bytes(batch.tokens.device)) / self._memory.layers

    def _place(
        self,
        originals: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        fp8: bool,
    ) -> None:
        """Have every weight on this device."""
        wide = self.transformer.wide_weights if fp8 else frozenset()
        quantized = {name: each for name, each in originals.items() if name in wide}
        staying = {id(each) for each in quantized.values()}
        for parameter in self.container.parameters():
            # A frozen weight that is computed in another type stays where it was loaded: the result may need it.
            if parameter.requires_grad or (parameter.dtype == dtype and id(parameter) not in staying):
                parameter.data = parameter.data.to(device)
        others = {name: each for name, each in originals.items() if name not in wide}
        computed = {name: self._computed(each, device, dtype) for name, each in others.items()}
        self.transformer.use(computed | quantized, buffers)
        if fp8:
            self._quantize()

    def _shard(
        self,
        originals: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        sharding: Sharding,
    ) -> ShardedModules:
        """Have shards of the engine's weights on this device, and all of the others."""
        types = {parameter.dtype: name for name, parameter in originals.items() if parameter.requires_grad}
        if len(types) > 1:
            raise LackingError(f"its trained weights have several types, and sharded ones have one: {types}")
        of_engine = {id(each) for each in originals.values()}
        for parameter in self.container.parameters():
            if id(parameter) not in of_engine:
                parameter.data = parameter.data.to(device)
        self.transformer.use(originals, buffers)
        sharded = sharding.shard(self._losses, self.container, dtype)
        self.weights.shards += [each for each in self._losses.parameters() if each.requires_grad]
        return sharded

    def _quantize(self) -> None:
        try:
            self.transformer.quantize()
        except EngineError as error:
            raise LackingError(str(error)) from error

    def _computed(self, original: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        if original.dtype == dtype:
            if original.requires_grad:
                self.weights.others.append(original)
            return original
        if original.requires_grad:
            return self.weights.copy_of(original, dtype)
        return nn.Parameter(original.detach().to(device, dtype), requires_grad=False)


def _parameters(model: nn.Module, transformer: Transformer, naming: Naming) -> Mapping[str, nn.Parameter]:
    """The model's parameters by the engine's names."""
    theirs, found = dict(model.named_parameters()), {}
    for name, own in transformer.named_parameters():
        there = theirs.get(naming.theirs(name))
        if there is None or there.shape != own.shape:
            raise LackingError(f"transformers lays out the weight {name} of this model otherwise than the engine")
        found[name] = there
    return found


def _adapter(container: nn.Module, transformer: Transformer, naming: Naming) -> Adapter:
    """The adapter's factors. Those of other parts, such as a vision tower, take no part in text."""
    targets = {module.target for module in transformer.modules() if isinstance(module, Linear)} - {UNEMBEDDING}
    factors: dict[str, Factors] = {}
    scale = 1.0
    for name, module in _of_text(container.named_modules(), naming):
        if not isinstance(module, BaseTunerLayer):
            continue
        target = naming.own(name)
        if not isinstance(module, PeftLinear) or target not in targets:
            raise LackingError(f"the engine has no adapter of the layer {target}")
        (scale,) = module.scaling.values()
        factors[target] = Factors(*(part["default"].get_parameter("weight") for part in (module.lora_A, module.lora_B)))
    adapted = {id(each) for own in factors.values() for each in (own.a, own.b)}
    for name, parameter in _of_text(container.named_parameters(), naming):
        if parameter.requires_grad and id(parameter) not in adapted:
            raise LackingError(f"the engine trains an adapter's factors alone, and not {name}")
    if not factors:
        raise LackingError("the adapter has no layer of the language model")
    return Adapter.of(transformer.config, factors, scale=scale)


def _of_text(named: Iterable[tuple[str, T]], naming: Naming) -> Iterator[tuple[str, T]]:
    """What belongs to the language model, by its names in a model without PEFT."""
    plain = ((name.removeprefix("base_model.model."), each) for name, each in named)
    return ((name, each) for name, each in plain if not naming.is_beside(name))
