"""A model that is trained: its weights, its optimizer, the gradients that wait for a step, and snapshots of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.model import Transformer
from trainmaster.engine.optimizer import AdamW, check, scale
from trainmaster.engine.parallel import Ranks
from trainmaster.engine.types import AdamOptions, EngineError, LoraOptions, Trained


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A model's weights as they were when it was taken: no step of training changes them.

    Two snapshots are the same only if they are one: what batches by weights may use them as keys.
    """

    transformer: Transformer
    """The base model itself, where an adapter or nothing is trained beside it; else a copy of the trained weights."""
    adapter: Adapter | None = None
    """A copy of the trained adapter."""


SKIPPED = "skipped_without_gradients"
"""The metric of a step that was not made, as there was nothing to step by."""
State = Mapping[str, Any]
"""A tree of tensors and plain values. Its tensors are the model's own: write or copy them before the next command."""


_AFRESH: State = {
    "optimizer": {"steps": 0, "first_moments": {}, "second_moments": {}},
    "gradients": {"tensors": {}, "loss_tokens": 0, "sequences": 0, "waiting": 0},
}
"""What a model has before its first pass."""


def add_up(sums: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums with further tensors added to them: all at once, as each by itself would be a command to a GPU. Those of
    none are the tensors, which are taken over."""
    if not sums:
        return dict(tensors)
    torch._foreach_add_(list(sums.values()), [tensors[name] for name in sums])
    return sums


@dataclass(slots=True)
class Gradients:
    """A sum of gradients, and over how much."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By parameter, float32; empty if there are none."""
    loss_tokens: int = 0
    sequences: int = 0
    waiting: int = 0
    """Steps that were asked for and left to a later one."""

    def add(self, tensors: Mapping[str, Tensor], loss_tokens: int, sequences: int) -> None:
        """Add some; the tensors are taken over."""
        self.tensors = add_up(self.tensors, tensors)
        self.loss_tokens += loss_tokens
        self.sequences += sequences


class TrainedModel:
    """One model of an engine.

    Args:
        model_id: What requests call it.
        base: The model that all share.
        trained: What of it is trained.
        lora: The adapter, if that is what is trained.

    Raises:
        EngineError: there cannot be such a model.
    """

    def __init__(self, model_id: str, base: Transformer, trained: Trained, lora: LoraOptions | None) -> None:
        if (trained is Trained.ADAPTER) != (lora is not None):
            raise EngineError(f"model {model_id!r}: an adapter needs LoRA options, and only an adapter can have them")
        self.model_id = model_id
        self.trained = trained
        self.lora = lora
        self.transformer = base
        self.adapter: Adapter | None = None
        parameters: dict[str, Tensor] = {}
        if lora is not None:
            self.adapter = Adapter(base.config, lora, device=base.unembedding.weight.device)
            parameters = dict(self.adapter.named_parameters())
        elif trained is Trained.ALL:
            self.transformer = copy.deepcopy(base).requires_grad_(True)
            parameters = dict(self.transformer.named_parameters())
        self.parameters: Mapping[str, Tensor] = parameters
        self.optimizer = AdamW(parameters)
        self.gradients = Gradients()

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the last backward pass, which are not kept."""
        taken = {}
        for name, parameter in self.parameters.items():
            taken[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            taken[name] = taken[name].float()
            parameter.grad = None
        return taken

    def step(self, options: AdamOptions, ranks: Ranks, every: int) -> dict[str, float]:
        """Step by the gradients of all ranks since the last step; or leave it to the step that is the `every`-th.

        Without gradients, as after a forward_backward that failed, nothing changes, and the metrics say so.

        Raises:
            EngineError: nothing of this model is trained, or the options or the gradients are no good.
        """
        if not self.parameters:
            raise EngineError(f"model {self.model_id!r} is frozen: it has nothing to step")
        check(options)
        if not sum(ranks.exchange("the number of sequences", self.gradients.sequences)):
            return {SKIPPED: 1.0} | ({} if options.grad_norm_metrics == "off" else {"grad_norm": 0.0})
        if self.gradients.waiting + 1 < every:
            self.gradients.waiting += 1
            return {"accumulated_steps": float(self.gradients.waiting)}
        gradients, self.gradients = self.gradients, Gradients()
        total = self._summed(gradients, ranks)
        metrics = scale(total.tensors, options, loss_tokens=total.loss_tokens, sequences=total.sequences)
        self.optimizer.step(total.tensors, options)
        return metrics

    def state(self, ranks: Ranks) -> dict[str, Any]:
        """All that training goes on from."""
        gradients = self.gradients
        if ranks.size > 1:
            copied = {name: each.clone() for name, each in gradients.tensors.items()}
            gradients = Gradients(copied, gradients.loss_tokens, gradients.sequences, gradients.waiting)
            if sum(ranks.exchange("the number of sequences", gradients.sequences)):
                gradients = self._summed(gradients, ranks)
        return {
            **weights_state(self.trained, self.lora, self.optimizer.weights()),
            "optimizer": self.optimizer.state(),
            "gradients": {
                "tensors": gradients.tensors,
                "loss_tokens": gradients.loss_tokens,
                "sequences": gradients.sequences,
                "waiting": gradients.waiting,
            },
        }

    def load_state(self, state: State, ranks: Ranks, *, optimizer: bool) -> None:
        """Go on from a state, or from its weights alone.

        Raises:
            EngineError: it is not one of such a model. The model is as it was.
        """
        check_fit(self, state)
        if optimizer and ("optimizer" not in state or "gradients" not in state):
            raise EngineError(
                "the saved state has weights alone, and no optimizer's state: load it without the optimizer"
            )
        moments, saved = (state if optimizer else _AFRESH)["optimizer"], (state if optimizer else _AFRESH)["gradients"]
        for tensors in (saved["tensors"], moments["first_moments"], moments["second_moments"]):
            if tensors:
                check_shapes(self.parameters, tensors)
        self.optimizer.load_weights(state["weights"])
        self.optimizer.load_state(moments)
        self.gradients = Gradients(waiting=int(saved["waiting"]))
        # Gradients are summed over the ranks: one of them has what was saved.
        if ranks.rank == 0 and saved["tensors"]:
            tensors = {name: torch.zeros_like(each, dtype=torch.float32) for name, each in self.parameters.items()}
            for name, each in tensors.items():
                each.copy_(saved["tensors"][name])
            self.gradients.add(tensors, int(saved["loss_tokens"]), int(saved["sequences"]))

    def snapshot(self) -> Snapshot:
        """The weights as they are now."""
        if self.trained is Trained.ALL:
            return Snapshot(transformer=copy.deepcopy(self.transformer).requires_grad_(False))
        return Snapshot(transformer=self.transformer, adapter=None if self.adapter is None else self.adapter.copy())

    def _summed(self, gradients: Gradients, ranks: Ranks) -> Gradients:
        """Over all ranks; a rank that had no data adds nothing."""
        if ranks.size == 1:
            return gradients

        def make() -> list[Tensor]:
            for name, parameter in self.parameters.items():
                if name not in gradients.tensors:
                    gradients.tensors[name] = torch.zeros_like(parameter, dtype=torch.float32)
            return [gradients.tensors[name] for name in self.parameters]

        ranks.sum("gradients", make)
        counts = ranks.exchange("the counts", (gradients.loss_tokens, gradients.sequences))
        gradients.loss_tokens, gradients.sequences = (sum(each) for each in zip(*counts, strict=True))
        return gradients


def weights_state(trained: Trained, lora: LoraOptions | None, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """The part of a state that samples and exports need."""
    return {"trained": trained.value, "lora": None if lora is None else asdict(lora), "weights": dict(weights)}


def check_fit(model: TrainedModel, state: State) -> None:
    """Refuse a state of another model.

    Raises:
        EngineError: says what differs.
    """
    trained, lora = state.get("trained"), state.get("lora")
    if trained != model.trained.value:
        raise EngineError(
            f"the saved state is of a model with {_described(trained)}, and model {model.model_id!r} is one with "
            f"{_described(model.trained.value)}"
        )
    if model.lora is not None and lora is not None:
        own = asdict(model.lora)
        for name in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"):
            if lora[name] != own[name]:
                raise EngineError(
                    f"the saved adapter has {name} {lora[name]}, and model {model.model_id!r} has {own[name]}: create "
                    "the model with the options that it was saved with"
                )
    check_shapes(model.parameters, state["weights"])


def check_shapes(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Refuse weights of another base model.

    Raises:
        EngineError: names the first that differs.
    """
    if strange := sorted(parameters.keys() ^ weights.keys()):
        raise EngineError(f"the saved state is of another base model: only one of both has a parameter {strange[0]!r}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise EngineError(
                f"the saved state is of another base model: its {name} has the shape {list(weights[name].shape)}, not "
                f"{list(parameter.shape)}"
            )


def _described(trained: object) -> str:
    words = {"adapter": "an adapter", "all": "all parameters trained", "nothing": "nothing trained"}
    return words.get(str(trained), f"{trained!r} trained")
