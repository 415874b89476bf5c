"""What the models of this job saved, in this start and in earlier ones: names, and what can be told of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainmaster.trainer_service.front.identifiers import is_model_id

_INFO = ("base_model", "is_lora", "lora_rank", "train_unembed", "train_mlp", "train_attn")
"""What a client asks for before it makes a model from saved weights."""


class Saved:
    """Checkpoints by the path that clients know them by, oldest first; see `messages.Ready.checkpoints`."""

    def __init__(self) -> None:
        self._by_path: dict[str, Mapping[str, Any]] = {}

    def add(self, checkpoints: Iterable[Mapping[str, Any]]) -> None:
        """Take note of some; one that was saved over is the newest again."""
        for checkpoint in checkpoints:
            self._by_path.pop(checkpoint["path"], None)
            self._by_path[checkpoint["path"]] = checkpoint

    def names(self) -> list[str]:
        """Of the states that can be trained on from."""
        return [path for path, checkpoint in self._by_path.items() if checkpoint.get("kind") == "training"]

    def weights_info(self, path: str) -> dict[str, Any] | None:
        """What the weights under a path are; None when there are none."""
        checkpoint = self._by_path.get(path)
        return None if checkpoint is None else {name: checkpoint.get(name) for name in _INFO}

    def base_model(self, path: str) -> str:
        """What the weights under a path are weights of; empty when it is not known."""
        return str(self._by_path.get(path, {}).get("base_model") or "")

    def advice(self, owner: str) -> str:
        """What to go on from when a model is lost; nothing for what is no model."""
        if not is_model_id(owner):
            return ""
        own = [checkpoint for checkpoint in self._by_path.values() if checkpoint.get("model_id") == owner]
        training = [checkpoint["path"] for checkpoint in own if checkpoint.get("kind") == "training"]
        if training:
            return f"Its last saved state is {training[-1]}: make a new model and load it."
        if own:
            return f"Of it there are only weights for sampling, the last ones as {own[-1]['path']}."
        return "None of its states was saved."
