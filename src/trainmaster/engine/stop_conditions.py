"""When a continuation ends: at a token, or at a string in its text, wherever the borders of tokens lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainmaster.engine.types import EngineError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no character, among them those of one that is not whole yet."""
_CONTEXT_TOKENS = 4
"""Of the prompt: some tokenizers drop the space before the first token that they write."""
_UNFINISHED_TOKENS = 3
"""A character has at most 4 bytes, and a token at least one: so many can wait for its last one."""


def end_tokens(directory: Path) -> frozenset[int]:
    """The tokens that end a text, as a checkpoint says: its generation configuration before the model's own."""
    for name in ("generation_config.json", "config.json"):
        settings = _settings(directory / name)
        ids = settings.get("eos_token_id")
        if ids is None:
            ids = (settings.get("text_config") or {}).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        EngineError: there is none that can be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"stop strings need the model's tokenizer.json, and {directory} has none; stop at token ids")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise EngineError(f"stop strings need the model's tokenizer, and {path} cannot be read: {error}") from error


class StringWatch:
    """Looks for strings in the text of tokens that come one by one.

    Tokens are not pieces of text: a character may be spread over several, and how a token is written may depend on
    the one before. So a token is decoded together with those before it, and what may be half a character waits for
    the rest of it.

    Args:
        tokenizer: of the model.
        strings: what to look for; none of them empty.
        prompt: the tokens before the first one; a string that begins in their text is not found.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._kept_chars = max(map(len, strings)) - 1
        self._text = ""
        """The end of the text that is settled, as long as half a string may be."""
        self._window = list(prompt[-_CONTEXT_TOKENS:])
        """The last tokens that are settled, and those that are not."""
        self._settled = len(self._window)
        self._known = self._decoded(self._window).rstrip(UNFINISHED)
        """The text of the settled tokens of the window."""

    def finds_with(self, token: int) -> bool:
        """Take the next token: whether the text up to it has one of the strings."""
        self._window.append(token)
        text = self._decoded(self._window)
        waits = text.endswith(UNFINISHED)
        fresh = self._text + text[len(self._known) :]
        if self._has(fresh.rstrip(UNFINISHED) if waits else fresh):
            return True
        if not waits:
            self._settle(len(self._window), text)
        elif len(self._window) - self._settled > _UNFINISHED_TOKENS:
            upto = len(self._window) - _UNFINISHED_TOKENS
            self._settle(upto, self._decoded(self._window[:upto]))
        return False

    def _settle(self, upto: int, text: str) -> None:
        grown = self._text + text[len(self._known) :]
        self._text = grown[-self._kept_chars :] if self._kept_chars else ""
        self._window = self._window[self._settled :]
        self._settled = upto - self._settled
        self._known = self._decoded(self._window[: self._settled])

    def _has(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    settings = json.loads(path.read_text(encoding="utf-8"))
    return settings if isinstance(settings, dict) else {}
