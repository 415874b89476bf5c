"""A model that the engine computes, and whose weights stay those of a transformers or PEFT model.

That model is the container: checkpoints, the optimizer and the export know its parameters, whichever loop trains. The
engine computes with the same parameters where they have the type that it computes in, and otherwise with copies.
Trained weights that are computed in 16 bits keep their originals of 32 bits, which the optimizer changes; the factors
of an adapter have 32 bits, and the engine rounds them for each batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.architectures.naming import Naming
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.cross_entropy import CrossEntropy, cross_entropy
from trainmaster.engine.factor_stacks import FactorStacks
from trainmaster.engine.model import Linear, Transformer
from trainmaster.engine.products import Factors
from trainmaster.engine.targets import UNEMBEDDING
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_layout import module_naming
from trainmaster.training.loop.batches import Batch


class LackingError(Exception):
    """The engine cannot compute this model; the message says what it lacks."""


def engine_config(config: PretrainedConfig, where: str) -> ModelConfig:
    """The architecture, as the engine knows it. Raises LackingError."""
    described = json.loads(config.to_json_string(use_diff=False))
    for part in (described, described.get("text_config") or {}):
        if dropout := [name for name, value in part.items() if name.endswith(("dropout", "_pdrop")) and value]:
            raise LackingError(f"the model's {dropout[0]} is {part[dropout[0]]:g}, and the engine has no dropout")
    try:
        return ModelConfig.of(described, Path(where) / "config.json")
    except EngineError as error:
        raise LackingError(str(error)) from error


class EngineModel:
    def __init__(
        self,
        model: PreTrainedModel,
        config: ModelConfig,
        lora: LoraConfig | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        recompute: bool,
    ) -> None:
        """Raises LackingError where the parameters of the model, or of an adapter, are not the engine's."""
        self.transformer = Transformer(config)
        naming = module_naming(config)
        originals = _parameters(model, self.transformer, naming)
        self.container: PreTrainedModel | PeftModel = model if lora is None else get_peft_model(model, lora)
        self.adapter = None if lora is None else _adapter(self.container, self.transformer, naming)
        self._masters: list[Tensor] = []
        self._copies: list[Tensor] = []
        self.transformer.use({name: self._computed(each, device, dtype) for name, each in originals.items()})
        if self.adapter is not None:
            for factor in self.adapter.parameters():
                factor.data = factor.data.to(device)
        self._recompute = recompute
        self._stacks = FactorStacks()

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.container.parameters() if parameter.requires_grad]

    def losses(self, batch: Batch, divisor: Tensor) -> CrossEntropy:
        adapters = None if self.adapter is None else AdapterRows([(self.adapter, len(batch.tokens))], self._stacks)
        attention = PackedAttention(batch.lengths)
        hidden = self.transformer.hidden(
            batch.tokens, batch.positions, attention, adapters, recompute=self._recompute
        ).index_select(0, batch.trained)
        return cross_entropy(hidden, batch.targets, self.transformer.unembedding, divisor)

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients to those of the trained parameters."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._copies:
            return
        pairs = [
            (own, each.grad) for own, each in zip(self._masters, self._copies, strict=True) if each.grad is not None
        ]
        if begun := [(own.grad, grad) for own, grad in pairs if own.grad is not None]:
            torch._foreach_add_([sums for sums, _ in begun], [grad for _, grad in begun])
        for own, grad in pairs:
            if own.grad is None:
                own.grad = grad.to(own.dtype)
        for each in self._copies:
            each.grad = None

    @torch.no_grad()
    def follow(self) -> None:
        """Have the engine compute with weights that have changed."""
        if self.adapter is not None:
            self.adapter.changes += 1
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)

    def _computed(self, original: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
        if original.dtype == dtype or original.requires_grad:
            original.data = original.data.to(device)
        if original.dtype == dtype:
            return original
        copy = nn.Parameter(original.detach().to(device, dtype), requires_grad=original.requires_grad)
        if original.requires_grad:
            self._masters.append(original)
            self._copies.append(copy)
        return copy


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
    targets = {module.target for module in transformer.modules() if isinstance(module, Linear)} - {UNEMBEDDING}
    factors: dict[str, Factors] = {}
    scale = 1.0
    for name, module in container.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        target = naming.own(name.removeprefix("base_model.model."))
        if not isinstance(module, PeftLinear) or target not in targets:
            raise LackingError(f"the engine has no adapter of the layer {target}")
        (scale,) = module.scaling.values()
        factors[target] = Factors(*(part["default"].get_parameter("weight") for part in (module.lora_A, module.lora_B)))
    adapted = {id(each) for own in factors.values() for each in (own.a, own.b)}
    for name, parameter in container.named_parameters():
        if parameter.requires_grad and id(parameter) not in adapted:
            raise LackingError(f"the engine trains an adapter's factors alone, and not {name}")
    return Adapter.of(transformer.config, factors, scale=scale)
