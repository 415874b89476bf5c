"""What the Tinker door keeps, as values: sessions, training runs, samplers; and the ids of `create_model` futures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from trainmaster.protocol.trainer_requests import Mode, Trainer
from trainmaster.server.doors.futures import Category

ACTIVE_FOR_S = 120.0
"""Clients send a heartbeat every ten seconds, and warn their users after two minutes without an answer."""
SESSION_OVER = "its session ended before its trainer was ready"
"""The error of runs that were abandoned with their session."""
_CREATED = "create_model:"


class RunState(StrEnum):
    PENDING = "pending"  # its trainer is being started, or creates it
    CREATED = "created"  # its trainer has it, as long as that attempt lives
    FAILED = "failed"  # it was never created


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSession:
    """A client's session: its models and samplers belong to it."""

    session_id: str
    account_id: str
    created_at: float
    idempotency_key: str | None = None
    """Of the request that created it: a repeated request gets the same session."""
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    heartbeat_at: float
    """Written every few seconds."""
    finished_at: float | None = None
    finish: Mapping[str, Any] = field(default_factory=dict)
    """Why it was finished: `reason` and `detail`."""

    def is_active(self, now: float) -> bool:
        return self.finished_at is None and now - self.heartbeat_at < ACTIVE_FOR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerRun:
    """One model that was asked for; clients call it a training run."""

    model_id: str
    account_id: str
    session_id: str
    base_model: str
    """As its client calls it."""
    mode: Mode
    request: Mapping[str, Any]
    """The body of its create_model."""
    created_at: float
    used_at: float
    """Written every few seconds."""
    state: RunState = RunState.PENDING
    job_id: str | None = None
    """The job whose trainer creates it; None until that was found or submitted."""
    attempt: int | None = None
    """Of that job: the trainer that has the model. The model is lost when this attempt ends."""
    error: str = ""
    category: str = Category.SERVER

    @property
    def lora_rank(self) -> int | None:
        """None when it has no adapter."""
        rank = (self.request.get("lora_config") or {}).get("rank")
        return rank if self.mode is Mode.LORA and isinstance(rank, int) else None

    @property
    def trainer(self) -> Trainer | None:
        if self.state is not RunState.CREATED or self.job_id is None or self.attempt is None:
            return None
        return Trainer(self.job_id, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerSampler:
    """A sampling session of a base model, or of weights that were saved under a name."""

    sampler_id: str
    account_id: str
    session_id: str
    base_model: str
    model_path: str | None = None
    created_at: float


def creation_id(model_id: str) -> str:
    return f"{_CREATED}{model_id}"


def created_model(request_id: str) -> str | None:
    """The model whose create_model a future is; None of another future."""
    return request_id.removeprefix(_CREATED) if request_id.startswith(_CREATED) else None


def mode_of(request: Mapping[str, Any]) -> Mode:
    """What a create_model asks for: an adapter, or the weights themselves. A frozen model needs neither."""
    lora = request.get("lora_config")
    rank = lora.get("rank") if isinstance(lora, Mapping) else None
    whole = lora is None or rank == 0
    return Mode.FULL if whole and not request.get("base_only") else Mode.LORA
