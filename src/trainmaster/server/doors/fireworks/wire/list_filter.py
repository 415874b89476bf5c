"""`filter` and `orderBy` of lists: the part of AIP-160 that people use.

`state="JOB_STATE_RUNNING" AND createTime>"2026-01-01T00:00:00Z"`: comparisons of members with values, all of which
must hold.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.server.core.errors import Problem, SpecError, choice_message

MAX_COMPARISONS = 32

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<field>[A-Za-z_][A-Za-z0-9_.]*)\s*
        (?P<operator><=|>=|!=|=|<|>|:)\s*
        (?:"(?P<quoted>(?:[^"\\]|\\.)*)"|'(?P<single>[^']*)'|(?P<plain>[^\s()"']+))
    )""",
    re.VERBOSE,
)
_AND = re.compile(r"\s+AND\s+|\s+")
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ":": lambda there, wanted: wanted == "*" or wanted in there if isinstance(there, str) else there == wanted,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One condition."""

    field: str
    """As resources show it, with dots between its parts."""
    operator: str
    value: str

    def holds(self, document: Mapping[str, Any]) -> bool:
        """Whether it holds for a resource as it is shown; a member that is not set equals an empty text."""
        there: Any = document
        for part in self.field.split("."):
            there = there.get(part) if isinstance(there, Mapping) else None
        if there is None:
            there = ""
        wanted: Any = self.value
        if isinstance(there, bool):
            there = str(there).lower()
            wanted = wanted.lower()
        elif isinstance(there, int | float):
            try:
                wanted = float(wanted)
            except ValueError:
                return self.operator == "!="
        return isinstance(there, str | int | float) and bool(_OPERATORS[self.operator](there, wanted))


def read_filter(text: str, members: Collection[str]) -> Sequence[Comparison]:
    """The conditions of a filter; none of an empty one.

    Args:
        text: what was asked for.
        members: what a resource of the list may show, with dots between the parts of a name.

    Raises:
        SpecError: it says more than is understood here, or names what no resource shows.
    """
    found: list[Comparison] = []
    text, position = text.strip(), 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or len(found) == MAX_COMPARISONS:
            message = f"is understood as FIELD=VALUE AND FIELD>VALUE ..., and not at '{text[position : position + 20]}'"
            raise SpecError([Problem(field="filter", message=message)])
        field = ".".join(_camel(part) for part in token["field"].split("."))
        if field not in members:
            message = choice_message("member", token["field"], sorted(members))
            raise SpecError([Problem(field="filter", message=message)])
        quoted = token["quoted"]
        value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else token["single"] or token["plain"] or ""
        found.append(Comparison(field=field, operator=token["operator"], value=value))
        position = token.end()
        joined = _AND.match(text, position)
        if joined is not None:
            position = joined.end()
    return found


def read_order(text: str, known: Mapping[str, str], default: str) -> str:
    """The order of a list as the store has it: `createTime desc` becomes `-created_at`.

    Args:
        text: what was asked for; empty stands for the default.
        known: the members that a list can be ordered by, and what the store calls them.
        default: one of those.

    Raises:
        SpecError: it cannot be ordered so.
    """
    name, *rest = text.split() or [default]
    member = _camel(name)
    if member not in known or rest not in ([], ["asc"], ["desc"]):
        message = choice_message("order", text, [f"{name} [desc]" for name in known])
        raise SpecError([Problem(field="orderBy", message=message)])
    return f"-{known[member]}" if rest == ["desc"] else known[member]


def masked(document: dict[str, Any], read_mask: str) -> dict[str, Any]:
    """The members of a resource that a mask names; all of them for an empty one or `*`."""
    names = {_camel(part.strip().partition(".")[0]) for part in read_mask.split(",") if part.strip()}
    if not names or "*" in names:
        return document
    return {name: value for name, value in document.items() if name in names}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)
