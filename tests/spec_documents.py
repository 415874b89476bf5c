"""Documents that the spec tests start from, and how a field in them is changed."""

from __future__ import annotations

import copy
from typing import Any

COMMAND: dict[str, Any] = {
    "name": "n",
    "workload": {"kind": "command", "argv": ["sh", "-c", "echo hi"]},
    "resource_config": {"gpu_count": 0},
}
CUSTOM: dict[str, Any] = {
    "name": "n",
    "training_config": {
        "training_type": "LORA",
        "base_model": {"model_id": "org/model"},
        "framework": {"type": "CUSTOM", "custom_script_path": "/srv/train.py"},
    },
    "data_config": {"sources": [{"path": "hf://org/data"}]},
}

LORA: dict[str, Any] = {
    "name": "n",
    "training_config": {"training_type": "LORA", "base_model": {"model_id": "org/model"}},
    "data_config": {"sources": [{"path": "hf://org/data"}]},
}


def changed(document: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of a document in which the field at a dotted path has another value; `[0]` is a path part of its own."""
    result = copy.deepcopy(document)
    *parents, last = path.replace("[0]", ".0").split(".")
    place: Any = result
    for part in parents:
        place = place[int(part)] if part.isdigit() else place.setdefault(part, {})
    place[int(last) if last.isdigit() else last] = value
    return result


def at(document: Any, path: str) -> Any:
    """What a document holds at a dotted path."""
    for part in path.replace("[0]", ".0").split("."):
        document = document[int(part)] if part.isdigit() else document[part]
    return document
