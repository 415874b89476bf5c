"""Handing a document to another program, and having one back: by a file in memory, which nobody else can look at.

A worker has programs that only lead into a container. What they say comes back by the very file that they were handed:
what runs in the container could write to any other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from typing import Any

KILL_LED = signal.SIGALRM
"""Has a program that leads into a container kill that, which its own death would not."""
_STDIN = 0
_ANSWER = "answer"


def handed(document: Mapping[str, Any]) -> int:
    """A descriptor from which a program reads a document as its standard input.

    Its environment would not do: what a job sets there, such as LD_PRELOAD, would change the program itself.
    """
    descriptor = os.memfd_create("handed")
    _write(descriptor, document)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def hand_back(answer: Mapping[str, Any]) -> None:
    """Put an answer in the place of what this program was handed as its standard input."""
    os.ftruncate(_STDIN, 0)
    _write(_STDIN, {_ANSWER: answer})


def handed_back(descriptor: int) -> Mapping[str, Any] | None:
    """The answer of a program that has ended; None where it has none. The descriptor is closed."""
    with open(descriptor, "rb") as file, contextlib.suppress(ValueError):
        file.seek(0)
        answer = json.load(file).get(_ANSWER)
        # What was handed may have a word of this name, if nobody came to replace it.
        return answer if isinstance(answer, dict) else None
    return None


def _write(descriptor: int, document: Mapping[str, Any]) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "w", closefd=False) as file:
        json.dump(document, file)
