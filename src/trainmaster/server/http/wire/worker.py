"""What workers and the server tell each other."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.fields import MAX_INTEGER
from trainmaster.server.http.envelope import Wire

Document = dict[str, Any]


class Claimant(BaseModel):
    """Who wants to run a node of an attempt. What a newer worker says beyond this is passed over."""

    model_config = ConfigDict(extra="ignore")

    nonce: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = Field(
        description="The same claimant sends the same one again."
    )
    pid: Annotated[int, Field(ge=1, le=MAX_INTEGER)]
    start_time: Annotated[int, Field(ge=0, le=2**63 - 1)]
    boot_id: Annotated[str, StringConstraints(max_length=128)]
    host: Annotated[str, StringConstraints(max_length=256)] = ""


class ExitDocument(BaseModel):
    """The least that the end of a node must say."""

    model_config = ConfigDict(extra="allow")

    reason: Reason
    message: str = ""
    ended_at: float


class Granted(Wire):
    """Whether the claimant has the node."""

    granted: bool


class NextOffset(Wire):
    """Where a stream ends now."""

    next_offset: int


class Ownership(Wire):
    """Whether an attempt may commit checkpoints of its job."""

    owner: bool


class SecretValues(Wire):
    """The secrets of a job, for the workers of its attempt alone."""

    environment: dict[str, str] = Field(description="Variables of the job's processes.")
    tokens: dict[str, str] = Field(description="For what prepares the job; the job's own processes do not see them.")
