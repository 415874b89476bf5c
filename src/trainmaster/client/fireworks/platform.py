"""`FireworksClient`: shapes, checkpoints and promotion, which need no running trainer; and what its users catch.

Each error is a ClientError, and also what Fireworks' own clients raise there.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, Unpack

import httpx

from trainmaster.client.connection import Connection, Options, document_of
from trainmaster.client.errors import ClientError, UnreachableError
from trainmaster.client.server_lookup import find_server

ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"
"""The type of the detail that says in a word why something was refused."""
TEXT_SHOWN = 200
"""Of an answer that is no document."""


class TrainingAPIError(ClientError, RuntimeError):
    """The server refused."""

    def __init__(self, context: str, response: httpx.Response) -> None:
        document = _document(response)
        message = document.get("message") or response.text.strip()[:TEXT_SHOWN] or response.reason_phrase
        super().__init__(f"{context}: {message} (HTTP {response.status_code})")
        self.status_code = response.status_code
        info = _error_info(document)
        self.reason: str | None = info.get("reason")
        """What to branch on, where the server gives one."""
        self.metadata: Mapping[str, str] = info.get("metadata") or {}


class ResumeRefusedError(TrainingAPIError, httpx.HTTPStatusError):
    """The server refuses to resume a job."""

    def __init__(self, context: str, response: httpx.Response) -> None:
        super().__init__(context, response)
        self.request = response.request
        self.response = response


class TrainerStoppedError(ClientError, RuntimeError):
    """A trainer that was waited for will not become ready by itself."""

    def __init__(self, message: str, *, state: str) -> None:
        super().__init__(message)
        self.state = state


class TrainerTimeoutError(ClientError, TimeoutError):
    """A trainer did not become ready in time."""


def _document(response: httpx.Response) -> Mapping[str, Any]:
    """The part of an answer that says what went wrong: all of it, or what stands under `error`."""
    document = document_of(response)
    error = document.get("error", document)
    return error if isinstance(error, Mapping) else {"message": str(error)}


def _error_info(document: Mapping[str, Any]) -> Mapping[str, Any]:
    details = document.get("details")
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, Mapping) and detail.get("@type") == ERROR_INFO:
            return detail
    return {}


PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may answer soon."""
RETRY_DELAYS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Half a minute: long enough for a server that restarts. Every request here may be repeated."""
REQUEST_TIMEOUT_S = 60.0
PROMOTION_POLL_S = 2.0
PROMOTION_TIMEOUT_S = 7200.0
"""A large model may have to be copied to other disks."""

CHECKPOINT_NAME = re.compile(r"accounts/([^/]+)/rlorTrainerJobs/([^/]+)/checkpoints/([^/]+)")
MODEL_ID = re.compile(r"[a-z0-9-]{1,63}")


class Clock(Protocol):
    """The functions of the module `time` that waiting needs."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


SHAPE_NAME = re.compile(r"accounts/[^/]+/trainingShapes/[^/]+(/versions/[^/]+)?")


@dataclass(frozen=True, slots=True)
class TrainingShapeProfile:
    """What a version of a training shape stands for."""

    training_shape_version: str
    """Its full name, for `TrainerJobConfig.training_shape_ref`."""
    trainer_image_tag: str
    max_supported_context_length: int
    node_count: int
    deployment_shape_version: str
    deployment_image_tag: str
    accelerator_type: str
    accelerator_count: int
    base_model_weight_precision: str
    pipeline_parallelism: int
    trainer_mode: str = ""
    """POLICY_TRAINER, LORA_TRAINER or FORWARD_ONLY."""

    @property
    def training_shape(self) -> str:
        """The full name of the shape, whichever its version."""
        return self.training_shape_version.partition("/versions/")[0]

    @property
    def deployment_shape(self) -> str | None:
        return self.deployment_shape_version or None

    @property
    def supports_lora(self) -> bool:
        return self.trainer_mode == "LORA_TRAINER"

    @classmethod
    def from_version(cls, version: Mapping[str, Any]) -> Self:
        snapshot = version.get("snapshot") or {}
        sharding = snapshot.get("trainerShardingScheme") or {}
        return cls(
            training_shape_version=version.get("name", ""),
            trainer_image_tag=snapshot.get("trainerImageTag", ""),
            max_supported_context_length=snapshot.get("maxSupportedContextLength", 0),
            node_count=snapshot.get("nodeCount", 1),
            deployment_shape_version=snapshot.get("deploymentShapeVersion", ""),
            deployment_image_tag=snapshot.get("deploymentImageTag", ""),
            accelerator_type=snapshot.get("acceleratorType", ""),
            accelerator_count=snapshot.get("acceleratorCount", 0),
            base_model_weight_precision=snapshot.get("baseModelWeightPrecision", ""),
            pipeline_parallelism=sharding.get("pipelineParallelism", 1),
            trainer_mode=snapshot.get("trainerMode", ""),
        )


