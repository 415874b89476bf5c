"""Parameters that several routes take."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path
from pydantic import StringConstraints

PlainText = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00-\x1f\x7f]*$")]
"""Text without control characters."""
MAX_JOB_ID = 256
JobId = Annotated[str, Path(description="The job's id or handle.", min_length=1, max_length=MAX_JOB_ID)]
Sha256 = Annotated[str, Path(description="The SHA-256 of the content, in hexadecimal.", pattern=r"^[0-9a-f]{64}$")]
AttemptId = Annotated[str, Path(description="`<job_id>.<number>`", max_length=256)]
MAX_OFFSET = 2**62
"""More than any file or table will ever have, and small enough for every database."""
