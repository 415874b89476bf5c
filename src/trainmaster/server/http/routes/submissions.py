"""Submit and validate jobs and training data; large requests in threads, so that the event loop answers others."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Annotated, Any, Self, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import Field, Strict, model_validator
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.secrets import SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.schema.data import CheckedData
from trainmaster.schema.jobs import CheckedJob, SubmittedJob
from trainmaster.server.coordinator.admission import check_results
from trainmaster.server.coordinator.data_checks import DataCheck
from trainmaster.server.core.accounts import Account, KeyScope
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.fields import Environment, Model, RuleViolation, StringMap, refuse
from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataConfig, PreprocessConfig, Sources
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.training.hyperparameters import read_hyperparameters
from trainmaster.server.core.training.sources import ModelSource
from trainmaster.server.core.training.types import BUILT_IN, TrainingType
from trainmaster.server.core.workloads.base import UploadedFile
from trainmaster.server.core.workloads.trainer import models_from
from trainmaster.server.http.auth import Manager, Principal, credential_of, guard, require
from trainmaster.server.http.context import ApiContext, Context, context_of
from trainmaster.server.http.envelope import Ok, ok, resource
from trainmaster.server.http.errors import wrong
from trainmaster.server.http.requests import PREFIX, REPLAYED, idempotency_of, parse_json, read_body, read_model
from trainmaster.server.http.router import RawRoute, StrictRoute, answers
from trainmaster.server.http.routes.blobs import blob_file
from trainmaster.server.http.token_exchange import MAX_TOKEN_LENGTH
from trainmaster.server.store import accounts, job_inputs

HEADERS = {SCAIDRIVE_TOKEN: "X-ScaiDrive-Token", SCAIATLAS_TOKEN: "X-ScaiAtlas-Token"}
"""The secret that each header becomes."""
FORWARDING_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": header,
        "in": "header",
        "required": False,
        "description": "Your token for that service, kept encrypted until the job ends.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN_LENGTH, "pattern": r"^[!-~]+$"},
    }
    for header in HEADERS.values()
]

_TOKEN = re.compile(r"[!-~]+")


async def forwarded_tokens(request: Request, context: ApiContext) -> dict[str, str]:
    """The tokens that a request forwards to its job; missing ones come from the token exchange, if there is one."""
    tokens = {name: token for name, header in HEADERS.items() if (token := request.headers.get(header))}
    for name, token in tokens.items():
        if len(token) > MAX_TOKEN_LENGTH or not _TOKEN.fullmatch(token):
            raise wrong(HEADERS[name], f"must have at most {MAX_TOKEN_LENGTH} printable characters without spaces")
    if context.token_exchange is None or len(tokens) == len(HEADERS):
        return tokens
    missing = [name for name in HEADERS if name not in tokens]
    return {**tokens, **await context.token_exchange.tokens(credential_of(request), missing)}


T = TypeVar("T")

LARGE_BYTES = 32 << 10
"""Larger bodies take more than a few milliseconds; a thread costs a fraction of one."""
AT_ONCE = 2
"""Threads with large requests: they compete with the event loop for the interpreter."""


class Submissions:
    """Reads, checks and submits requests for new jobs. Belongs to one event loop."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def run(self, work: Callable[[], T], *, large: bool) -> T:
        """Work for a request: at once, or in a thread if the request is large."""
        if not large:
            return work()
        async with self._slots:
            return await run_in_threadpool(work)

    async def read(self, document: bytes, account_id: str) -> SubmitJobRequest:
        seed = new_seed()
        wanted = await self.run(lambda: parse_submit(parse_json(document), seed=seed), large=is_large(document))
        return await self._context.commands.admission.look_up(wanted, account_id)

    async def submit(
        self, request: Request, principal: Principal, wanted: SubmitJobRequest, *, document: bytes, large: bool
    ) -> Response:
        """Submit a checked request, with the body `document`; returns when the job is on disk."""
        tokens = await forwarded_tokens(request, self._context)
        idempotency = idempotency_of(request, document)
        submission = await self.run(
            lambda: self._context.commands.submit(
                principal.scope, wanted, created_by=principal.name, tokens=tokens, idempotency=idempotency
            ),
            large=large,
        )
        outcome = await asyncio.wrap_future(submission)
        job = outcome.job
        submitted = resource(
            SubmittedJob,
            job,
            message=f"job {job.handle or job.job_id} was accepted",
            estimated_wait_seconds=None,
            checkpoint_id=job.resume_checkpoint_id,
        )
        return ok(submitted, HTTPStatus.CREATED, REPLAYED if outcome.replayed else None)


_seeds = random.Random()
"""Not the system's: reading that for every request releases the interpreter lock."""


def new_seed() -> int:
    """For a training that names none; it is stored with the job."""
    return _seeds.getrandbits(31)


def is_large(document: bytes) -> bool:
    return len(document) >= LARGE_BYTES


def submissions_of(request: Request) -> Submissions:
    submissions: Submissions = request.app.state.submissions
    return submissions


router = APIRouter(prefix=PREFIX, route_class=RawRoute, tags=["jobs"])


@router.post(
    "/jobs",
    status_code=HTTPStatus.CREATED,
    **answers(
        SubmittedJob, 400, 409, body=SubmitJobRequest, required=True, keyed=True, parameters=FORWARDING_PARAMETERS
    ),
)
@guard
async def submit(request: Request) -> Response:
    """Submit a job.

    The answer comes when the job is on disk; it is admitted, queued and run from then on, whatever happens.
    """
    principal = require(request, KeyScope.MANAGE)
    submissions = submissions_of(request)
    document = await read_body(request)
    wanted = await submissions.read(document, principal.account_id)
    return await submissions.submit(request, principal, wanted, document=document, large=is_large(document))


