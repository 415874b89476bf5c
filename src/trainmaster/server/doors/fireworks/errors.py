"""What the Fireworks door refuses: errors as a gRPC status in JSON, and what Fireworks has and this server does not.

Unknown collections get 404, which no public client retries; the generated client would retry 501. Samplers retry 404
for two minutes, as a deployment may be loading weights then: inference is refused with 400.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from enum import IntEnum
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from trainmaster.server.core import errors as core
from trainmaster.server.core.job import Job
from trainmaster.server.doors.fireworks.resources import ManagedScope, ViewedScope, trainer_job
from trainmaster.server.doors.futures import ok
from trainmaster.server.http.auth import Manager, Viewer
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import error_response
from trainmaster.server.http.errors import UnknownRouteError, status_of
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.store import jobs
from trainmaster.server.store.scope import Scope

ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
DOMAIN = "trainmaster"
_RESOURCE = re.compile(r"/v1/accounts/[^/]+/.+", re.DOTALL)
MAX_NAMED = 5
"""Fields that the message of an error names; the details have all of them."""


class Code(IntEnum):
    """The gRPC codes that are used here."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_BY_CLASS: Mapping[type[core.TrainmasterError], tuple[Code, HTTPStatus]] = {
    core.HandleTakenError: (Code.ALREADY_EXISTS, HTTPStatus.CONFLICT),
    # Clients retry a 409, and would get the same answer.
    core.InvalidTransitionError: (Code.FAILED_PRECONDITION, HTTPStatus.BAD_REQUEST),
    core.IdempotencyMismatchError: (Code.INVALID_ARGUMENT, HTTPStatus.BAD_REQUEST),
    core.ConflictError: (Code.ABORTED, HTTPStatus.CONFLICT),
}
_BY_STATUS: Mapping[int, Code] = {
    HTTPStatus.BAD_REQUEST: Code.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: Code.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: Code.PERMISSION_DENIED,
    HTTPStatus.NOT_FOUND: Code.NOT_FOUND,
    HTTPStatus.METHOD_NOT_ALLOWED: Code.UNIMPLEMENTED,
    HTTPStatus.REQUEST_TIMEOUT: Code.DEADLINE_EXCEEDED,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: Code.INVALID_ARGUMENT,
    HTTPStatus.TOO_MANY_REQUESTS: Code.RESOURCE_EXHAUSTED,
    HTTPStatus.BAD_GATEWAY: Code.UNAVAILABLE,
    HTTPStatus.SERVICE_UNAVAILABLE: Code.UNAVAILABLE,
}


def failure_at(path: str, error: core.TrainmasterError, headers: Mapping[str, str] | None) -> Response | None:
    """A gRPC status below `/v1/accounts/ACCOUNT/`; clients of a trainer's address read the HTTP status and message."""
    if _RESOURCE.fullmatch(path) is None:
        return None
    code, status = _codes_of(error)
    said = [f"{problem.field}: {problem.message}" for problem in error.problems]
    about = {
        "@type": ERROR_INFO,
        "reason": error.code,
        "domain": DOMAIN,
        "metadata": {problem.field: problem.message for problem in error.problems},
    }
    document = {"code": int(code), "message": "; ".join(said[:MAX_NAMED]) or error.message, "details": [about]}
    return error_response(document, error, status, headers)


def _codes_of(error: core.TrainmasterError) -> tuple[Code, HTTPStatus]:
    for kind in type(error).__mro__:
        if kind in _BY_CLASS:
            return _BY_CLASS[kind]
    status = status_of(error)
    if status == HTTPStatus.UNPROCESSABLE_ENTITY:
        status = HTTPStatus.BAD_REQUEST
    if status in _BY_STATUS:
        return _BY_STATUS[status], status
    return Code.INTERNAL, HTTPStatus.INTERNAL_SERVER_ERROR


DEPLOYED = (
    "there are no deployments here: sample through the Tinker API, or serve the files of a promoted model elsewhere"
)
_SERVERLESS = "there is no serverless training here: create a trainer with TrainerJobManager"
_BY_THEMSELVES = "submit such jobs with POST /v1/jobs or `trainmaster submit`"
_JUDGED = "there are no evaluators here: run your evaluation as a job of kind command"

