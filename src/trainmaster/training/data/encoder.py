"""Encodes rows as token sequences, marked where they are trained on, by a job's tokenizer and its chat template."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.server.core.spec.data import PreprocessConfig
from trainmaster.server.core.training.options import positions_of, refused_arguments, refused_fields, too_long
from trainmaster.server.core.training.types import TrainingType
from trainmaster.training.data.shapes import (
    ASSISTANT,
    Chat,
    Pair,
    Plain,
    Shape,
    Single,
    Wanted,
    sequences_of,
    shape_of,
)
from trainmaster.training.document import TokenizationConfig, parsed
from trainmaster.training.steps import InputError, Origin, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_NO_LENGTH = 10**9
"""Tokenizers without a limit have a larger number."""


def load_tokenizer(
    directory: Path, preprocess: PreprocessConfig, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    for name, instead in refused_arguments(preprocess.tokenizer_config):
        raise InputError(f"preprocess.tokenizer_config.{name}: {instead}")
    options = {name: parsed(text) for name, text in preprocess.tokenizer_config.items()}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code, **options
        )
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        with_options = f" with the options {', '.join(options)}" if options else ""
        raise InputError(f"the tokenizer in {directory} cannot be loaded{with_options}: {error}") from error
    if preprocess.chat_template is not None:
        tokenizer.chat_template = preprocess.chat_template
    return tokenizer


def sample_length(wanted: int | None, *directories: Path, model_kwargs: Mapping[str, str] | None = None) -> int:
    """The most tokens of a sample: what the job says, or what its model (with `model_kwargs`) or tokenizer allows."""
    if wanted is not None:
        known = (positions_of(_json(directory / "config.json"), model_kwargs) for directory in directories)
        if (problem := too_long(wanted, next((each for each in known if each is not None), None))) is not None:
            raise InputError(problem)
        return wanted
    for directory in directories:
        config = _json(directory / "config.json")
        for part in (config, config.get("text_config") or {}):
            for name in _LENGTHS:
                if isinstance(part.get(name), int):
                    return int(part[name])
        length = _json(directory / "tokenizer_config.json").get("model_max_length")
        if isinstance(length, int | float) and length < _NO_LENGTH:
            return int(length)
    raise InputError("neither model nor tokenizer says how long a sample may be; set data_config.max_seq_length")


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


Span = tuple[int, int]
"""The first character, and the one after the last."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    text: str
    trained: tuple[Span, ...] | None = None
    """None: all of it."""


class ChatRenderer:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, assistant_only: bool, completion_only: bool) -> None:
        self._tokenizer = tokenizer
        self._assistant_only = assistant_only
        self._completion_only = completion_only

    def render(self, chat: Chat, origin: Origin) -> Rendered:
        """The text of a conversation, and the parts of it that are trained on. Raises InputError and RowError."""
        template = self._template(chat)
        spans: tuple[Span, ...] | None = None
        if self._assistant_only:
            text, spans = self._assistant_spans(template, chat, origin)
        else:
            text = self._text(template, chat, chat.messages, origin)
        if chat.prompt_messages and self._completion_only:
            given = self._text(template, chat, chat.messages[: chat.prompt_messages], origin, prompted=True)
            if not text.startswith(given):
                raise RowError(origin, "the chat template writes the prompt differently once the completion follows; "
                               "change the template, or set completion_only_loss to false, which DPO does not have",
                               "prompt")  # fmt: skip
            whole = ((0, len(text)),) if spans is None else spans
            spans = tuple((max(start, len(given)), end) for start, end in whole if end > len(given))
        if spans is not None and not spans:
            raise RowError(origin, "has no message of the assistant, so that there is nothing to train on; set "
                           "assistant_only_loss to false to train on everything", "messages")  # fmt: skip
        return Rendered(text=text, trained=spans)

    def _template(self, chat: Chat) -> str:
        try:
            template: str = self._tokenizer.get_chat_template(tools=chat.tools)
        except ValueError:
            raise InputError(
                "the rows are conversations, and the tokenizer has no chat template; give one with "
                "preprocess.chat_template, or name a tokenizer that has one with preprocess.tokenizer_id"
            ) from None
        return template

    def _assistant_spans(self, template: str, chat: Chat, origin: Origin) -> tuple[str, tuple[Span, ...]]:
        marked = template if _GENERATION.search(template) else _marked_by_trl(template)
        if marked is not None:
            texts, marks = self._rendered(marked, chat, chat.messages, origin, return_assistant_tokens_mask=True)
            return texts[0], tuple((start, end) for start, end in marks[0] if end > start)
        # Without marks: the text that each message of the assistant adds, after what opens it.
        text = self._text(template, chat, chat.messages, origin)
        spans = []
        for number, message in enumerate(chat.messages):
            if message["role"] == ASSISTANT:
                before = self._text(template, chat, chat.messages[:number], origin, prompted=True) if number else ""
                after = self._text(template, chat, chat.messages[: number + 1], origin)
                if not (text.startswith(after) and after.startswith(before)):
                    raise InputError(
                        f"{origin}: it cannot be told which part is the assistant's: the chat template has no "
                        "{% generation %} and writes earlier messages differently once others follow. Give a template "
                        "with {% generation %} in preprocess.chat_template, or set assistant_only_loss to false"
                    )
                spans.append((len(before), len(after)))
        return text, tuple(spans)

    def _text(
        self, template: str, chat: Chat, messages: list[dict[str, Any]], origin: Origin, *, prompted: bool = False
    ) -> str:
        texts, _ = self._rendered(template, chat, messages, origin, add_generation_prompt=prompted)
        return str(texts[0])

    def _rendered(
        self, template: str, chat: Chat, messages: list[dict[str, Any]], origin: Origin, **options: Any
    ) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        values = {**self._tokenizer.special_tokens_map, **chat.template_arguments}
        try:
            return render_jinja_template(
                [messages], tools=list(chat.tools) if chat.tools else None, chat_template=template, **options, **values
            )
        except Exception as error:
            # A template is a program, and may raise anything.
            raise RowError(origin, f"the chat template refuses it: {error}", "messages") from error


