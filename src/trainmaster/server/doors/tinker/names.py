"""What the root Tinker door has names for: sessions, runs, samplers, paths of weights, ids of futures. Pure.

Ids tell where to go. The future of an operation and a sampling session name the job and the attempt whose trainer has
them; what the server itself keeps is named so that any server can answer for it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from trainmaster.server.core.workloads.trainer_service import Mode

ACTIVE_FOR_S = 120.0
"""Clients say every ten seconds that they are there, and warn their users after two minutes without an answer."""

_TRAINER = re.compile(r"(job-[0-9a-z]{1,64}):(\d{1,9}):.+", re.DOTALL)
_SAMPLER = re.compile(r".+:sample:.+@(job-[0-9a-z]{1,64})\.(\d{1,9})", re.DOTALL)
_PART = "([^/\0\ud800-\udfff]{1,256})"
"""Of a path: no NUL and no halves of characters, which databases do not take."""
_PATH = re.compile(f"tinker://{_PART}/(weights|sampler_weights|external_weights)/{_PART}")
_LONGEST_ID = 1024
"""Of a sampling session: ours have a tenth of it, and to compare a long one may take its length squared."""
SESSION_OVER = "its session ended before its trainer was ready"
"""What runs say that were given up with their session."""
_CREATED = "create_model:"
_FAILED = "failed:"


class Category(StrEnum):
    """Whose fault it is that an operation failed."""

    SERVER = "server"
    USER = "user"


class RunState(StrEnum):
    """How far a model is."""

    PENDING = "pending"  # its trainer is being started, or makes it
    CREATED = "created"  # its trainer has it, as long as that attempt lives
    FAILED = "failed"  # it was never made


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSession:
    """One client's session: its models and samplers belong to it."""

    session_id: str
    account_id: str
    created_at: float
    idempotency_key: str | None = None
    """Of the request that made it: the same one again makes no other."""
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    heartbeat_at: float
    """When its client was last heard of, give or take."""
    finished_at: float | None = None
    finish: Mapping[str, Any] = field(default_factory=dict)
    """Why its client was done with it: `reason` and `detail`."""

    def is_active(self, now: float) -> bool:
        """Whether its client is there."""
        return self.finished_at is None and now - self.heartbeat_at < ACTIVE_FOR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerRun:
    """One model that was asked for: what clients call a training run."""

    model_id: str
    account_id: str
    session_id: str
    base_model: str
    """As its client calls it."""
    mode: Mode
    request: Mapping[str, Any]
    """The create_model, as it was sent."""
    created_at: float
    used_at: float
    """When something was last asked of it, give or take."""
    state: RunState = RunState.PENDING
    job_id: str | None = None
    """Whose trainer makes it, once that was found or made."""
    attempt: int | None = None
    """Of that job: the trainer that has it, and that it dies with."""
    error: str = ""
    category: str = Category.SERVER

    @property
    def lora_rank(self) -> int | None:
        """The rank of its adapter; None when it has none."""
        rank = (self.request.get("lora_config") or {}).get("rank")
        return rank if self.mode is Mode.LORA and isinstance(rank, int) else None

    @property
    def trainer(self) -> Trainer | None:
        """Where it lives."""
        if self.state is not RunState.CREATED or self.job_id is None or self.attempt is None:
            return None
        return Trainer(self.job_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSampler:
    """A sampling session that was asked for by name: of a base model, or of saved weights."""

    sampler_id: str
    account_id: str
    session_id: str
    base_model: str
    model_path: str | None = None
    created_at: float


class Trainer(NamedTuple):
    """One attempt of a job: every start of a trainer is another one."""

    job_id: str
    attempt: int


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """The id of a session's model; clients of some versions derive it in the same way."""
    return f"{session_id}:train:{model_seq_id}"


def trainer_of_future(request_id: str) -> Trainer | None:
    """Whose trainer a future is; None when it is no trainer's."""
    found = _TRAINER.fullmatch(request_id)
    return Trainer(found[1], int(found[2])) if found else None


def model_of_future(request_id: str) -> str:
    """The model, or the sampling session, that a trainer's future is about."""
    return request_id.split(":", 2)[-1].rpartition(":")[0]


def trainer_of_sampler(sampling_session_id: str) -> Trainer | None:
    """Whose trainer a sampling session is; None when the id is none of ours."""
    found = _SAMPLER.fullmatch(sampling_session_id) if len(sampling_session_id) <= _LONGEST_ID else None
    return Trainer(found[1], int(found[2])) if found else None


def creation_id(model_id: str) -> str:
    """The id of the future of a create_model."""
    return f"{_CREATED}{model_id}"


def created_model(request_id: str) -> str | None:
    """The model whose create_model a future is; None when it is another one's."""
    return request_id.removeprefix(_CREATED) if request_id.startswith(_CREATED) else None


def failure_id(message: str, category: Category) -> str:
    """The id of a future that has failed already; it holds what there is to say, so that nobody has to keep it."""
    return f"{_FAILED}{category}:{base64.urlsafe_b64encode(message.encode()).decode()}"


def failure_of(request_id: str) -> tuple[str, str] | None:
    """The message and the category of a future that had failed before it was asked for; None when it is another one."""
    kind, _, rest = request_id.partition(":")
    category, _, encoded = rest.partition(":")
    if f"{kind}:" != _FAILED:
        return None
    try:
        return base64.urlsafe_b64decode(encoded).decode(), str(Category(category))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPath:
    """`tinker://<run>/<place>/<name>`: saved weights, as clients name them."""

    run: str
    place: str
    """`weights`, `sampler_weights` or `external_weights`."""
    name: str

    @staticmethod
    def parse(text: str) -> WeightsPath | None:
        """The path that a text is; None when it is none."""
        found = _PATH.fullmatch(text)
        return WeightsPath(run=found[1], place=found[2], name=found[3]) if found else None

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.place}/{self.name}"

    @property
    def kind(self) -> str:
        """What kind of checkpoint lies there, as checkpoints say it."""
        return KIND_OF_PLACE[self.place]


KIND_OF_PLACE: Mapping[str, str] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
PLACE_OF_KIND: Mapping[str, str] = {kind: place for place, kind in KIND_OF_PLACE.items()}


def mode_of(request: Mapping[str, Any]) -> Mode:
    """What a create_model asks for: an adapter, or the weights themselves. A frozen model needs neither."""
    lora = request.get("lora_config")
    rank = lora.get("rank") if isinstance(lora, Mapping) else None
    whole = lora is None or rank == 0
    return Mode.FULL if whole and not request.get("base_only") else Mode.LORA
