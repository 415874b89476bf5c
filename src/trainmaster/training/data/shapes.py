"""The shape of a row, the first that it has: `messages`, `prompt` with `completion`, or plain `text`; or a preference:
`prompt` with `chosen` and `rejected`, or with `completion` and `label`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainmaster.training.data.formats import kind_of
from trainmaster.training.data.row_selection import MISSING, value_at
from trainmaster.training.steps import Origin, RowError

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    messages: list[dict[str, Any]]
    prompt_messages: int = 0
    """How many of them are the prompt; the rest is the completion. 0: there is no such division."""
    tools: list[dict[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    text: str


Single = Chat | Pair | Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Chat | Pair
    rejected: Chat | Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An answer to a prompt, and whether it was liked."""

    answer: Chat | Pair
    liked: bool


Shape = Single | Preference | Judged


def sequences_of(shape: Shape) -> tuple[Single, ...]:
    """What becomes a token sequence each."""
    match shape:
        case Preference(chosen=chosen, rejected=rejected):
            return chosen, rejected
        case Judged(answer=answer):
            return (answer,)
    return (shape,)


class Wanted(StrEnum):
    """What a training reads of its rows."""

    TEXT = "text"
    EXAMPLES = "examples"
    PREFERENCES = "preferences"
    JUDGEMENTS = "judgements"


def shape_of(row: Mapping[str, Any], mapping: Mapping[str, str], origin: Origin, wanted: Wanted) -> Shape:
    """The shape of a row, whose fields have the names in `mapping`. Raises RowError where it has none."""
    reader = _Reader(row, mapping, origin)
    if wanted is Wanted.TEXT:
        return Plain(text=reader.text("text"))
    if wanted is Wanted.PREFERENCES:
        return reader.preference()
    if wanted is Wanted.JUDGEMENTS:
        return reader.judged()
    if reader.has("messages"):
        return reader.chat(reader.messages("messages"))
    if reader.has("prompt") and reader.has("completion"):
        return reader.pair()
    if reader.has("text"):
        return Plain(text=reader.text("text"))
    raise reader.nothing()