COLLECTIONS: Mapping[str, str] = {
    "batchInferenceJobs": DEPLOYED,
    "datasets": "datasets are files here, which jobs name in `data_config`",
    "deployedModels": DEPLOYED,
    "deploymentShapeVersions": DEPLOYED,
    "deploymentShapes": DEPLOYED,
    "deployments": DEPLOYED,
    "dpoJobs": _BY_THEMSELVES,
    "evaluationJobs": _JUDGED,
    "evaluators": _JUDGED,
    "evaluatorsV2": _JUDGED,
    "reinforcementFineTuningJobs": _BY_THEMSELVES,
    "secrets": "secrets belong to jobs here: `workload.environment` of POST /v1/jobs is encrypted",
    "supervisedFineTuningJobs": _BY_THEMSELVES,
    "trainingSessions": _SERVERLESS,
    "users": "there are no users here, only accounts and keys: see `trainmaster keys`",
}
"""By their names below an account."""
PREFIXES: Mapping[str, str] = {
    "/training/v1/serverless/": _SERVERLESS,
    "/inference/": DEPLOYED,
    "/hot_load/": DEPLOYED,
}
_BELOW_ACCOUNT = re.compile(r"/v1/accounts/[^/]+/([^/:]+)")


def absent(path: str) -> core.TrainmasterError | None:
    if found := _BELOW_ACCOUNT.match(path):
        return UnknownRouteError(COLLECTIONS.get(found[1]))
    why = next((why for prefix, why in PREFIXES.items() if path.startswith(prefix)), None)
    return None if why is None else core.RefusedError(why)


router = APIRouter(include_in_schema=False, tags=["fireworks"])


@router.get("/v1/accounts/{account_id}/deployments")
async def list_deployments(scope: ViewedScope) -> Response:  # noqa: ARG001
    """404, as for one deployment: clients look for a deployment before they create it."""
    raise UnknownRouteError(DEPLOYED)


@router.post("/v1/accounts/{account_id}/deployments")
async def create(request: Request, scope: ManagedScope, context: Context) -> Response:
    """Refuse, and cancel the trainer of the deployment unless somebody has used it.

    A client asks for a deployment while its new trainer starts, and does not stop that trainer when there is none.
    """
    document = parse_json(await read_body(request))
    name = document.get("hotLoadTrainerJob") if isinstance(document, dict) else None
    cancelled = await _cancel_unused(context, scope, name.rpartition("/")[2]) if isinstance(name, str) else None
    raise core.RefusedError(DEPLOYED + (f"; trainer {cancelled}, which nobody used, is cancelled" if cancelled else ""))


@router.get("/hot_load/v1/models/hot_load")
async def hot_load_status(principal: Viewer) -> Response:  # noqa: ARG001
    """One replica that has failed. Clients poll for five minutes while this is an error, or lists no replica."""
    replica: dict[str, Any] = {
        "readiness": False,
        "current_snapshot_identity": None,
        "loading_state": {"stage": "error", "message": DEPLOYED},
        "loaded_adapters": [],
    }
    return ok({"replicas": [replica]})


@router.post("/hot_load/v1/models/hot_load")
async def hot_load(principal: Manager) -> Response:  # noqa: ARG001
    raise core.RefusedError(DEPLOYED)


async def _cancel_unused(context: ApiContext, scope: Scope, name: str) -> str | None:
    """The name of the trainer; None if it was not cancelled."""

    def find(connection: Connection) -> Job | None:
        job = trainer_job(connection, scope, name)
        used = jobs.last_use(connection, scope, job.job_id) is not None
        return None if used or job.deleted_at is not None else job

    try:
        if (job := await context.read(find)) is None:
            return None
        await asyncio.wrap_future(context.commands.cancel(scope, job.job_id, message=DEPLOYED))
    except (core.NotFoundError, core.InvalidTransitionError):
        return None
    return job.handle or job.job_id
