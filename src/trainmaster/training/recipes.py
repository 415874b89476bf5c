"""Which trainer does which training type."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainmaster.training.document import Document, DocumentError, Prepared

if TYPE_CHECKING:
    from trainmaster.training.checkpoint_mixin import Checkpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one training type is done."""

    module: str
    """Has `build(document, prepared, *, adapter, scratch, world_size)`; imported when it is needed."""
    adapter: bool = False
    """An adapter is trained beside the base model, whose own weights stay."""

    def build(self, document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> Checkpointing:
        """The trainer of one rank, ready to train.

        Raises:
            DocumentError: the training cannot be set up as it was asked for.
        """
        module = importlib.import_module(self.module)
        trainer: Checkpointing = module.build(
            document, prepared, adapter=self.adapter, scratch=scratch, world_size=world_size
        )
        return trainer


_SFT = "trainmaster.training.sft"
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "SFT": Recipe(module=_SFT),
        "FULL_FINETUNE": Recipe(module=_SFT),
        "CONTINUED_PRETRAIN": Recipe(module=_SFT),
        "LORA": Recipe(module=_SFT, adapter=True),
    }
)
"""By training type. What is not here is refused at submission."""


def recipe_for(training_type: str) -> Recipe:
    """The recipe of a training type.

    Raises:
        DocumentError: there is none.
    """
    if training_type not in RECIPES:
        raise DocumentError(f"training type {training_type} is not one of {', '.join(RECIPES)}")
    return RECIPES[training_type]
