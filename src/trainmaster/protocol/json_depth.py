"""How deep a JSON document goes. The server and the trainers must agree about it: what one takes, the other is sent."""

from __future__ import annotations

from typing import Any


def is_deeper(value: object, most: int) -> bool:
    """Whether more than `most` objects and lists lie within each other; what is neither counts for nothing."""
    level: list[Any] = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True