class _Reader:
    def __init__(self, row: Mapping[str, Any], mapping: Mapping[str, str], origin: Origin) -> None:
        self._row = row
        self._mapping = mapping
        self._origin = origin

    def has(self, name: str) -> bool:
        return self._value(name) is not MISSING

    def text(self, name: str) -> str:
        value = self._value(name)
        if value is MISSING:
            raise self.nothing(name)
        if not isinstance(value, str):
            raise self._error(name, f"is {kind_of(value)}; expected text")
        if not value.strip():
            raise self._error(name, 'is empty; leave such rows out with a filter such as {"op": "matches", "value": '
                              '"\\\\S"}')  # fmt: skip
        return value

    def messages(self, name: str) -> list[dict[str, Any]]:
        value = self._unpacked(name)
        if not isinstance(value, list):
            raise self._error(name, f"is {kind_of(value)}; expected a list of messages with role and content")
        if not value:
            raise self._error(name, "is an empty list; expected messages with role and content")
        return [self._message(name, number, each) for number, each in enumerate(value, 1)]

    def chat(self, messages: list[dict[str, Any]], prompt_messages: int = 0) -> Chat:
        tools = self._unpacked("tools") if self.has("tools") else None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
            raise self._error("tools", f"is {kind_of(tools)}; expected a list of objects")
        arguments = self._unpacked("chat_template_kwargs") if self.has("chat_template_kwargs") else {}
        if not isinstance(arguments, dict):
            raise self._error("chat_template_kwargs", f"is {kind_of(arguments)}; expected an object")
        return Chat(
            messages=messages,
            prompt_messages=prompt_messages,
            tools=_without_nulls(tools) or None,
            template_arguments=_without_nulls(arguments),
        )

    def pair(self, answer: str = "completion") -> Chat | Pair:
        listed = [name for name in ("prompt", answer) if isinstance(self._unpacked(name), list)]
        if len(listed) == 1:
            other = answer if listed == ["prompt"] else "prompt"
            raise self._error(other, f"is {kind_of(self._value(other))}, and '{listed[0]}' a list of messages; "
                              "expected both as text, or both as messages")  # fmt: skip
        if listed:
            prompt = self.messages("prompt")
            return self.chat(prompt + self.messages(answer), prompt_messages=len(prompt))
        prompt_text = self._value("prompt")
        if not isinstance(prompt_text, str):
            raise self._error("prompt", f"is {kind_of(prompt_text)}; expected text, or a list of messages")
        return Pair(prompt=prompt_text, completion=self.text(answer))

    def preference(self) -> Preference:
        for name in ("chosen", "rejected"):
            if not self.has(name):
                raise self.nothing(name)
        if self.has("prompt"):
            found = Preference(chosen=self.pair("chosen"), rejected=self.pair("rejected"))
        else:
            found = self._conversations()
        if found.chosen == found.rejected:
            raise self._error("rejected", "is the same as 'chosen'; leave such rows out: nothing can be learnt of them")
        return found

    def judged(self) -> Judged:
        for name in ("prompt", "completion", "label"):
            if not self.has(name):
                raise self.nothing(name)
        liked = self._value("label")
        if not isinstance(liked, bool) and liked not in (0, 1):
            raise self._error("label", f"is {kind_of(liked)}; expected true for a liked answer, or false")
        return Judged(answer=self.pair(), liked=bool(liked))

    def _conversations(self) -> Preference:
        """Two conversations; what they begin with in common is the prompt."""
        for name in ("chosen", "rejected"):
            if not isinstance(self._unpacked(name), list):
                raise self.nothing("prompt")
        chosen, rejected = self.messages("chosen"), self.messages("rejected")
        common = 0
        while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
            common += 1
        if common == 0:
            raise self._error("rejected", "begins with another message than 'chosen'; the conversations must have the "
                              "prompt in common, or give it in 'prompt'")  # fmt: skip
        if chosen != rejected and common == min(len(chosen), len(rejected)):
            raise self._error("rejected", "and 'chosen' do not each end with a message of their own")
        common = min(common, len(chosen) - 1)
        return Preference(chosen=self.chat(chosen, common), rejected=self.chat(rejected, common))

    def nothing(self, only: str | None = None) -> RowError:
        has = ", ".join(self._row) or "none"
        lost = [f"'{column}' for {name}" for name, column in self._mapping.items() if not self.has(name)]
        if lost:
            expected = f"has no column {', '.join(lost)}, which field_mapping names"
        elif only:
            expected = f"has no `{only}`, which this training type needs"
        else:
            expected = "has no `messages`, no `prompt` with `completion` and no `text`"
        looked_for = (only,) if only else ("messages", "prompt", "completion", "text")
        columns = map(self._column, looked_for)
        if empty := " and ".join(f"'{column}'" for column in columns if value_at(self._row, column) is None):
            return RowError(self._origin, f"has nothing in {empty}; fill it in, or leave such rows out with `filters`")
        advice = "" if lost else "; name the column that is meant with preprocess.field_mapping"
        return RowError(self._origin, f"{expected}; its columns are {has}{advice}")

    def _value(self, name: str) -> Any:
        """The value of a field; null counts as absent."""
        value = value_at(self._row, self._column(name))
        return MISSING if value is None else value

    def _column(self, name: str) -> str:
        """The mapped name of a field, or its own in a source that has no such column."""
        mapped = self._mapping.get(name, name)
        return name if value_at(self._row, mapped) is MISSING and name in self._row else mapped

    def _unpacked(self, name: str) -> Any:
        value = self._value(name)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                return json.loads(value)
            except ValueError:
                return value
        return value

    def _message(self, name: str, number: int, message: Any) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise self._error(name, f"message {number} is {kind_of(message)}; expected an object with role and content")
        if not isinstance(message.get("role"), str):
            has = ", ".join(message) or "nothing"
            raise self._error(name, f"message {number} has no role, but {has}; expected role and content")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise self._error(name, f"message {number} ({message['role']}) has no content")
        if isinstance(content, list):
            kinds = {str(part.get("type")) if isinstance(part, dict) else "?" for part in content}
            if kinds - {"text"}:
                raise self._error(name, f"message {number} holds {', '.join(sorted(kinds - {'text'}))}; only text "
                                  "can be trained on")  # fmt: skip
        elif content is not None and not isinstance(content, str):
            raise self._error(name, f"message {number}: its content is {kind_of(content)}; expected text")
        return {**_without_nulls(message), "content": "" if content is None else content}

    def _error(self, name: str, problem: str) -> RowError:
        return RowError(self._origin, problem, self._column(name))


def _without_nulls(value: Any) -> Any:
    """Tables fill in keys that only other rows have; a template would take them as given."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
