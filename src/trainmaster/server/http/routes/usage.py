"""Usage: what jobs held, and for how long."""

from __future__ import annotations

import contextlib
import re
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from sqlalchemy import Connection

from trainmaster.schema.reports import Usage, UsageRow
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.http.auth import Viewer, require
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, instant, ok
from trainmaster.server.http.router import PlainText, StrictRoute, errors
from trainmaster.server.store import usage
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.usage import Used


def usage_row(used: Used) -> UsageRow:
    """A group as it is shown."""
    return UsageRow(
        key=used.key,
        jobs=used.jobs,
        attempts=used.attempts,
        gpu_seconds=used.gpu_seconds,
        cpu_seconds=used.cpu_seconds,
        wall_seconds=used.wall_seconds,
    )


router = APIRouter(route_class=StrictRoute, tags=["usage"])

_GROUP = re.compile(rf"{'|'.join(usage.GROUPS)}|{usage.LABEL}[A-Za-z0-9._/-]{{1,63}}")
_LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


@router.get("/usage", response_model=Ok[Usage], responses=errors(HTTPStatus.FORBIDDEN))
async def show_usage(
    request: Request,
    principal: Viewer,
    context: Context,
    since: Annotated[
        PlainText | None, Query(alias="from", description="ISO 8601, or seconds since 1970; default: all time.")
    ] = None,
    until: Annotated[PlainText | None, Query(alias="to", description="The same; default: now.")] = None,
    group_by: Annotated[
        PlainText, Query(description="`job`, `attempt`, `queue`, `account`, `day` (of UTC) or `label:KEY`.")
    ] = "queue",
    all_accounts: Annotated[bool, Query(description="Of every account; needs `cluster_admin`.")] = False,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most groups.")] = 1000,
) -> Response:
    """Add up what attempts used: those that ended, as far as they lie in the interval; those that run, up to now."""
    if not _GROUP.fullmatch(group_by):
        known = ", ".join(usage.GROUPS)
        raise SpecError([Problem(field="group_by", message=f"must be one of {known}, or {usage.LABEL}KEY")])
    scope = principal.scope
    if all_accounts:
        require(request, KeyScope.CLUSTER_ADMIN)
        scope = Scope.everything()
    now = context.clock()
    begin = _moment("from", since) if since else 0.0
    end = _moment("to", until) if until else now
    if end < begin:
        raise SpecError([Problem(field="to", message="must not be before `from`")])

    def find(connection: Connection) -> Usage:
        rows = usage.by_group(connection, scope, group_by, since=begin, until=end, now=now, limit=limit + 1)
        return {
            "from": instant(begin) if since else None,
            "to": instant(end),
            "group_by": group_by,
            "rows": [usage_row(used) for used in rows[:limit]],
            "total": usage_row(usage.total(connection, scope, since=begin, until=end, now=now)),
            "truncated": len(rows) > limit,
        }

    return ok(await context.read(find))


def _moment(field: str, text: str) -> float:
    """A time, in seconds since 1970."""
    seconds = None
    with contextlib.suppress(ValueError):
        seconds = float(text)
    with contextlib.suppress(ValueError, OverflowError):
        # In a query a '+' stands for a space.
        moment = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if seconds is None or not 0 <= seconds <= _LATEST:
        message = "must be a time such as 2025-01-31T12:00:00Z, or seconds since 1970"
        raise SpecError([Problem(field=field, message=message)])
    return seconds
