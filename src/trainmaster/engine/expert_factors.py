"""How adapter files have the factors of experts: [experts, rank, in] and [experts, out, rank] here.

PEFT's have two matrices for each expert, as vLLM reads them and PEFT converts them for transformers 5. If transformers
always had the experts of a layer together, PEFT's have two matrices for all of them, and one pair for gate and up, with
twice the rank. Tinker's are like ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.architectures.mixtures import Mixture, Stored
from trainmaster.engine.types import EngineError

_EXPERTS = ".mlp.experts."
_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_TINKER = ("w1", "w3", "w2")


def tinker_factors(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = dict(zip(_PRODUCTS, _TINKER, strict=True))
    return {_with_product(name, names): factor for name, factor in own.items()}


def _with_product(name: str, names: Mapping[str, str]) -> str:
    layer, is_of_experts, rest = name.partition(_EXPERTS)
    product, _, kind = rest.partition(".")
    return f"{layer}{_EXPERTS}{names[product]}.{kind}" if is_of_experts else name


def expert_options(mixture: Mixture, adapter: Adapter) -> dict[str, Any]:
    """What the configuration of a PEFT adapter says beside `r` and `lora_alpha`."""
    experts = [target for target in adapter.factors if _EXPERTS in target]
    if not experts:
        return {}
    names = dict(zip(_PRODUCTS, mixture.names, strict=True))
    single = [target for target in adapter.factors if target not in experts]
    others = {target.rpartition(".")[2] for target in single}
    # Whatever has the name of an expert's product, PEFT takes for one of experts, and does not adapt as a layer.
    alike = others & set(names.values()) if mixture.stored is Stored.EACH else set()
    if mixture.stored is Stored.EACH and not alike:
        return {"target_modules": sorted(others | set(names.values()))}
    both, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    parameters = {f"{target.split('.', 3)[3]}.weight" for target in single if target.rpartition(".")[2] in alike}
    return {
        "target_modules": sorted(others - alike),
        "target_parameters": [both, down, *sorted(parameters)],
        "rank_pattern": {both: 2 * adapter.options.rank},
        "alpha_pattern": {both: 2 * adapter.options.alpha},
    }


def peft_factors(mixture: Mixture, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    written: dict[str, Tensor] = {}
    for name, factor in own.items():
        layer, is_of_experts, rest = name.partition(_EXPERTS)
        product, _, kind = rest.partition(".")
        if not is_of_experts:
            written[name] = factor
        elif mixture.stored is Stored.EACH:
            theirs = mixture.names[_PRODUCTS.index(product)]
            prefix = f"{layer}.{mixture.module}.experts"
            written |= {f"{prefix}.{expert}.{theirs}.{kind}": each for expert, each in enumerate(factor.unbind(0))}
        elif product == "down_proj":
            written[f"{layer}{_EXPERTS}{kind}"] = _flat(kind, factor)
        elif product == "gate_proj":
            up = own[f"{layer}{_EXPERTS}up_proj.{kind}"]
            written[f"{layer}{_EXPERTS}base_layer.{kind}"] = _flat(kind, _of_both(mixture, kind, factor, up))
    return written


def _of_both(mixture: Mixture, kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """One factor for gate and up, whose outputs take turns or follow one another."""
    if kind.startswith("lora_A"):
        return torch.cat([gate, up], dim=1)
    parts = [torch.cat([gate, torch.zeros_like(gate)], dim=2), torch.cat([torch.zeros_like(up), up], dim=2)]
    return torch.stack(parts, dim=2).flatten(1, 2) if mixture.interleaved else torch.cat(parts, dim=1)


def _flat(kind: str, factor: Tensor) -> Tensor:
    """Of all experts: [experts x rank, in], or [out, rank x experts]."""
    return factor.flatten(0, 1) if kind.startswith("lora_A") else factor.permute(1, 2, 0).flatten(1, 2)


_OF_EXPERT = re.compile(r"(?P<layer>.*)\.\w+\.experts\.((?P<expert>\d+)\.)?((?P<product>\w+)\.)?(?P<kind>lora_.*)")


def own_factors(mixture: Mixture, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The factors of an adapter, in whichever of these forms a file has them, by the names of this package."""
    known = dict(zip((*_TINKER, *_PRODUCTS, *mixture.names), _PRODUCTS * 3, strict=True))
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in given.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        product, kind = known.get(match["product"] or "", match["product"] or ""), match["kind"]
        prefix = f"{match['layer']}{_EXPERTS}"
        if match["expert"] is not None:
            experts.setdefault(f"{prefix}{product}.{kind}", {})[int(match["expert"])] = tensor
        elif product == "base_layer":
            gate, up = _gate_and_up(mixture, name, kind, _unflat(mixture, kind, tensor))
            found |= {f"{prefix}gate_proj.{kind}": gate, f"{prefix}up_proj.{kind}": up}
        elif not product:
            found[f"{prefix}down_proj.{kind}"] = _unflat(mixture, kind, tensor)
        else:
            # Tinker shares a factor among all experts of a layer.
            repeated = len(tensor) == 1 and tensor.dim() == 3
            found[f"{prefix}{product}.{kind}"] = tensor.expand(mixture.experts, -1, -1) if repeated else tensor
    for own, tensors in experts.items():
        if len(tensors) != mixture.experts or len({each.shape for each in tensors.values()}) > 1:
            raise EngineError(f"the PEFT adapter cannot be used: {own} is not of one shape for all experts")
        found[own] = torch.stack([tensors[expert] for expert in sorted(tensors)])
    return found


def _unflat(mixture: Mixture, kind: str, tensor: Tensor) -> Tensor:
    if kind.startswith("lora_A"):
        return tensor.reshape(mixture.experts, -1, tensor.shape[-1])
    return tensor.reshape(len(tensor), -1, mixture.experts).permute(2, 0, 1)


def _gate_and_up(mixture: Mixture, name: str, kind: str, both: Tensor) -> tuple[Tensor, Tensor]:
    if kind.startswith("lora_A"):
        gate, up = both.chunk(2, dim=1)
        return gate, up
    rows = (both[:, ::2], both[:, 1::2]) if mixture.interleaved else both.chunk(2, dim=1)
    (gate, not_gate), (not_up, up) = (each.chunk(2, dim=2) for each in rows)
    if not_gate.any() or not_up.any():
        raise EngineError(f"the PEFT adapter cannot be used: {name} mixes what gate and up have of their own here")
    return gate, up
