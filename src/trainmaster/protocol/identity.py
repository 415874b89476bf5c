"""What names a job class's run: project, group and name, each one segment of the path of its checkpoints."""

from __future__ import annotations

import re

POINTERS = ("latest", "best")
"""Files beside the checkpoints of a run that name one of them. Nothing else may be called like that."""

SEGMENT_PATTERN = r"(?!(?:latest|best)$)[A-Za-z0-9_][A-Za-z0-9 ._+=@,-]{0,127}"
"""What is neither a pointer, nor anything that a file system or an object store reads in a way of its own."""
SEGMENT_SAYS = (
    "has letters, digits, spaces and . _ + = @ , - begins with a letter, a digit or _, and is neither latest nor best"
)

RUN_FILE = "run.json"
"""The input of a launch that tells the runner of job classes what to run."""

_segment = re.compile(SEGMENT_PATTERN)


def is_segment(text: str) -> bool:
    """Whether a text can be a project, a group or a name."""
    return _segment.fullmatch(text) is not None
