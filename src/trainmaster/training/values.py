"""Values that users write as strings, read as what they mean."""

from __future__ import annotations

import json
import math
from typing import Any

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


def _number(text: str) -> Any:
    # JSON has no `1.` and no `.5`, which people write.
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
