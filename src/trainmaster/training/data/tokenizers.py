"""Loads a job's tokenizer with its options, renders conversations by its chat template, and finds the length limit."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.server.core.spec.data import PreprocessConfig
from trainmaster.server.core.training.options import positions_of, refused_arguments, too_long
from trainmaster.training.data.shapes import ASSISTANT, Chat
from trainmaster.training.document import parsed
from trainmaster.training.steps import InputError, Origin, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_NO_LENGTH = 10**9
"""Tokenizers without a limit have a larger number."""


def load_tokenizer(
    directory: Path, preprocess: PreprocessConfig, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Raises InputError where the tokenizer cannot be loaded with the job's options."""
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
    """The most tokens of a sample: what the job says, or what its model, or else its tokenizer, was made for.

    Args:
        wanted: what the job says.
        directories: of the model, then of the tokenizer.
        model_kwargs: further arguments for loading the model, which may change how many positions it has.

    Raises:
        InputError: nobody says, or the model has fewer positions than the job wants.
    """
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
        """The text of a conversation, and the parts of it that are trained on.

        Raises:
            InputError: there is no template, or it cannot tell what the assistant says.
            RowError: the template refuses the row, or there is nothing in it to train on.
        """
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
                               "set completion_only_loss to false, or change the template", "prompt")  # fmt: skip
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
            return self._marked(marked, chat, origin)
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

    def _marked(self, template: str, chat: Chat, origin: Origin) -> tuple[str, tuple[Span, ...]]:
        texts, spans = self._rendered(template, chat, chat.messages, origin, return_assistant_tokens_mask=True)
        return texts[0], tuple((start, end) for start, end in spans[0] if end > start)

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


def _marked_by_trl(template: str) -> str | None:
    """TRL's version of a well-known template, with the assistant's parts marked; None where TRL has none."""
    if template not in _MARKED:
        _MARKED[template] = _look_up(template)
    return _MARKED[template]


_MARKED: dict[str, str | None] = {}


def _look_up(template: str) -> str | None:
    found = importlib.util.find_spec("trl")  # not imported, which takes seconds
    for place in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(place, "chat_templates").glob("*_training.jinja")):
            original = path.with_name(path.name.replace("_training", ""))
            if original.is_file() and original.read_text() == template:
                return path.read_text()
    return None
