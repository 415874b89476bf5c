"""What checkpoints and PEFT call the weights of a language model that has a vision tower beside it.

Here they are `model.…` and `lm_head.…`, as those of a language model alone are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainmaster.engine.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How names begin elsewhere."""

    body: str = "model."
    unembedding: str = "lm_head."
    beside: tuple[str, ...] = ()
    """Weights that are not the language model's."""

    def theirs(self, own: str) -> str:
        """What a weight is called there."""
        return _renamed(own, {"model.": self.body, "lm_head.": self.unembedding})

    def own(self, theirs: str) -> str:
        """What a weight of there is called here."""
        return _renamed(theirs, {self.body: "model.", self.unembedding: "lm_head."})

    def is_beside(self, theirs: str) -> bool:
        """Whether a weight is not the language model's."""
        return theirs.startswith(self.beside)


_ALONE = Naming()
_MODULES = Naming(body="model.language_model.", beside=("model.vision_tower.", "model.multi_modal_projector."))
_FILES = Naming(
    body="language_model.model.",
    unembedding="language_model.lm_head.",
    beside=("vision_tower.", "multi_modal_projector."),
)


def module_naming(config: ModelConfig) -> Naming:
    """As transformers calls its modules, and PEFT the adapters of them."""
    return _MODULES if config.nested else _ALONE


def naming_of(config: ModelConfig, names: Iterable[str]) -> Naming:
    """How some weights are named: transformers saves them by the names that models had when they were published, or
    by those of its modules."""
    if config.nested and any(name.startswith((_FILES.body, _FILES.unembedding)) for name in names):
        return _FILES
    return module_naming(config)


def _renamed(name: str, beginnings: dict[str, str]) -> str:
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
