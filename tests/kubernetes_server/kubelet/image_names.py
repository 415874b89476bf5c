"""The names of images."""

from __future__ import annotations

import re

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?"
_REFERENCE = re.compile(
    rf"{_HOST}{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@[a-z0-9]+:[0-9a-f]+)?"
)


def invalid_name(image: str) -> str:
    """The error of a kubelet about a name that no image can have; empty if one can."""
    if _REFERENCE.fullmatch(image):
        return ""
    return (
        f'Failed to apply default image tag "{image}": couldn\'t parse image name "{image}": invalid reference format'
    )
