"""The OpenAPI document: FastAPI's own, with credentials and the bodies that we read ourselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from trainmaster.server.http.requests import ALIAS, PREFIX
from trainmaster.server.http.router import REQUEST_MODELS

DESCRIPTION = f"""Training jobs: submit, follow and control them.

Every route below `{PREFIX}` is also found below `{PREFIX}{ALIAS}`. A good answer is `{{"status": "ok", "data": ...}}`,
a bad one `{{"status": "error", "error": {{"code", "message", ...}}, "meta": {{"request_id"}}}}`; branch on `code`.
Logs, metrics and events are pages of JSON, or server-sent events for `Accept: text/event-stream`.
"""

BY_TOKEN: dict[str, Any] = {"security": [{"attemptToken": []}]}
"""For `openapi_extra`: the route wants an attempt's token."""
BY_RANK_TOKEN: dict[str, Any] = {"security": [{"rankToken": []}]}
"""For `openapi_extra`: the route wants the token of an attempt's ranks."""
BY_EITHER: dict[str, Any] = {"security": [{"bearer": []}, {"apiKey": []}, {"attemptToken": []}]}
"""For `openapi_extra`: the route takes a key or a token."""
OPEN: dict[str, Any] = {"security": []}
"""For `openapi_extra`: the route is answered to anybody."""

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "An API key."},
    "attemptToken": {"type": "http", "scheme": "bearer", "description": "The token of one attempt's worker."},
    "rankToken": {"type": "http", "scheme": "bearer", "description": "The token of one attempt's ranks."},
}


def install(app: FastAPI, version: str) -> None:
    """Make the application describe itself."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title="Trainmaster", version=version, description=DESCRIPTION, routes=app.routes)
            components = document.setdefault("components", {})
            schemas = components.setdefault("schemas", {})
            schemas.update(_request_schemas())
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            components["securitySchemes"] = _SCHEMES
            document["security"] = [{"bearer": []}, {"apiKey": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _request_schemas() -> dict[str, Any]:
    # The mode is part of the names that pydantic chooses only when both are asked for.
    _, document = models_json_schema(
        [(model, "validation") for model in REQUEST_MODELS.values()], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Any] = document.get("$defs", {})
    return schemas
