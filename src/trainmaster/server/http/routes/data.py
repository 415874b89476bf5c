"""Training data: show real rows before a job trains on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request, Response
from pydantic import Field, Strict, model_validator
from sqlalchemy import Connection

from trainmaster.schema.data import CheckedData
from trainmaster.server.coordinator.admission import check_results
from trainmaster.server.coordinator.data_checks import DataCheck
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import NotFoundError, RefusedError
from trainmaster.server.core.fields import Broken, Environment, Model, StringMap, refuse
from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataConfig, PreprocessConfig, Sources
from trainmaster.server.core.training.hyperparameters import read_hyperparameters
from trainmaster.server.core.training.sources import ModelSource
from trainmaster.server.core.training.types import BUILT_IN, TrainingType
from trainmaster.server.core.workloads.base import ShippedFile
from trainmaster.server.core.workloads.trainer import models_from
from trainmaster.server.http.auth import Manager
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, ok
from trainmaster.server.http.requests import read_model
from trainmaster.server.http.router import StrictRoute, answers
from trainmaster.server.http.routes.blobs import blob_file
from trainmaster.server.http.routes.submissions import FORWARDING_PARAMETERS, forwarded_tokens
from trainmaster.server.store import accounts, job_inputs

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
        default_factory=dict, description="Of these, completion_only_loss and assistant_only_loss count."
    )
    environment: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Such as HF_TOKEN and AWS_ACCESS_KEY_ID; what is no key, token, region or endpoint is passed over.",
    )
    files: Annotated[tuple[ShippedFile, ...], Field(max_length=8192)] = Field(
        default=(), description="Uploaded files that relative paths name."
    )
    limit: Annotated[int, Strict(), Field(ge=0, le=MAX_SHOWN)] = Field(
        default=3, description="How many rows of each source are shown."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[Broken]:
        if self.data_config is None and self.sources is None:
            yield Broken(("data_config",), "required, unless there are sources")
        for name in ("sources", "preprocess"):
            if self.data_config is not None and getattr(self, name) is not None:
                yield Broken((name,), "is a part of data_config; give one of the two")

    @property
    def data(self) -> DataConfig:
        if self.data_config is not None:
            return self.data_config
        return DataConfig(sources=self.sources or (), preprocess=self.preprocess or PreprocessConfig())


router = APIRouter(route_class=StrictRoute, tags=["data"])


@router.post(
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
