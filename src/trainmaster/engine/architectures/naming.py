"""How checkpoints and PEFT name weights; this package's names are those of a language model alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    body: str = "model."
    unembedding: str = "lm_head."
    beside: tuple[str, ...] = ()
    """How names begin that belong to other parts of the model."""

    def theirs(self, own: str) -> str:
        return renamed(own, {"model.": self.body, "lm_head.": self.unembedding})

    def own(self, theirs: str) -> str:
        return renamed(theirs, {self.body: "model.", self.unembedding: "lm_head."})

    def is_beside(self, theirs: str) -> bool:
        return theirs.startswith(self.beside)


ALONE = Naming()


def renamed(name: str, beginnings: Mapping[str, str]) -> str:
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
