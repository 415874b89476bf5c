"""Lists of jobs as JSON. What a list says of a job is kept until the job changes, as most of them do not."""

from __future__ import annotations

import functools
from urllib.parse import parse_qsl

from sqlalchemy import Connection

from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.envelope import encoded
from trainmaster.server.http.wire.jobs import Summary, summary_of
from trainmaster.server.store import job_list, jobs
from trainmaster.server.store.job_list import JobQuery
from trainmaster.server.store.scope import Scope

_MOST_KEPT = 4096
_LONGEST_KEPT = 8 << 10
_LONGEST_QUERY = 1024
ORDERS = ("created_at", "-created_at", "updated_at", "-updated_at", "priority", "-priority", "name", "-name")


class Summaries:
    """Makes the pages of lists. Any thread may use it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], Summary] = {}

    def page(self, connection: Connection, scope: Scope, query: JobQuery, now: float) -> bytes:
        """One page of a list, as JSON: a `JobList`.

        Raises:
            SpecError: the token is not one of such a list.
        """
        index = job_list.index(connection, scope, query)
        found = {key: self._kept.get(key) for key in index.versions.items()}
        missing = [job_id for (job_id, _), summary in found.items() if summary is None]
        if missing:
            loaded = {(job.job_id, job.version): summary_of(job) for job in jobs.load(connection, scope, missing)}
            self._keep(loaded)
            found |= loaded
        entries = b",".join([b"{%b}" % summary.members(now) for summary in found.values() if summary is not None])
        rest = encoded({"next_page_token": index.next_page_token, "total_count": index.total_count})
        return b'{"jobs":[%b],%b' % (entries, rest[1:])

    def _keep(self, summaries: dict[tuple[str, int], Summary]) -> None:
        if len(self._kept) + len(summaries) > _MOST_KEPT:
            self._kept.clear()
        for key, summary in summaries.items():
            if len(summary.head) <= _LONGEST_KEPT:
                self._kept[key] = summary


@functools.lru_cache(1024)
def plain_query(text: bytes, kinds: tuple[str, ...]) -> JobQuery | None:
    """The list that a query string asks for, where it does so plainly; None leaves it to the route's own checks.

    Args:
        text: the query string.
        kinds: those that are listed where it names none.
    """
    if len(text) > _LONGEST_QUERY:
        return None
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        return None
    wanted: dict[str, str] = {}
    statuses: list[JobStatus] = []
    for name, value in pairs:
        if name == "status" and value in JobStatus.__members__:
            statuses.append(JobStatus[value])
        elif name in wanted or name not in ("page_size", "page_token", "order_by") or not value.isprintable():
            return None
        else:
            wanted[name] = value
    size, order_by = wanted.get("page_size", "20"), wanted.get("order_by", "-created_at")
    if len(size) > 3 or not (size.isascii() and size.isdecimal()) or not 1 <= int(size) <= job_list.MAX_PAGE_SIZE:
        return None
    if order_by not in ORDERS:
        return None
    return JobQuery(
        statuses=tuple(statuses),
        kinds=kinds,
        order_by=order_by,
        page_size=int(size),
        page_token=wanted.get("page_token") or None,
    )
