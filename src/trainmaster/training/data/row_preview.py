"""What a model will see of a row: its tokens, with those that are trained on told apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.training.data.encoder import Encoder
from trainmaster.training.data.shapes import Chat, Pair
from trainmaster.training.errors import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens in a row that are all trained on, or all not."""

    text: str
    tokens: int
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One row as it will be trained on."""

    shape: str
    """`messages`, `prompt and completion` or `text`."""
    input_ids: list[int]
    tokens: list[str]
    """Each token as text."""
    trained: list[bool]
    segments: list[Segment]
    samples: int
    """How many sequences the row becomes; more than one where a long document is parted. Shown is the first."""
    full_length: int
    """Tokens before the end was cut off."""


def explain_row(encoder: Encoder, tokenizer: Any, row: Mapping[str, Any], origin: Origin) -> Explained:
    """Encode one row as a training would, and show what comes out.

    Raises:
        InputError: something is wrong with the row.
    """
    samples = encoder.encode([row], [origin])[0]
    first = samples[0]
    trained = [bool(mark) for mark in first.mask]
    shape = encoder.shape(row, origin)
    return Explained(
        shape="messages" if isinstance(shape, Chat) else "prompt and completion" if isinstance(shape, Pair) else "text",
        input_ids=first.input_ids,
        tokens=[tokenizer.decode([token]) for token in first.input_ids],
        trained=trained,
        segments=_segments(first.input_ids, trained, tokenizer),
        samples=len(samples),
        full_length=first.full_length,
    )


def _segments(input_ids: list[int], trained: list[bool], tokenizer: Any) -> list[Segment]:
    segments, start = [], 0
    for end in range(1, len(trained) + 1):
        if end == len(trained) or trained[end] != trained[start]:
            text = tokenizer.decode(input_ids[start:end])
            segments.append(Segment(text=text, tokens=end - start, trained=trained[start]))
            start = end
    return segments
