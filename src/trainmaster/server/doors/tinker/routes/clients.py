"""What clients ask before anything else: settings, capabilities, whose key they hold."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.router import answer, ok
from trainmaster.server.http.auth import Principal
from trainmaster.server.http.requests import read_body

MAX_TELEMETRY_BYTES = 8 << 20


@answer("GET", "/healthz", KeyScope.VIEW)
async def healthz(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """The server is there; trainers are started when they are needed."""
    return ok({"status": "ok"})


@answer("POST", "/client/config", KeyScope.VIEW, note="the client's own defaults")
async def client_config(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """What a client's defaults are changed to: nothing. What is not built here is off by default."""
    return ok({})


@answer("POST", "/client/dynamic_config", KeyScope.VIEW, note="samples that nobody waits for are cancelled")
async def client_dynamic_config(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """What a client's defaults are changed to while it runs."""
    return ok({"sample_cancel_enabled": True})


@answer("POST", "/telemetry", KeyScope.VIEW, note="taken, and not kept")
async def telemetry(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Take what clients say of themselves; they would send it again and again."""
    await read_body(request, MAX_TELEMETRY_BYTES)
    return ok({"status": "accepted"})


@answer("GET", "/get_server_capabilities", KeyScope.VIEW, note="the names that the operator gave with --model-alias")
async def get_server_capabilities(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """The base models that can be asked for; without those that no trainer can hold."""

    def look() -> list[dict[str, Any]]:
        return [
            {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
            for name in door.context.models.names
            if (length := door.supply.context_length(principal.scope, name)) is not None
        ]

    # Models may lie on a disk that does not answer, which must not keep everybody else waiting.
    return ok({"supported_models": await run_in_threadpool(look)})


@answer("GET", "/auth/apikey/me", KeyScope.VIEW)
async def own_key(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Whose key it is that came with the request."""
    return ok(
        {
            # Clients want a number; the end of the id is one.
            "key_id": int(principal.key_id.removeprefix("key-"), 16),
            "name": principal.name,
            "note": principal.key_id,
            "details": {
                "org_details": {"name": principal.account_id},
                "user_details": {"email": principal.name},
            },
        }
    )
