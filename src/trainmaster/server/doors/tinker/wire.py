"""What Tinker clients send and read. Their protocol grows: what they send beside this is no error."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from trainmaster.protocol.trainer_requests import PLACE_OF_KIND, ModelMode
from trainmaster.server.core.job import CheckpointRecord
from trainmaster.server.doors.tinker.door import path_of
from trainmaster.server.doors.tinker.records import RunState, TinkerRun, TinkerSession

NO_NUL = r"^[^\x00]*$"
"""Not every database takes that character."""
NO_PROJECT = "default"
"""The project of a session that is in none: some answers must name one."""

Text = Annotated[str, StringConstraints(max_length=4096, pattern=NO_NUL)]
Id = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=NO_NUL)]
Number = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]
Metadata = Annotated[dict[Text, Any], Field(max_length=1024)]
TtlSeconds = Annotated[int, Field(ge=3600, le=10 * 366 * 86400, strict=True)]
"""From an hour on, as the clients document it: expired weights are removed every ten minutes."""


class TinkerRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True, protected_namespaces=())


class CreateSession(TinkerRequest):
    tags: Annotated[list[Text], Field(max_length=1024)] = []
    user_metadata: Metadata | None = None
    sdk_version: Text = ""
    project_id: Text | None = None
    display_name: Text | None = None


class SessionRequest(TinkerRequest):
    session_id: Id


class FinishReason(TinkerRequest):
    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(TinkerRequest):
    reason: FinishReason = FinishReason()
    detail: Text | None = None


class AssignProject(TinkerRequest):
    project_id: Id


class SearchCursor(TinkerRequest):
    last_created_at: datetime
    last_session_id: Text


class SearchOwner(TinkerRequest):
    """A key sees the sessions of its account, whatever it asks for."""

    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: list[Text] = []


class SearchStatus(TinkerRequest):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: list[Text] | None = None


class SearchSessions(TinkerRequest):
    session_id: Text | None = None
    project_ids: list[Text] | None = None
    user_metadata: Metadata = {}
    display_name: Text | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = None
    limit: Annotated[int, Field(ge=1, le=200, strict=True)] = 50
    cursor: SearchCursor | None = None


class CreateModel(TinkerRequest):
    """The trainer reads the other fields."""

    session_id: Id
    model_seq_id: Number
    base_model: Text


class CreateSamplingSession(TinkerRequest):
    session_id: Id
    sampling_session_seq_id: Number
    base_model: Text | None = None
    model_path: Text | None = None


class ModelRequest(TinkerRequest):
    model_id: Id


class WeightsRequest(TinkerRequest):
    tinker_path: Text


class SetTtl(TinkerRequest):
    ttl_seconds: TtlSeconds | None = None


def instant(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def checkpoint_resource(checkpoint: CheckpointRecord) -> dict[str, Any]:
    expires = checkpoint.expires_at
    return {
        "checkpoint_id": f"{PLACE_OF_KIND[checkpoint.kind]}/{checkpoint.name}",
        "checkpoint_type": checkpoint.kind,
        "time": instant(checkpoint.created_at),
        "tinker_path": path_of(checkpoint),
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.public,
        "expires_at": None if expires is None else instant(expires),
        "user_metadata": texts(checkpoint.attributes.get("user_metadata")),
    }


def run_resource(run: TinkerRun, saved: Iterable[CheckpointRecord]) -> dict[str, Any]:
    """`saved` has the newest first."""
    last: dict[str, dict[str, Any]] = {}
    for checkpoint in saved:
        last.setdefault(checkpoint.kind, checkpoint_resource(checkpoint))
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": run.account_id,
        "is_lora": run.mode is ModelMode.LORA,
        "lora_rank": run.lora_rank,
        "corrupted": run.state is RunState.FAILED,
        "last_request_time": instant(run.used_at),
        "last_checkpoint": last.get("training"),
        "last_sampler_checkpoint": last.get("sampler"),
        "user_metadata": texts(run.request.get("user_metadata")),
    }


def session_resource(session: TinkerSession, saved: Iterable[CheckpointRecord], *, now: float) -> dict[str, Any]:
    sizes = [checkpoint.size_bytes for checkpoint in saved]
    status: dict[str, Any] | None = {"type": "active"} if session.is_active(now) else None
    if session.finished_at is not None:
        status = {"type": "client_finished", **session.finish}
    return {
        "session_id": session.session_id,
        "created_at": instant(session.created_at),
        "owner": session.account_id,
        "project_id": session.project_id or NO_PROJECT,
        "status": status,
        "checkpoints_count": len(sizes),
        "checkpoint_storage_bytes": sum(sizes),
        "display_name": session.display_name,
        "user_metadata": texts(session.user_metadata),
    }


def texts(metadata: object) -> dict[str, str] | None:
    """Clients expect texts."""
    return {str(name): str(value) for name, value in metadata.items()} if isinstance(metadata, dict) else None
