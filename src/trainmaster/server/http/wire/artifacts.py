"""Files that jobs leave."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from trainmaster.server.http.envelope import Wire


class ArtifactResource(Wire):
    """One file."""

    path: str = Field(description="`output/...` or `checkpoints/<checkpoint_id>/...`; fetch it by this.")
    kind: Literal["output", "checkpoint"]
    checkpoint_id: str | None = Field(description="The checkpoint that it is a part of.")
    size_bytes: int
    modified_at: datetime
    etag: str = Field(description="Changes with the content; the header `ETag` of its download.")
    sha256: str | None = Field(description="As the checkpoint's manifest has it; null where nobody knows.")


class ArtifactPage(Wire):
    """Files by their paths."""

    artifacts: list[ArtifactResource]
    next_page_token: str | None
