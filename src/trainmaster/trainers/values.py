"""Values that users write as strings, read as what they mean."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from trainmaster.trainers.document import DocumentError

_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parsed(text: str) -> Any:
    """A number, truth value, list, object or null where the text is one; else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = json.loads(text)
    except ValueError:
        return _number(text)
    return value if not isinstance(value, float) or math.isfinite(value) else text


def refuse_unknown(where: str, keys: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Refuse keys that nobody would read.

    Raises:
        DocumentError: names the first key that is not known, with the nearest that is, or where it belongs.
    """
    allowed = sorted(known)
    for key in keys:
        if place := elsewhere.get(key):
            raise DocumentError(f"{where}.{key}: set {place} instead")
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise DocumentError(f"{where}.{key} is not known" + (f"; did you mean {near[0]}?" if near else ""))


def _number(text: str) -> Any:
    # JSON has no `1.` and no `.5`, which people write.
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
