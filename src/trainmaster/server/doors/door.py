"""What a door is to the server: routes, state, the form of errors. `DOORS` in `server/app.py` lists the doors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.responses import Response

from trainmaster.server.coordinator.retention import Collect
from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.doors.trainers import Trainers
from trainmaster.server.http.auth import Gate
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.router import Handler


class DoorState:
    """What the routes of a door share. Belongs to one event loop."""

    def open(self) -> None:
        """Start background work. Called in the event loop, on servers with the gateway's role."""

    def close(self) -> None:
        """Stop background work. Called in the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    name: str
    """Its state is `request.app.state.NAME`."""
    make: Callable[[ApiContext, Gate, Trainers], DoorState]
    api_routers: Sequence[APIRouter] = ()
    gateway_routers: Sequence[APIRouter] = ()
    shortcuts: Mapping[tuple[str, str], Handler] = field(default_factory=dict)
    """Routes of `gateway_routers` that are looked up by method and path, without a router."""
    failure: Callable[[str, TrainmasterError, Mapping[str, str] | None], Response | None] | None = None
    """The response to a refused request, by its path, where it differs from the envelope of the server's own API."""
    absent: Callable[[str], TrainmasterError | None] | None = None
    """The error for a path of the foreign API that this server does not have; None for other paths."""
    collect: Sequence[Collect] = ()
    """What deletes old records of the door."""
