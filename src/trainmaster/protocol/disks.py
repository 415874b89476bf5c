"""Disks that are full."""

from __future__ import annotations

import errno
import os

FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a disk that takes no more."""
LEAST_FREE_BYTES = 64 << 10
"""A disk with less is as good as full: more than any document of a worker takes."""


def disk_is_full(path: str | os.PathLike[str]) -> bool:
    """Whether nothing more can be written where `path` lies."""
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    free = usage.f_bavail if os.geteuid() else usage.f_bfree
    return free * usage.f_frsize < LEAST_FREE_BYTES
