"""What was collected, or would be."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from trainmaster.server.http.envelope import Wire


class CollectBody(BaseModel):
    """What to collect."""

    model_config = ConfigDict(extra="forbid", strict=True)

    dry_run: bool = Field(default=False, description="Only tell what would go.")
    orphans: bool = Field(default=False, description="Also directories of jobs that nobody knows, after a day.")


class CollectedKind(Wire):
    """Things of one kind."""

    what: str = Field(
        description="`run directory`, `checkpoint`, `deleted job`, `cache`, `blob`, `orphan`, the record of a"
        " `session`, of a `training run` or of a `sampler`; or `failed`, with what could not be collected and why."
    )
    count: int
    size_bytes: int = Field(description="The room that they take, as far as that is known.")
    names: list[str] = Field(description="The first hundred.")
    removed: bool = Field(description="Whether they are gone; orphans stay unless they are asked for.")


class Collection(Wire):
    """All that was collected."""

    dry_run: bool
    kinds: list[CollectedKind]
