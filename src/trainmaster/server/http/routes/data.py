"""Training data: a look at real rows before anything is trained on them."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection

from trainmaster.server.coordinator.data_checks import DataCheck
from trainmaster.server.coordinator.submission_checks import check_results
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.spec import parse
from trainmaster.server.core.training.hyperparameters import read_hyperparameters
from trainmaster.server.core.training.sources import ModelSource
from trainmaster.server.core.training.types import BUILT_IN
from trainmaster.server.core.workloads.trainer import models_from
from trainmaster.server.http.auth import Manager, Principal
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.forwarded_tokens import FORWARDING_PARAMETERS, forwarded_tokens
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import StrictRoute, body, errors
from trainmaster.server.http.wire.data import CheckedData, ValidateDataBody
from trainmaster.server.storage import BLOBS, blob_path
from trainmaster.server.store import accounts, blobs

router = APIRouter(route_class=StrictRoute, tags=["data"])


@router.post(
    "/data/validate",
    response_model=Ok[CheckedData],
    responses=errors(
        HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    ),
    openapi_extra={**body(ValidateDataBody, required=True), "parameters": FORWARDING_PARAMETERS},
)
async def validate_data(request: Request, principal: Manager, context: Context) -> Response:
    """Read real rows, and show what a model will see of them or what is wrong with which."""
    wanted = parse(ValidateDataBody, parse_json(await read_body(request)))
    if context.data_checks is None:
        raise RefusedError("this server does not look at data")
    if wanted.base_model is not None and wanted.base_model.trust_remote_code and not context.allow_trust_remote_code:
        raise RefusedError(
            "base_model.trust_remote_code: this server does not run code that comes with a model; its operator can "
            "allow that with the setting allow_trust_remote_code"
        )
    document = _document(wanted)

    def look_up(connection: Connection) -> tuple[Account, dict[str, Path]]:
        left = models_from(ModelSource.ARTIFACTS, wanted.base_model, wanted.data)
        check_results(
            connection, principal.scope, [(field.removeprefix("training_config."), name) for field, name in left]
        )
        return accounts.get(connection, principal.scope, principal.account_id), _files(
            connection, principal, context, wanted
        )

    account, files = await context.read(look_up)
    check = DataCheck(
        document=document,
        files=files,
        environment=wanted.environment,
        tokens=await forwarded_tokens(request, context),
        limit=wanted.limit,
    )
    return ok(CheckedData.model_validate(await context.data_checks.run(account, check)))


def _document(wanted: ValidateDataBody) -> dict[str, Any]:
    """What the preparing step of such a job would read."""
    typed = wanted.training_type in BUILT_IN
    return {
        "training_config": {
            "training_type": str(wanted.training_type),
            "base_model": wanted.base_model.model_dump(mode="json") if wanted.base_model else {},
            "hyperparameters": read_hyperparameters(wanted.training_type, wanted.hyperparameters) if typed else {},
        },
        "data_config": wanted.data.model_dump(mode="json"),
    }


def _files(
    connection: Connection, principal: Principal, context: ApiContext, wanted: ValidateDataBody
) -> dict[str, Path]:
    for file in wanted.files:
        if blobs.get(connection, principal.scope, file.sha256) is None:
            raise NotFoundError(f"the file {file.sha256} was not uploaded")
    return {file.path: context.roots.path(BLOBS, blob_path(principal.account_id, file.sha256)) for file in wanted.files}
