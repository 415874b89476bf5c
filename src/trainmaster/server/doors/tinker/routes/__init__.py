"""The root Tinker door, `/api/v1`: what plain Tinker clients talk to. Importing it declares every route."""

from trainmaster.server.doors.tinker.router import PREFIX, ROUTES, router, shortcuts
from trainmaster.server.doors.tinker.routes import downloads, operations, runs, sampling, sessions

__all__ = ["PREFIX", "ROUTES", "downloads", "operations", "router", "runs", "sampling", "sessions", "shortcuts"]
