"""The root Tinker door, `/api/v1`: what plain Tinker clients talk to. Importing it declares every route."""

from trainmaster.server.doors.tinker.routes import (
    clients,
    downloads,
    models,
    operations,
    refused,
    runs,
    sampling,
    sessions,
)
from trainmaster.server.doors.tinker.routing import PREFIX, ROUTES, router, shortcuts

__all__ = [
    "PREFIX",
    "ROUTES",
    "clients",
    "downloads",
    "models",
    "operations",
    "refused",
    "router",
    "runs",
    "sampling",
    "sessions",
    "shortcuts",
]
