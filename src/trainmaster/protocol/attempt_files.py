"""The addresses of an attempt's files at the server, for workers and ranks that do not share its file system.

    <server>/v1/worker/attempts/<attempt_id>/files/checkpoints/<path>    of the job, as in its directory for them
    <server>/v1/worker/attempts/<attempt_id>/files/resume/<path>         the checkpoint that the attempt resumes from
    <server>/v1/worker/attempts/<attempt_id>/files/output/<path>         the job's results

In such an address, paths are written as they are; only requests quote them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class FileArea(StrEnum):
    CHECKPOINTS = "checkpoints"
    RESUME = "resume"
    OUTPUT = "output"


DRAFT = re.compile(r"\.data-(?P<save>.+\.\d+-[0-9a-f]+)")
"""Below the path of a checkpoint: the directory of a save that is not committed. Its manifest commits it."""
MOST_PIECE_BYTES = 16 << 20
"""Of a file that is sent in pieces."""
MOST_OBJECT_BYTES = 64 << 20
"""Of a file that is sent as a whole: the longest manifest."""
MOST_LISTED = 10_000
"""Files in one page of a list."""
NODE = "node"
"""A parameter of results: which node of the attempt has left the file."""

_URL = re.compile(
    r"(?P<server>https?://[^/]+(?:/.*?)?)/v1/worker/attempts/(?P<attempt_id>[^/]+)/files"
    rf"/(?P<area>{'|'.join(FileArea)})(?:/(?P<path>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFileUrl:
    server_url: str
    attempt_id: str
    area: FileArea
    path: str = ""
    """Without slashes at its ends."""

    @property
    def route(self) -> str:
        """The part of the address before the area, without the server."""
        return files_route(self.attempt_id)

    def __str__(self) -> str:
        return "/".join(filter(None, (self.server_url + self.route, self.area, self.path)))

    @staticmethod
    def parse(url: str) -> AttemptFileUrl | None:
        """None if this is no such address."""
        if (found := _URL.fullmatch(url)) is None:
            return None
        return AttemptFileUrl(
            server_url=found["server"],
            attempt_id=found["attempt_id"],
            area=FileArea(found["area"]),
            path=(found["path"] or "").strip("/"),
        )


def files_route(attempt_id: str) -> str:
    return f"/v1/worker/attempts/{attempt_id}/files"


def is_url(place: str) -> bool:
    """Whether this names a place at a server or an object store, and no directory."""
    return "://" in place