@router.post(
    "/jobs/validate",
    **answers(CheckedJob, 400, 409, body=SubmitJobRequest, required=True, parameters=FORWARDING_PARAMETERS),
)
@guard
async def validate(
    request: Request,
    render: Annotated[  # noqa: ARG001 - declared for the OpenAPI document; a raw route gets only the request
        bool, Query(description="Also show what the backend would send to its engine.")
    ] = False,
) -> Response:
    """See whether a job would be accepted, without submitting it, and which of its files have to be uploaded first.

    What is refused is refused as by a submission. Nothing is kept.
    """
    context = context_of(request)
    principal = require(request, KeyScope.MANAGE)
    submissions = submissions_of(request)
    document = await read_body(request)
    wanted = await submissions.read(document, principal.account_id)
    await forwarded_tokens(request, context)
    check = await submissions.run(
        lambda: context.commands.check(principal.scope, wanted, created_by=principal.name), large=is_large(document)
    )
    job, launch = await asyncio.wrap_future(check)
    rendered = None
    if request.query_params.get("render") == "true":
        rendered = await run_in_threadpool(context.render, job, launch)
    shipped = {file.sha256 for file in wanted.workload.files} if wanted.workload else set()
    missing = set(await context.read(job_inputs.missing_blobs, principal.scope, shipped))

    def lost() -> set[str]:
        return {each for each in shipped - missing if not blob_file(context, principal.account_id, each).exists()}

    return ok(CheckedJob(missing_blobs=sorted(missing | await run_in_threadpool(lost)), rendered=rendered))


# Training data: show real rows before a job trains on them.

MAX_SHOWN = 100


class ValidateDataBody(Model):
    """The data to look at, and what it is for: a `data_config`, or the `sources` and `preprocess` of one."""

    data_config: DataConfig | None = Field(default=None, description="As a job has it.")
    sources: Sources | None = Field(default=None, description="Instead of data_config: its sources alone.")
    preprocess: PreprocessConfig | None = Field(default=None, description="Beside sources.")
    base_model: BaseModelConfig | None = Field(
        default=None, description="Whose tokenizer is used. Without it and preprocess.tokenizer_id, rows are only read."
    )
    training_type: TrainingType = Field(default=TrainingType.SFT, description="How rows become what is trained on.")
    hyperparameters: StringMap = Field(
        default_factory=dict, description="Of these, completion_only_loss, assistant_only_loss and loss_type count."
    )
    environment: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Such as HF_TOKEN and AWS_ACCESS_KEY_ID; what is no key, token, region or endpoint is passed over.",
    )
    files: Annotated[tuple[UploadedFile, ...], Field(max_length=8192)] = Field(
        default=(), description="Uploaded files that relative paths name."
    )
    limit: Annotated[int, Strict(), Field(ge=0, le=MAX_SHOWN)] = Field(
        default=3, description="How many rows of each source are shown."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[RuleViolation]:
        if self.data_config is None and self.sources is None:
            yield RuleViolation(("data_config",), "required, unless there are sources")
        for name in ("sources", "preprocess"):
            if self.data_config is not None and getattr(self, name) is not None:
                yield RuleViolation((name,), "is a part of data_config; give one of the two")

    @property
    def data(self) -> DataConfig:
        if self.data_config is not None:
            return self.data_config
        return DataConfig(sources=self.sources or (), preprocess=self.preprocess or PreprocessConfig())


data_router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["data"])


@data_router.post(
    "/data/validate",
    **answers(CheckedData, 400, 404, 409, body=ValidateDataBody, required=True, parameters=FORWARDING_PARAMETERS),
)
async def validate_data(request: Request, principal: Manager, context: Context) -> Response:
    """Read real rows, and show what a model will see of them or what is wrong with which."""
    wanted = await read_model(request, ValidateDataBody)
    runs_code = wanted.base_model is not None and wanted.base_model.trust_remote_code
    if runs_code and not context.settings.allow_trust_remote_code:
        raise RefusedError(
            "base_model.trust_remote_code: this server does not run code that comes with a model; its operator can "
            "allow that with the setting allow_trust_remote_code"
        )
    document = _document(wanted)

    def look_up(connection: Connection) -> Account:
        left = models_from(ModelSource.ARTIFACTS, wanted.base_model, wanted.data)
        check_results(
            connection, principal.scope, [(field.removeprefix("training_config."), name) for field, name in left]
        )
        for file in wanted.files:
            if job_inputs.get_blob(connection, principal.scope, file.sha256) is None:
                raise NotFoundError(f"the file {file.sha256} was not uploaded")
        return accounts.get(connection, principal.scope, principal.account_id)

    account = await context.read(look_up)
    check = DataCheck(
        document=document,
        files={file.path: blob_file(context, principal.account_id, file.sha256) for file in wanted.files},
        environment=wanted.environment,
        tokens=await forwarded_tokens(request, context),
        limit=wanted.limit,
    )
    return ok(Ok[CheckedData].model_validate({"data": await context.data_checks.run(account, check)}).data)


def _document(wanted: ValidateDataBody) -> dict[str, Any]:
    """The document that the preparing step of such a job would read."""
    typed = wanted.training_type in BUILT_IN
    return {
        "training_config": {
            "training_type": str(wanted.training_type),
            "base_model": wanted.base_model.model_dump(mode="json") if wanted.base_model else {},
            "hyperparameters": read_hyperparameters(wanted.training_type, wanted.hyperparameters) if typed else {},
        },
        "data_config": wanted.data.model_dump(mode="json"),
    }
