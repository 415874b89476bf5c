"""What the routes of the door have in common: whose things an address names, lists a page at a time."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query, Response
from sqlalchemy import Connection

from trainmaster.server.core.errors import JobNotFoundError, NotFoundError, Problem, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.workloads.trainer_service import KIND
from trainmaster.server.doors.fireworks.wire.list_filter import masked, read_filter
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.envelope import JSON
from trainmaster.server.http.params import PlainText
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

MAX_PAGE_SIZE = 200
DEFAULT_PAGE_SIZE = 50

AccountPath = Annotated[str, Path(min_length=1, max_length=256)]
ResourcePath = Annotated[str, Path(min_length=1, max_length=512)]
Filter = Annotated[PlainText, Query(description="Conditions on members, joined by AND.")]
PageSize = Annotated[int, Query(alias="pageSize", ge=0, description=f"At most {MAX_PAGE_SIZE}; more means that.")]
PageToken = Annotated[PlainText, Query(alias="pageToken", description="From the page before.")]
ReadMask = Annotated[PlainText, Query(alias="readMask", description="The members to show; empty: all.")]

T = TypeVar("T")


def answer(document: object) -> Response:
    """A good answer; there is no envelope around it."""
    return Response(json.dumps(document), media_type=JSON)


def own(principal: Principal, account_id: str, *others: str) -> Scope:
    """The scope of the account that an address names, which must be that of the key.

    Raises:
        NotFoundError: it is another one, of which nobody is told whether it is there.
    """
    if account_id != principal.account_id and account_id not in others:
        raise NotFoundError(f"there is no account {account_id}, or it is not that of your key")
    return principal.scope


def trainer_job(connection: Connection, scope: Scope, name: str) -> Job:
    """A trainer job by what clients call it: its handle or, without one, its id. One that was deleted is found too.

    Raises:
        JobNotFoundError: there is none.
    """
    try:
        job = jobs.by_handle(connection, scope, name)
    except JobNotFoundError:
        job = jobs.get(connection, scope, name, deleted=True)
    if job.workload_kind != KIND:
        raise JobNotFoundError(f"job {name} is no trainer")
    return job


def page_size(asked: int, default: int = DEFAULT_PAGE_SIZE) -> int:
    """How many entries a page has."""
    return min(asked, MAX_PAGE_SIZE) or default


def unknown_token() -> SpecError:
    """What to say of a token that a list does not have."""
    message = "is not a token of this list (any more); begin anew"
    return SpecError([Problem(field="pageToken", message=message)])


def page_of(entries: Sequence[tuple[str, T]], size: int, token: str) -> tuple[list[T], str | None]:
    """A page of a list that is at hand, by the ids of its entries; and the token of the next one.

    Raises:
        SpecError: the token is none of this list.
    """
    start = 0
    if token:
        ids = [entry_id for entry_id, _ in entries]
        if token not in ids:
            raise unknown_token()
        start = ids.index(token) + 1
    chosen = entries[start : start + size]
    more = start + size < len(entries)
    return [entry for _, entry in chosen], chosen[-1][0] if more and chosen else None


def filtered(
    name: str,
    documents: Iterable[tuple[str, dict[str, Any]]],
    *,
    members: Collection[str],
    condition: str,
    asked: int,
    token: str,
    mask: str,
) -> Response:
    """The answer to a list that is at hand, with the ids of its entries: those that fit, a page of them.

    Args:
        name: of the list.
        documents: the entries as they are shown.
        members: what an entry may show.
        condition: the filter.
        asked: how many entries a page is to have.
        token: where the page begins.
        mask: the members to show.
    """
    conditions = read_filter(condition, members)
    fitting = [(each_id, each) for each_id, each in documents if all(one.holds(each) for one in conditions)]
    entries, following = page_of(fitting, page_size(asked), token)
    return listing(name, [masked(each, mask) for each in entries], following)


def listing(name: str, entries: Sequence[Any], next_token: str | None) -> Response:
    """The answer to a list."""
    return answer({name: list(entries), **({"nextPageToken": next_token} if next_token else {})})
