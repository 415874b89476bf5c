"""A model in training: its weights, optimizer, accumulated gradients and snapshots."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.adapters import Adapter, check_shapes
from trainmaster.engine.model import Transformer
from trainmaster.engine.parallel import Ranks
from trainmaster.engine.types import AdamOptions, EngineError, LoraOptions, Normalization, Trained, check_ranges


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class WeightsSnapshot:
    """A model's weights at one moment. Snapshots compare by identity, so they can be keys when batching by weights."""

    transformer: Transformer
    """The base model itself if an adapter or nothing is trained; else a copy of the trained weights."""
    adapter: Adapter | None = None


ANOTHER_MODEL = "the saved state is of another base model"
SKIPPED = "skipped_without_gradients"
"""The metric of a step that was skipped because there were no gradients."""
State = Mapping[str, Any]
"""A tree of tensors and plain values. Its tensors are the model's own: write or copy them before the next command."""


_INITIAL: State = {
    "optimizer": {"steps": 0, "first_moments": {}, "second_moments": {}},
    "gradients": {"tensors": {}, "loss_tokens": 0, "sequences": 0, "waiting": 0},
}


def add_up(sums: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add tensors to sums, all at once: each one would be a command to a GPU. Without sums, return the tensors."""
    if not sums:
        return dict(tensors)
    torch._foreach_add_(list(sums.values()), [tensors[name] for name in sums])
    return sums


@dataclass(slots=True)
class Gradients:
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By parameter, float32; empty if there are none."""
    loss_tokens: int = 0
    sequences: int = 0
    waiting: int = 0
    """Steps that were requested and left to a later one."""

    def add(self, tensors: Mapping[str, Tensor], loss_tokens: int, sequences: int) -> None:
        """Add gradients; the tensors are taken over."""
        self.tensors = add_up(self.tensors, tensors)
        self.loss_tokens += loss_tokens
        self.sequences += sequences


class TrainedModel:
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
            self.adapter = Adapter(base.config, lora, device=base.device)
            parameters = dict(self.adapter.named_parameters())
        elif trained is Trained.ALL:
            self.transformer = copy.deepcopy(base).requires_grad_(True)
            parameters = dict(self.transformer.named_parameters())
        self.parameters: Mapping[str, Tensor] = parameters
        self.optimizer = AdamW(parameters)
        self.gradients = Gradients()

    def take_gradients(self) -> dict[str, Tensor]:
        taken = {}
        for name, parameter in self.parameters.items():
            taken[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            taken[name] = taken[name].float()
            parameter.grad = None
        return taken

    def step(self, options: AdamOptions, ranks: Ranks, every: int) -> dict[str, float]:
        """Step by the gradients of all ranks since the last step, if any; before the `every`-th call, accumulate."""
        if not self.parameters:
            raise EngineError(f"model {self.model_id!r} is frozen: it has nothing to step")
        check_step(options)
        if not sum(ranks.exchange("the number of sequences", self.gradients.sequences)):
            return {SKIPPED: 1.0} | ({} if options.grad_norm_metrics == "off" else {"grad_norm": 0.0})
        if self.gradients.waiting + 1 < every:
            self.gradients.waiting += 1
            return {"accumulated_steps": float(self.gradients.waiting)}
        gradients, self.gradients = self.gradients, Gradients()
        total = self._summed(gradients, ranks)
        metrics = scale_gradients(total.tensors, options, loss_tokens=total.loss_tokens, sequences=total.sequences)
        self.optimizer.step(total.tensors, options)
        self._note_change()
        return metrics

    def state(self, ranks: Ranks) -> dict[str, Any]:
        gradients = self.gradients
        if ranks.size > 1:
            gradients = replace(gradients, tensors={name: each.clone() for name, each in gradients.tensors.items()})
            if sum(ranks.exchange("the number of sequences", gradients.sequences)):
                gradients = self._summed(gradients, ranks)
        return {
            **weights_state(self.trained, self.lora, self.optimizer.weights()),
            "optimizer": self.optimizer.state(),
            "gradients": {name: getattr(gradients, name) for name in Gradients.__slots__},
        }

    def load_state(self, state: State, ranks: Ranks, *, optimizer: bool) -> None:
        """Continue from a state, or from its weights alone. On an error the model is unchanged."""
        check_fit(self, state)
        if optimizer and ("optimizer" not in state or "gradients" not in state):
            raise EngineError(
                "the saved state has weights alone, and no optimizer's state: load it without the optimizer"
            )
        training = state if optimizer else _INITIAL
        moments, saved = training["optimizer"], training["gradients"]
        for tensors in (saved["tensors"], moments["first_moments"], moments["second_moments"]):
            if tensors:
                check_shapes(ANOTHER_MODEL, self.parameters, tensors)
        self.optimizer.load_weights(state["weights"])
        self._note_change()
        self.optimizer.load_state(moments)
        self.gradients = Gradients(waiting=int(saved["waiting"]))
        # Gradients are summed over the ranks: one of them has what was saved.
        if ranks.rank == 0 and saved["tensors"]:
            tensors = {name: torch.zeros_like(each, dtype=torch.float32) for name, each in self.parameters.items()}
            for name, each in tensors.items():
                each.copy_(saved["tensors"][name])
            self.gradients.add(tensors, int(saved["loss_tokens"]), int(saved["sequences"]))

    def snapshot(self) -> WeightsSnapshot:
        if self.trained is Trained.ALL:
            return WeightsSnapshot(transformer=copy.deepcopy(self.transformer).requires_grad_(False))
        return WeightsSnapshot(
            transformer=self.transformer, adapter=None if self.adapter is None else self.adapter.copy()
        )

    def _note_change(self) -> None:
        if self.adapter is not None:
            self.adapter.changes += 1

    def _summed(self, gradients: Gradients, ranks: Ranks) -> Gradients:
        """The sum over all ranks; a rank without data adds nothing."""
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
    """The part of a state that sampling and exports need."""
    return {"trained": trained.value, "lora": None if lora is None else asdict(lora), "weights": dict(weights)}


def check_fit(model: TrainedModel, state: State) -> None:
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
    check_shapes(ANOTHER_MODEL, model.parameters, state["weights"])


def _described(trained: object) -> str:
    words = {"adapter": "an adapter", "all": "all parameters trained", "nothing": "nothing trained"}
    return words.get(str(trained), f"{trained!r} trained")


GRAD_NORM_METRICS = ("off", "basic", "detailed")
CLIP_EPSILON = 1e-6
"""Added to a norm before it divides, as in `torch.nn.utils.clip_grad_norm_`."""


def check_step(options: AdamOptions) -> None:
    check_ranges(
        options,
        [
            ("learning_rate", options.learning_rate >= 0, "0 or more"),
            ("beta1", 0 <= options.beta1 < 1, "in [0, 1)"),
            ("beta2", 0 <= options.beta2 < 1, "in [0, 1)"),
            # At 0 a parameter whose gradient was always 0 would become 0 / 0.
            ("eps", options.eps > 0, "above 0"),
            ("weight_decay", options.weight_decay >= 0, "0 or more"),
            ("grad_clip_norm", options.grad_clip_norm >= 0, "0 or more; 0 does not clip"),
        ],
    )
    if options.grad_norm_metrics not in GRAD_NORM_METRICS:
        known = ", ".join(GRAD_NORM_METRICS)
        raise EngineError(f"unknown gradient norm metrics {options.grad_norm_metrics!r}; there are {known}")


def scale_gradients(
    gradients: Mapping[str, Tensor], options: AdamOptions, *, loss_tokens: int, sequences: int
) -> dict[str, float]:
    """Divide gradients as the options say, then clip them: in place. The metrics have the norms before the clip."""
    counts = {Normalization.NUM_LOSS_TOKENS: loss_tokens, Normalization.NUM_SEQUENCES: sequences}
    # Without one token to learn from there is nothing to divide either.
    divisor = max(counts.get(options.normalization, 1), 1)
    norm = float(torch.nn.utils.get_total_norm(list(gradients.values()))) / divisor
    if not math.isfinite(norm):
        raise EngineError(
            "the accumulated gradients are not finite: they are dropped, and the weights stay as they are; look at the "
            "losses of the last forward_backward requests"
        )
    metrics = {}
    if options.grad_norm_metrics != "off":
        metrics["grad_norm"] = norm
    if options.grad_norm_metrics == "detailed":
        norms = torch.stack([each.norm() for each in gradients.values()]).tolist()
        metrics |= {f"grad_norm/{name}": each / divisor for name, each in zip(gradients, norms, strict=True)}
    clip = min(1.0, options.grad_clip_norm / (norm + CLIP_EPSILON)) if options.grad_clip_norm else 1.0
    if divisor != 1 or clip != 1.0:
        torch._foreach_mul_(list(gradients.values()), clip / divisor)
    return metrics


class AdamW:
    """The optimizer of one model. Below 32 bits, parameters are copies of float32 originals, which keep small steps.

    It calls the kernel of `torch.optim.AdamW(fused=True)` itself: the class imports torch's compiler first, which takes
    two seconds of every start of a trainer service.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._originals: dict[str, Tensor] = {}
        self._first_moments: dict[str, Tensor] = {}
        self._second_moments: dict[str, Tensor] = {}
        self.steps = 0

    def step(self, gradients: Mapping[str, Tensor], options: AdamOptions) -> None:
        if not self.steps:
            self._begin()
        originals, count = list(self._originals.values()), self.steps + 1
        with torch.no_grad():
            torch._fused_adamw_(
                originals,
                [gradients[name] for name in self._originals],
                list(self._first_moments.values()),
                list(self._second_moments.values()),
                [],
                [torch.full((), float(count), device=originals[0].device)] * len(originals),
                lr=options.learning_rate,
                beta1=options.beta1,
                beta2=options.beta2,
                weight_decay=options.weight_decay,
                eps=options.eps,
                amsgrad=False,
                maximize=False,
            )
        self.steps = count
        for name, original in self._originals.items():
            self._follow(name, original)

    def weights(self) -> dict[str, Tensor]:
        """The weights at full precision."""
        return {name: self._originals.get(name, each).detach() for name, each in self._parameters.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set weights of the same names and shapes. The moments stay."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if name not in self._originals and weights[name].dtype != parameter.dtype:
                    self._originals[name] = _original(parameter)
                self._originals.get(name, parameter).copy_(weights[name])
                self._follow(name, self._originals.get(name, parameter))

    def state(self) -> dict[str, Any]:
        if not self.steps:
            return {"steps": 0, "first_moments": {}, "second_moments": {}}
        moments = {"first_moments": dict(self._first_moments), "second_moments": dict(self._second_moments)}
        return {"steps": self.steps, **moments}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps = 0
        if not state["steps"]:
            return
        self._begin()
        for name in self._originals:
            self._first_moments[name].copy_(state["first_moments"][name])
            self._second_moments[name].copy_(state["second_moments"][name])
        self.steps = int(state["steps"])

    def _begin(self) -> None:
        """Make the originals, and moments of zero in the same order."""
        for name, parameter in self._parameters.items():
            self._originals.setdefault(name, _original(parameter))
        self._first_moments = {name: torch.zeros_like(each) for name, each in self._originals.items()}
        self._second_moments = {name: torch.zeros_like(each) for name, each in self._originals.items()}

    def _follow(self, name: str, original: Tensor) -> None:
        parameter = self._parameters[name]
        if original is not parameter:
            with torch.no_grad():
                parameter.copy_(original)


def _original(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float()
