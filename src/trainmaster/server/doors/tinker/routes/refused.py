"""What public clients can ask for and this server does not do: each says why, and what to do instead."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.doors.bodies import Body
from trainmaster.server.doors.tinker.door import TinkerDoor
from trainmaster.server.doors.tinker.names import Category
from trainmaster.server.doors.tinker.router import By, accepted_failure, answer, ok
from trainmaster.server.http.auth import Principal

REASONS = {
    ("GET", "/audit"): "this server keeps no audit log; GET /v1/events has all that happened to jobs",
    ("GET", "/billing/usage/events"): "nothing is billed here; `trainmaster usage` has GPU- and CPU-hours",
    ("POST", "/auth/token"): "keys are used as they are here; there are no tokens to exchange them for",
    ("DELETE", "/auth/apikey/me"): "a key does not revoke itself here; `trainmaster keys revoke` does",
    ("POST", "/copy_weights"): "weights are not copied here; publish them, and load them by their path",
}

_NO_TRACES = "no traces are kept here; `trainmaster metrics JOB` has what the trainer measures"
_NO_CUSTOM_LOSSES = "losses of one's own run at the client"


def _declare(method: str, path: str, why: str, by: By = By.REFUSED) -> None:
    @answer(method, path, KeyScope.VIEW, by=by, note=why)
    async def refuse(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
        raise RefusedError(why)


for (_method, _path), _why in REASONS.items():
    _declare(_method, _path, _why)
_declare("POST", "/join_sampling_session", "copies of a sampling client choose their numbers themselves", By.UNUSED)


@answer("GET", "/sessions/{session_id}/trace_export", KeyScope.VIEW, by=By.REFUSED, note=_NO_TRACES)
async def trace_export(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Clients ask until it is there, or until they are told that it never will be."""
    return ok({"status": "failed", "error": _NO_TRACES})


@answer("POST", "/create_custom_loss", KeyScope.MANAGE, by=By.UNUSED, note=_NO_CUSTOM_LOSSES)
async def create_custom_loss(request: Request, door: TinkerDoor, principal: Principal) -> Response:  # noqa: ARG001
    """Refused through its future, where clients look for errors."""
    async with Body(request, principal.account_id) as body:
        await body.drain()
    return accepted_failure(_NO_CUSTOM_LOSSES, Category.USER)
