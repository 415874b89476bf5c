"""The nearest known name to one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_ECHO = 64
"""Names that we do not know are repeated up to here: an error is no place for a megabyte."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, whatever its case; None when none is near.

    >>> nearest("gpu_cont", ["gpu_count", "gpu_type"]), nearest("sft", ["SFT", "DPO"]), nearest("x", ["gpu_count"])
    ('gpu_count', 'SFT', None)
    """
    if len(name) > LONGEST_ECHO:
        return None  # no name is that long, and to compare it would take long
    folded = {candidate.casefold(): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def choice_message(noun: str, name: str, known: Iterable[str]) -> str:
    """What to say about a name that is not one of a few.

    >>> choice_message("kind", "comand", ["command", "script"])
    "unknown kind 'comand'; did you mean 'command'? Choices: command, script"
    """
    choices = tuple(known)
    near = nearest(name, choices)
    hint = f"did you mean '{near}'? Choices" if near else "choices"
    return f"unknown {noun} '{shown(name)}'; {hint}: {', '.join(choices)}"


def shown(name: str) -> str:
    """A name from a request, as an error may repeat it: short, and proper Unicode."""
    short = name if len(name) <= LONGEST_ECHO else name[:LONGEST_ECHO] + "…"
    return short.encode("utf-8", "backslashreplace").decode()