class FireworksClient:
    """A Trainmaster server, by the names of Fireworks' client.

    Without arguments it is the server that `trainmaster.client.Client` uses: the one that TRAINMASTER_URL and
    TRAINMASTER_API_KEY or `trainmaster login` name, else the local one, which is started when it does not run.
    Methods raise `TrainingAPIError` when the server refuses, and `UnreachableError` when it does not answer for half a
    minute.
    """

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        additional_headers: Mapping[str, str] | None = None,
        verify_ssl: bool | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        clock: Clock = time,
    ) -> None:
        address, look_again = find_server(base_url, api_key)
        self._connection = Connection(
            address,
            look_again=look_again,
            transport=transport,
            timeout=REQUEST_TIMEOUT_S,
            verify=verify_ssl,
            headers=additional_headers or {},
        )
        self._clock = clock
        self._account_id: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @property
    def base_url(self) -> str:
        """Where the server is."""
        return self._connection.url.rstrip("/")

    @property
    def api_key(self) -> str:
        """The key to it, which a training client needs too."""
        return self._connection.api_key

    @property
    def account_id(self) -> str:
        """The account that the key belongs to; raises ValueError if that is none, or several."""
        if self._account_id is None:
            accounts = self._document("accounts cannot be listed", "GET", "/v1/accounts", params={"pageSize": 2})
            names = [str(account["name"]).removeprefix("accounts/") for account in accounts.get("accounts") or ()]
            if len(names) != 1:
                raise ValueError(f"the API key must belong to one account, and belongs to {', '.join(names) or 'none'}")
            self._account_id = names[0]
        return self._account_id

    def resolve_training_profile(self, shape_id: str) -> TrainingShapeProfile:
        """What a training shape stands for; without a version in its name, in the latest one that is valid.

        `shape_id` is accounts/ACCOUNT/trainingShapes/SHAPE[/versions/VERSION]; SHAPE alone is one of the own account.
        Raises ValueError if it is no such name.
        """
        name = shape_id if "/" in shape_id else f"accounts/{self.account_id}/trainingShapes/{shape_id}"
        if not SHAPE_NAME.fullmatch(name):
            raise ValueError(f"{shape_id!r} is not accounts/ACCOUNT/trainingShapes/SHAPE[/versions/VERSION]")
        problem = f"training shape {name} cannot be resolved"
        if "/versions/" in name:
            return TrainingShapeProfile.from_version(self._document(problem, "GET", f"/v1/{name}"))
        response = self._call("GET", f"/v1/{name}/versions", params={"filter": "latest_validated=true", "pageSize": 1})
        versions = opened(problem, response).get("trainingShapeVersions") or ()
        if not versions:
            raise TrainingAPIError(f"{problem}; it has no valid version", response)
        return TrainingShapeProfile.from_version(versions[0])

    def list_checkpoints(self, job_id: str, *, page_size: int = 200) -> list[dict[str, Any]]:
        """Every checkpoint of a trainer job, also of a deleted one, the oldest first; `promotable`: can be a model."""
        path = f"/v1/accounts/{self.account_id}/rlorTrainerJobs/{job_id}/checkpoints"
        return self._listed(f"checkpoints of {job_id} cannot be listed", path, "checkpoints", page_size)

    def list_models(self, *, page_size: int = 200) -> list[dict[str, Any]]:
        """Every model of the account, by name: what was promoted, and base models that its operator named so."""
        return self._listed("models cannot be listed", f"/v1/accounts/{self.account_id}/models", "models", page_size)

    def promote_checkpoint(self, *, name: str, output_model_id: str, base_model: str) -> dict[str, Any]:
        """Make a model of a sampler checkpoint; returns the model. Its trainer job need not run, nor be there any more.

        Args:
            name: accounts/ACCOUNT/rlorTrainerJobs/JOB/checkpoints/CHECKPOINT, as `list_checkpoints` tells it.
            output_model_id: what to call the model: at most 63 lower-case letters, digits and hyphens.
            base_model: what it was trained from.

        Raises ValueError for a wrong argument, and TrainerTimeoutError if it takes more than two hours.
        """
        named = CHECKPOINT_NAME.fullmatch(name)
        if named is None:
            raise ValueError(f"{name!r} is not accounts/ACCOUNT/rlorTrainerJobs/JOB/checkpoints/CHECKPOINT")
        if not MODEL_ID.fullmatch(output_model_id):
            raise ValueError(
                f"output_model_id {output_model_id!r} must be 1 to 63 lower-case letters, digits and hyphens"
            )
        if not base_model:
            raise ValueError("base_model is required")
        account, job, checkpoint = named.groups()
        body = {
            "output_model": f"accounts/{account}/models/{output_model_id}",
            "trainer_job_id": f"accounts/{account}/rlorTrainerJobs/{job}",
            "base_model": base_model,
            "async_promotion": True,
        }
        problem = f"checkpoint {checkpoint} cannot be promoted"
        answer = self._document(problem, "POST", f"/v1/accounts/{account}/checkpoints/{checkpoint}:promote", json=body)
        model = answer.get("model")
        if answer.get("operation"):
            model = self._finished(problem, answer["operation"]).get("response") or model
        if not model:
            raise ClientError(f"{problem}: the server says that it is done, and names no model")
        return {field: value for field, value in model.items() if field != "@type"}

    def _listed(self, problem: str, path: str, member: str, page_size: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        params: dict[str, Any] = {"pageSize": page_size}
        while True:
            page = self._document(problem, "GET", path, params=params)
            found += page.get(member) or ()
            if not page.get("nextPageToken"):
                return found
            params["pageToken"] = page["nextPageToken"]

    def _finished(self, problem: str, operation: Mapping[str, Any]) -> Mapping[str, Any]:
        deadline = self._clock.monotonic() + PROMOTION_TIMEOUT_S
        while operation.get("error") or not operation.get("done"):
            if self._clock.monotonic() >= deadline:
                raise TrainerTimeoutError(f"{problem}: {operation['name']} goes on after {PROMOTION_TIMEOUT_S:g} s")
            self._clock.sleep(PROMOTION_POLL_S)
            response = self._call("GET", f"/v1/{operation['name']}")
            operation = opened(problem, response)
            if operation.get("error"):
                raise TrainingAPIError(problem, response)
        return operation

    def _document(self, problem: str, method: str, path: str, **options: Unpack[Options]) -> dict[str, Any]:
        return opened(problem, self._call(method, path, **options))

    def _call(self, method: str, path: str, **options: Unpack[Options]) -> httpx.Response:
        """Send a request; again while the server does not answer, or is about to recover."""
        for delay in RETRY_DELAYS_S:
            try:
                response = self._connection.send(method, path, **options)
                if response.status_code not in PASSING:
                    return response
            except UnreachableError:
                pass  # the last try raises it
            self._clock.sleep(delay)
            self._connection.find_again()
        return self._connection.send(method, path, **options)


def opened(problem: str, response: httpx.Response) -> dict[str, Any]:
    if not response.is_success:
        raise TrainingAPIError(problem, response)
    try:
        document = response.json() if response.content else {}
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise TrainingAPIError(f"{problem}; what answers is not a Trainmaster server", response)
    return document
