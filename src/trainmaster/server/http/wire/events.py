"""Events of jobs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import ConfigDict, Field

from trainmaster.server.core.job import Event
from trainmaster.server.http.envelope import Wire
from trainmaster.server.http.wire.reported import clean, instant


class EventResource(Wire):
    """One thing that happened to a job."""

    model_config = ConfigDict(serialize_by_alias=True, validate_by_name=True)

    job_id: str
    seq: int = Field(description="Numbers the events of a job, without gaps.")
    ts: datetime
    type: str
    from_: str | None = Field(alias="from", description="The status before, where it changed.")
    to: str | None
    actor: str
    reason: str | None
    attempt: int
    message: str
    data: dict[str, Any]


class FeedEvent(EventResource):
    """One thing that happened, in the feed of all jobs."""

    id: int = Field(description="The feed's cursor.")


class EventPage(Wire):
    """Events in order."""

    events: list[EventResource]
    next_cursor: int = Field(description="Send it as `after` to go on.")


class FeedPage(Wire):
    """Events of all jobs in order."""

    events: list[FeedEvent]
    next_cursor: int = Field(description="Send it as `after` to go on.")


def event_resource(event: Event) -> EventResource:
    """An event as it is shown."""
    return EventResource(**_fields(event))


def feed_event(cursor: int, event: Event) -> FeedEvent:
    """An event as the feed shows it."""
    return FeedEvent(**_fields(event), id=cursor)


def _fields(event: Event) -> dict[str, Any]:
    return {
        "job_id": event.job_id,
        "seq": event.seq,
        "ts": instant(event.at),
        "type": event.type,
        "from_": event.from_status,
        "to": event.to_status,
        "actor": event.actor,
        "reason": event.reason,
        "attempt": event.attempt,
        "message": clean(event.message),
        "data": clean(dict(event.data)),
    }
