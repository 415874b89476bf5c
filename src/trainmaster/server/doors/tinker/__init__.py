"""The root Tinker door, `/api/v1`: what plain Tinker clients talk to. Importing it declares every route."""

from trainmaster.server.doors.door import Door
from trainmaster.server.doors.tinker import downloads, operations, router, runs, sampling, session_routes
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.sessions import collect_sessions

DOOR = Door(
    name="tinker",
    make=TinkerDoor,
    gateway_routers=(router.api_router(), downloads.router),
    shortcuts=router.shortcuts(),
    collect=(collect_sessions,),
)

__all__ = ["DOOR", "downloads", "operations", "runs", "sampling", "session_routes"]
