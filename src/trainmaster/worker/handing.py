"""Handing a document to another program: by a file in memory, which nobody else can look at."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any


def handed(document: Mapping[str, Any]) -> int:
    """A descriptor from which a program reads a document as its standard input.

    Its environment would not do: what a job sets there, such as LD_PRELOAD, would change the program itself.
    """
    descriptor = os.memfd_create("handed")
    with open(descriptor, "w", closefd=False) as file:
        json.dump(document, file)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
