"""AdamW on the parameters of one model, with what each step says, and what is done to gradients before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainmaster.engine.types import AdamOptions, EngineError, Normalization

GRAD_NORM_METRICS = ("off", "basic", "detailed")
CLIP_EPSILON = 1e-6
"""Added to a norm before it divides, as in `torch.nn.utils.clip_grad_norm_`."""


def check(options: AdamOptions) -> None:
    """Refuse a step that would make no sense.

    Raises:
        EngineError: names the value that is out of range.
    """
    for name, fits, range_ in (
        ("learning_rate", options.learning_rate >= 0, "0 or more"),
        ("beta1", 0 <= options.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= options.beta2 < 1, "in [0, 1)"),
        # At 0 a parameter whose gradient was always 0 would become 0 / 0.
        ("eps", options.eps > 0, "above 0"),
        ("weight_decay", options.weight_decay >= 0, "0 or more"),
        ("grad_clip_norm", options.grad_clip_norm >= 0, "0 or more; 0 does not clip"),
    ):
        value = getattr(options, name)
        if not (fits and math.isfinite(value)):
            raise EngineError(f"{name} is {value!r}; it has to be {range_}")
    if options.grad_norm_metrics not in GRAD_NORM_METRICS:
        known = ", ".join(GRAD_NORM_METRICS)
        raise EngineError(f"unknown gradient norm metrics {options.grad_norm_metrics!r}; there are {known}")


def scale(
    gradients: Mapping[str, Tensor], options: AdamOptions, *, loss_tokens: int, sequences: int
) -> dict[str, float]:
    """Divide gradients as the step asks, then clip them by their norm: in place.

    Returns:
        The metrics that the step asks for: norms after the division and before the clip.

    Raises:
        EngineError: a gradient is not finite. Some may have been changed.
    """
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
    """The optimizer of one model: its weights in float32, two moments of each, and how many steps were taken.

    Args:
        parameters: What is trained, by name. Those of fewer bits get a float32 original beside them at the first step,
            of which they are copies from then on: a small step would be lost in their own bits.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._originals: dict[str, Tensor] = {}
        self._adam: torch.optim.AdamW | None = None
        self.steps = 0

    def step(self, gradients: Mapping[str, Tensor], options: AdamOptions) -> None:
        """Change the parameters by float32 gradients, one for each."""
        adam = self._adam or self._begin()
        adam.param_groups[0].update(
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        for name, original in self._originals.items():
            original.grad = gradients[name]
        adam.step()
        self.steps += 1
        for name, original in self._originals.items():
            original.grad = None
            self._follow(name, original)

    def weights(self) -> dict[str, Tensor]:
        """The weights themselves, as exact as they are kept."""
        return {name: self._originals.get(name, each).detach() for name, each in self._parameters.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights of the same names and shapes. The moments stay."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if name not in self._originals and weights[name].dtype != parameter.dtype:
                    self._originals[name] = _original(parameter)
                self._originals.get(name, parameter).copy_(weights[name])
                self._follow(name, self._originals.get(name, parameter))

    def state(self) -> dict[str, Any]:
        """The moments, and how many steps made them."""
        found: dict[str, Any] = {"steps": self.steps, "first_moments": {}, "second_moments": {}}
        if self._adam is not None and self.steps:
            for name, original in self._originals.items():
                found["first_moments"][name] = self._adam.state[original]["exp_avg"]
                found["second_moments"][name] = self._adam.state[original]["exp_avg_sq"]
        return found

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._adam, self.steps = None, 0
        if not state["steps"]:
            return
        adam, self.steps = self._begin(), int(state["steps"])
        for name, original in self._originals.items():
            adam.state[original] = {
                "step": torch.tensor(float(self.steps), device=original.device),
                "exp_avg": torch.empty_like(original).copy_(state["first_moments"][name]),
                "exp_avg_sq": torch.empty_like(original).copy_(state["second_moments"][name]),
            }

    def _begin(self) -> torch.optim.AdamW:
        for name, parameter in self._parameters.items():
            self._originals.setdefault(name, _original(parameter))
        self._adam = torch.optim.AdamW(list(self._originals.values()), fused=True)
        return self._adam

    def _follow(self, name: str, original: Tensor) -> None:
        parameter = self._parameters[name]
        if original is not parameter:
            with torch.no_grad():
                parameter.copy_(original)


def _original(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float()
