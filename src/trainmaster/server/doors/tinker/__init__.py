"""The root Tinker door, `/api/v1`: what plain Tinker clients talk to. Importing it declares every route."""

from trainmaster.server.doors.tinker import downloads, operations, router, runs, sampling, session_routes

__all__ = ["downloads", "operations", "router", "runs", "sampling", "session_routes"]
