"""Encodes rows as token sequences, and marks the positions that are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainmaster.server.core.training.options import refused_fields
from trainmaster.server.core.training.types import TrainingType
from trainmaster.training.data.shapes import Chat, Pair, Plain, Shape, shape_of
from trainmaster.training.data.tokenizers import ChatRenderer, Rendered
from trainmaster.training.document import TokenizationConfig
from trainmaster.training.steps import InputError, Origin, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    input_ids: list[int]
    mask: list[int]
    """1: the position is trained on."""
    full_length: int
    """Tokens before truncation."""

    @property
    def cut(self) -> bool:
        return self.full_length > len(self.input_ids)

    @property
    def trained(self) -> bool:
        """Whether anything is left to train on."""
        return any(self.mask)


class Encoder:
    """Turns rows into samples, the same way for training and for a check."""

    def __init__(self, config: TokenizationConfig, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> None:
        """Raises InputError where the tokenizer lacks a token that the job wants, or the job maps a field that no row
        has.
        """
        for name, instead in refused_fields(config.data.preprocess.field_mapping):
            raise InputError(f"preprocess.field_mapping.{name}: {instead}")
        self._config = config
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self._pretrains = config.training_type is TrainingType.CONTINUED_PRETRAIN
        self._chats = ChatRenderer(
            tokenizer, assistant_only=config.assistant_only_loss, completion_only=config.completion_only_loss
        )
        preprocess, bos, eos = config.data.preprocess, tokenizer.bos_token_id, tokenizer.eos_token_id
        self._opening = self._ends("add_bos", preprocess.add_bos, bos, self._usual_opening())
        # Without an end a model never learns to stop.
        self._closing = self._ends("add_eos", preprocess.add_eos, eos, [] if eos is None else [eos])

    def shape(self, row: Mapping[str, Any], origin: Origin) -> Shape:
        """Raises RowError where the row has nothing that can be trained on."""
        return shape_of(row, self._config.data.preprocess.field_mapping, origin, text_only=self._pretrains)

    def encode(self, rows: Sequence[Mapping[str, Any]], origins: Sequence[Origin]) -> list[list[Sample]]:
        """The samples of each row: one, or several where a long document is split.

        Raises:
            InputError: a row is wrong, or does not go with the tokenizer.
        """
        shapes = [self.shape(row, origin) for row, origin in zip(rows, origins, strict=True)]
        texts = [self._rendered(shape, origin) for shape, origin in zip(shapes, origins, strict=True)]
        if any(text.trained is not None for text in texts):
            self._require_places()
        encoded = self.tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            self._samples(
                list(encoded["input_ids"][index]),
                _mask(text, index, encoded) if text.trained is not None else None,
                shapes[index],
                origins[index],
            )
            for index, text in enumerate(texts)
        ]

    def _rendered(self, shape: Shape, origin: Origin) -> Rendered:
        match shape:
            case Chat():
                return self._chats.render(shape, origin)
            case Pair(prompt=prompt, completion=completion):
                text = prompt + completion
                only = self._config.completion_only_loss
                return Rendered(text=text, trained=((len(prompt), len(text)),) if only and prompt else None)
            case Plain(text=text):
                return Rendered(text=text)

    def _samples(self, ids: list[int], mask: list[int] | None, shape: Shape, origin: Origin) -> list[Sample]:
        if not ids:
            raise RowError(origin, "becomes no token at all")
        whole = mask is None
        mask = [1] * len(ids) if mask is None else mask
        opening, closing = self._opening[type(shape)], self._closing[type(shape)]
        if ids[: len(opening)] != opening:
            ids, mask = opening + ids, [int(whole)] * len(opening) + mask
        if ids[len(ids) - len(closing) :] != closing:
            ids, mask = ids + closing, mask + mask[-1:] * len(closing)
        full, truncation = len(ids), self._config.data.preprocess.truncation
        if full <= self.max_seq_length:
            return [Sample(input_ids=ids, mask=mask, full_length=full)]
        if truncation is False:
            raise RowError(origin, f"has {full} tokens, and max_seq_length is {self.max_seq_length}; raise it, leave "
                           "the row out, or set preprocess.truncation to true")  # fmt: skip
        if self._pretrains and truncation is None:
            starts = range(0, full, self.max_seq_length)
            parts = [
                (ids[start : start + self.max_seq_length], mask[start : start + self.max_seq_length])
                for start in starts
            ]
            return [Sample(input_ids=part, mask=marks, full_length=len(part)) for part, marks in parts]
        return [Sample(input_ids=ids[: self.max_seq_length], mask=mask[: self.max_seq_length], full_length=full)]

    def _ends(self, option: str, wanted: bool | None, token: int | None, usual: list[int]) -> dict[type, list[int]]:
        """The tokens at one end of a sample, by its shape. Without an option, a chat template writes its own."""
        if wanted and token is None:
            raise InputError(f"preprocess.{option} is true, and the tokenizer has no such token; leave it out")
        if wanted is not None:
            return dict.fromkeys((Chat, Pair, Plain), [token] if wanted and token is not None else [])
        return {Chat: [], Pair: usual, Plain: usual}

    def _usual_opening(self) -> list[int]:
        """The tokens that the tokenizer itself puts in front of a text."""
        probe = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        with_specials = self.tokenizer("a")["input_ids"]
        for length in range(len(with_specials) - len(probe) + 1):
            if with_specials[length : length + len(probe)] == probe:
                return list(with_specials[:length])
        return []

    def _require_places(self) -> None:
        if not self.tokenizer.is_fast:
            raise InputError(
                "the tokenizer cannot tell which text a token stands for, so that no part of a row can be left out "
                "of the loss; set completion_only_loss and assistant_only_loss to false, or name a tokenizer with a "
                "tokenizer.json"
            )


def _mask(text: Rendered, index: int, encoded: Any) -> list[int]:
    """1 for every token that covers a character which is trained on."""
    count = len(encoded["input_ids"][index])
    mask = [0] * count
    for start, end in text.trained or ():
        first = _token_at(encoded, index, range(start, end))
        last = _token_at(encoded, index, range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue  # only characters that the tokenizer drops, such as spaces
        # A character of several tokens is found at its first one.
        while last + 1 < count and (chars := encoded.token_to_chars(index, last + 1)) and chars.start < end:
            last += 1
        mask[first : last + 1] = [1] * (last + 1 - first)
    return mask


def _token_at(encoded: Any, index: int, places: Sequence[int]) -> int | None:
    """The token of the first of these characters that has one."""
    return next((token for place in places if (token := encoded.char_to_token(index, place)) is not None), None)
