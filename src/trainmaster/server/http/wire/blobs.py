"""Blobs: files that clients shipped."""

from __future__ import annotations

from trainmaster.server.http.envelope import Wire


class BlobResource(Wire):
    """A file, known by its content."""

    sha256: str
    size_bytes: int
