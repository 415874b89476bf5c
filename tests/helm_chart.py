"""The Helm chart of the server, rendered by helm."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
CHART = Path(__file__).parent.parent / "deploy" / "helm" / "trainmaster"
IMAGE = {"image": {"repository": "registry.example.com/trainmaster"}}


class ChartError(Exception):
    """Helm refuses the values."""


def render(values: Object | None = None, *, namespace: str = "team", arguments: tuple[str, ...] = ()) -> list[Object]:
    """The documents that the chart renders for a release called `tm`, with an image unless the values name one.

    Raises:
        ChartError: helm refuses the values, with its words.
    """
    helm = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert helm is not None, "there is no helm: make setup-dev"
    command = [helm, "template", "tm", str(CHART), "--namespace", namespace, "--values", "-", *arguments]
    answer = subprocess.run(command, input=json.dumps({**IMAGE, **(values or {})}), capture_output=True, text=True)
    if answer.returncode:
        raise ChartError(answer.stderr)
    return [document for document in yaml.safe_load_all(answer.stdout) if document]


def of_kind(documents: list[Object], kind: str) -> list[Object]:
    return [document for document in documents if document["kind"] == kind]


def only(documents: list[Object], kind: str) -> Object:
    (document,) = of_kind(documents, kind)
    return document


def permissions_of(role: Object) -> Iterator[tuple[str, str, str]]:
    """Group, resource and verb."""
    for rule in role["rules"]:
        assert rule.keys() == {"apiGroups", "resources", "verbs"}
        yield from itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
