"""What all resources of the Fireworks API share: account scope, pages, and `filter` and `orderBy` of lists.

`filter` is the usual part of AIP-160: comparisons of members with values, all of which must hold, such as
`state="JOB_STATE_RUNNING" AND createTime>"2026-01-01T00:00:00Z"`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Path, Query, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, StringConstraints, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError
from sqlalchemy import Connection

from trainmaster.server.core.errors import JobNotFoundError, NotFoundError, SpecError, choice_message
from trainmaster.server.core.fields import Matches, RuleViolation, refuse
from trainmaster.server.core.job import Job
from trainmaster.server.core.workloads.trainer_service import KIND
from trainmaster.server.doors.futures import ok
from trainmaster.server.http.auth import Manager, Principal, Viewer
from trainmaster.server.http.errors import wrong
from trainmaster.server.http.router import PlainText, StrictRoute
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

# JSON of the Fireworks API as protocol buffers write it: the base class of bodies, and types of values.

_DURATION = re.compile(r"(\d{1,12})(\.\d{1,9})?s")


class FireworksBody(BaseModel):
    """A body that clients send: members in camelCase or as the schema has them, unknown ones refused."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    refused: ClassVar[Mapping[str, str]] = {}
    """Members of the schema without effect here, each with the reason: refused unless at their default."""

    @model_validator(mode="before")
    @classmethod
    def _without_refused(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        names = dict(cls.refused)
        names |= {to_camel(name): reason for name, reason in cls.refused.items()}
        refuse(RuleViolation((name,), reason) for name, reason in names.items() if document.get(name))
        return {name: value for name, value in document.items() if name not in names}


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    if _DURATION.fullmatch(value) is None:
        raise PydanticCustomError("rule", "must be a duration such as '1800s'")
    return float(value[:-1])


def _specified(value: str | None) -> str | None:
    return None if not value or value.upper().endswith("_UNSPECIFIED") else value


def _no_truth_value(value: object) -> object:
    if isinstance(value, bool):
        raise PydanticCustomError("rule", "must be a number, not a truth value")
    return value


Whole = Annotated[int, BeforeValidator(_no_truth_value)]
"""A whole number, or a text that spells one, as protocol buffers may write it; `true` is not 1."""
Number = Annotated[float, BeforeValidator(_no_truth_value)]
Duration = Annotated[Number, BeforeValidator(_seconds)]
"""Seconds; on the wire a text such as `1800s`."""
ONE_LINE = Matches(r"[^\x00-\x1f\x7f]*", "must be one line, without control characters")
Line = Annotated[str, StringConstraints(strip_whitespace=True, max_length=256), ONE_LINE]
"""One line; an empty one is as good as none."""
MaybeLine = Annotated[Line | None, AfterValidator(lambda value: value or None)]
Choice = Annotated[Line | None, AfterValidator(_specified)]
"""A value of an enumeration, whose first one stands for nothing."""


def duration(seconds: float) -> str:
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def present(**members: Any) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


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
    field: str
    """As resources show it, with dots between its parts."""
    operator: str
    value: str

    def holds(self, document: Mapping[str, Any]) -> bool:
        """A member that is not set equals an empty text."""
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
    """The conditions of a filter; `members` are those that a resource may have, with dots for nested ones."""
    found: list[Comparison] = []
    text, position = text.strip(), 0
    while position < len(text):
        if (token := _TOKEN.match(text, position)) is None or len(found) == MAX_COMPARISONS:
            message = f"is understood as FIELD=VALUE AND FIELD>VALUE ..., and not at '{text[position : position + 20]}'"
            raise wrong("filter", message)
        field = ".".join(_camel(part) for part in token["field"].split("."))
        if field not in members:
            raise wrong("filter", choice_message("member", token["field"], sorted(members)))
        quoted = token["quoted"]
        value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else token["single"] or token["plain"] or ""
        found.append(Comparison(field=field, operator=token["operator"], value=value))
        position = token.end()
        if joined := _AND.match(text, position):
            position = joined.end()
    return found


def read_order(text: str, known: Mapping[str, str], default: str) -> str:
    """The order of a list in the store's names, which `known` has: `createTime desc` becomes `-created_at`."""
    name, *rest = text.split() or [default]
    member = _camel(name)
    if member not in known or rest not in ([], ["asc"], ["desc"]):
        raise wrong("orderBy", choice_message("order", text, [f"{name} [desc]" for name in known]))
    return f"-{known[member]}" if rest == ["desc"] else known[member]


def masked(document: dict[str, Any], read_mask: str) -> dict[str, Any]:
    """All members for an empty mask or `*`."""
    names = {_camel(part.strip().partition(".")[0]) for part in read_mask.split(",") if part.strip()}
    if not names or "*" in names:
        return document
    return {name: value for name, value in document.items() if name in names}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


MAX_PAGE_SIZE = 200
DEFAULT_PAGE_SIZE = 50

AccountPath = Annotated[str, Path(min_length=1, max_length=256)]
ResourcePath = Annotated[str, Path(min_length=1, max_length=512)]
PageSize = Annotated[int, Query(alias="pageSize", ge=0)]
PageToken = Annotated[PlainText, Query(alias="pageToken")]
ReadMask = Annotated[PlainText, Query(alias="readMask")]

router = APIRouter(
    prefix="/v1/accounts/{account_id}", route_class=StrictRoute, include_in_schema=False, tags=["fireworks"]
)
"""The routes of all resources; the module of each resource adds its own."""


def own(principal: Principal, account_id: str, *others: str) -> Scope:
    """The scope of an account; NotFoundError unless it is the key's own, or one of `others`."""
    if account_id != principal.account_id and account_id not in others:
        raise NotFoundError(f"there is no account {account_id}, or it is not that of your key")
    return principal.scope


async def _viewed(principal: Viewer, account_id: AccountPath) -> Scope:
    return own(principal, account_id)


async def _managed(principal: Manager, account_id: AccountPath) -> Scope:
    return own(principal, account_id)


ViewedScope = Annotated[Scope, Depends(_viewed)]
"""The account in the path of a request that reads. It is the key's own."""
ManagedScope = Annotated[Scope, Depends(_managed)]
"""The account in the path of a request that changes something. It is the key's own."""


def trainer_job(connection: Connection, scope: Scope, name: str) -> Job:
    """A trainer job by its handle or its id; deleted ones, too. Raises JobNotFoundError where there is none."""
    try:
        job = jobs.by_handle(connection, scope, name)
    except JobNotFoundError:
        job = jobs.get(connection, scope, name, deleted=True)
    if job.workload_kind != KIND:
        raise JobNotFoundError(f"job {name} is no trainer")
    return job


def page_size(asked: int) -> int:
    return min(asked, MAX_PAGE_SIZE) or DEFAULT_PAGE_SIZE


def unknown_token() -> SpecError:
    return wrong("pageToken", "is not a token of this list (any more); begin anew")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListQuery:
    """Which resources a list shows, and which members of them."""

    filter: str
    size: int
    token: str
    """Of the page before; empty: the first page is wanted."""
    read_mask: str

    def page(self, name: str, documents: Iterable[tuple[str, dict[str, Any]]], members: Collection[str]) -> Response:
        """The response with a page of `documents`, which have ids; `members` are those that a document may have."""
        conditions = read_filter(self.filter, members)
        fitting = [(each_id, each) for each_id, each in documents if all(one.holds(each) for one in conditions)]
        start = 0
        if self.token:
            ids = [each_id for each_id, _ in fitting]
            if self.token not in ids:
                raise unknown_token()
            start = ids.index(self.token) + 1
        chosen = fitting[start : start + self.size]
        following = chosen[-1][0] if start + self.size < len(fitting) else None
        return listing(name, [masked(each, self.read_mask) for _, each in chosen], following)


async def _list_query(
    filter: PlainText = "",  # noqa: A002 - the protocol's name
    asked: PageSize = 0,
    token: PageToken = "",
    read_mask: ReadMask = "",
) -> ListQuery:
    return ListQuery(filter=filter, size=page_size(asked), token=token, read_mask=read_mask)


Listed = Annotated[ListQuery, Depends(_list_query)]


def listing(name: str, entries: Sequence[Any], next_token: str | None) -> Response:
    return ok({name: list(entries), **({"nextPageToken": next_token} if next_token else {})})