@functools.cache
def _marked_by_trl(template: str) -> str | None:
    """TRL's version of a well-known template, with the assistant's parts marked; None where TRL has none."""
    found = importlib.util.find_spec("trl")  # not imported, which takes seconds
    for place in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(place, "chat_templates").glob("*_training.jinja")):
            original = path.with_name(path.name.replace("_training", ""))
            if original.is_file() and original.read_text() == template:
                return path.read_text()
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    input_ids: list[int]
    mask: list[int]
    """1: the position is trained on."""
    full_length: int

    @property
    def cut(self) -> bool:
        return self.full_length > len(self.input_ids)

    @property
    def trained(self) -> bool:
        return any(self.mask)


_WANTED = {TrainingType.CONTINUED_PRETRAIN: Wanted.TEXT, TrainingType.DPO: Wanted.PREFERENCES}


class Encoder:
    """Turns rows into samples, the same way for training and for a check."""

    def __init__(self, config: TokenizationConfig, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> None:
        for name, instead in refused_fields(config.data.preprocess.field_mapping):
            raise InputError(f"preprocess.field_mapping.{name}: {instead}")
        self._config = config
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self._pretrains = config.training_type is TrainingType.CONTINUED_PRETRAIN
        self.wanted = Wanted.JUDGEMENTS if config.unpaired else _WANTED.get(config.training_type, Wanted.EXAMPLES)
        self._chats = ChatRenderer(
            tokenizer, assistant_only=config.assistant_only_loss, completion_only=config.completion_only_loss
        )
        preprocess, bos, eos = config.data.preprocess, tokenizer.bos_token_id, tokenizer.eos_token_id
        self._opening = self._ends("add_bos", preprocess.add_bos, bos, self._usual_opening())
        # Without an end a model never learns to stop.
        self._closing = self._ends("add_eos", preprocess.add_eos, eos, [] if eos is None else [eos])

    def shape(self, row: Mapping[str, Any], origin: Origin) -> Shape:
        """Raises RowError where the row has nothing that can be trained on."""
        return shape_of(row, self._config.data.preprocess.field_mapping, origin, self.wanted)

    def encode(self, rows: Sequence[Mapping[str, Any]], origins: Sequence[Origin]) -> list[list[Sample]]:
        """The samples of each row: several where a long document is split, and of a preference the chosen answer and
        the rejected one. Raises InputError where a row is wrong."""
        of_rows = [sequences_of(self.shape(row, origin)) for row, origin in zip(rows, origins, strict=True)]
        of_sequences = [origin for own, origin in zip(of_rows, origins, strict=True) for _ in own]
        samples = iter(self._encoded([shape for own in of_rows for shape in own], of_sequences))
        return [[sample for _ in own for sample in next(samples)] for own in of_rows]

    def _encoded(self, shapes: Sequence[Single], origins: Sequence[Origin]) -> list[list[Sample]]:
        texts = [self._rendered(shape, origin) for shape, origin in zip(shapes, origins, strict=True)]
        if any(text.trained is not None for text in texts) and not self.tokenizer.is_fast:
            raise InputError(
                "the tokenizer cannot tell which text a token stands for, so that no part of a row can be left out "
                "of the loss; set completion_only_loss and assistant_only_loss to false, or name a tokenizer with a "
                "tokenizer.json"
            )
        encoded = self.tokenizer(
            [text.text for text in texts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        masks = [None if text.trained is None else _mask(text, index, encoded) for index, text in enumerate(texts)]
        return list(map(self._samples, map(list, encoded["input_ids"]), masks, shapes, origins))

    def _rendered(self, shape: Single, origin: Origin) -> Rendered:
        match shape:
            case Chat():
                return self._chats.render(shape, origin)
            case Pair(prompt=prompt, completion=completion):
                text = prompt + completion
                only = self._config.completion_only_loss
                return Rendered(text=text, trained=((len(prompt), len(text)),) if only and prompt else None)
            case Plain(text=text):
                return Rendered(text=text)

    def _samples(self, ids: list[int], mask: list[int] | None, shape: Single, origin: Origin) -> list[Sample]:
        if not ids:
            raise RowError(origin, "becomes no token at all")
        whole = mask is None
        mask = [1] * len(ids) if mask is None else mask
        opening, closing = self._opening[type(shape)], self._closing[type(shape)]
        if ids[: len(opening)] != opening:
            ids, mask = opening + ids, [int(whole)] * len(opening) + mask
        if ids[len(ids) - len(closing) :] != closing:
            ids, mask = ids + closing, mask + mask[-1:] * len(closing)
        full, most, truncation = len(ids), self.max_seq_length, self._config.data.preprocess.truncation
        if full <= most:
            return [Sample(input_ids=ids, mask=mask, full_length=full)]
        if truncation is False:
            raise RowError(origin, f"has {full} tokens, and max_seq_length is {most}; raise it, leave "
                           "the row out, or set preprocess.truncation to true")  # fmt: skip
        if self._pretrains and truncation is None:
            parts = [(ids[start : start + most], mask[start : start + most]) for start in range(0, full, most)]
            return [Sample(input_ids=part, mask=marks, full_length=len(part)) for part, marks in parts]
        return [Sample(input_ids=ids[:most], mask=mask[:most], full_length=full)]

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
    return next((token for place in places if (token := encoded.char_to_token(index, place)) is not None), None)
