"""Every public name, signature, default and value of the real `kubeflow` package is ours, or a listed difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client_programs import PROGRAMS, ROOT
from patience import PATIENCE_S
from surface_differences import SURFACE

KUBEFLOW = ROOT / ".venvs" / "kubeflow" / "bin" / "python"


@pytest.fixture(scope="module")
def surfaces() -> tuple[Any, Any]:
    """What the real package offers, and what ours does."""
    assert KUBEFLOW.exists(), f"{KUBEFLOW} is missing: run `make setup-dev`"
    with ThreadPoolExecutor() as threads:
        found = threads.map(_surface, (KUBEFLOW, Path(sys.executable)), ("kubeflow.trainer", "trainmaster.trainer"))
        real, own = found
        return real, own


def test_surface_differs_from_the_real_package_only_where_it_is_written(surfaces: tuple[Any, Any]) -> None:
    theirs, ours = surfaces
    assert len(theirs["trainer"]) == 30, "names of the real package are missed"
    found = {
        f"{module}.{place}": what
        for module, names in theirs.items()
        for name, described in names.items()
        for place, what in _differences(name, described, ours[module].get(name))
    }
    assert found == {place: what for each in SURFACE for place, what in each.places.items()}


def test_options_are_called_like_the_real_ones(surfaces: tuple[Any, Any]) -> None:
    theirs, ours = surfaces
    called = [each["name"] for each in theirs["options"]["Name"]["methods"]["__call__"]]
    assert called == [each["name"] for each in ours["options"]["Option"]["methods"]["__call__"]]


def test_configuration_of_the_real_kubernetes_client_is_taken() -> None:
    program = (
        "from kubernetes.client import Configuration\n"
        "from trainmaster.trainer import KubernetesBackendConfig\n"
        "given = Configuration()\n"
        "assert KubernetesBackendConfig(client_configuration=given).client_configuration is given\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [KUBEFLOW, "-c", program], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


def _surface(python: Path, package: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEFAULT_")}
    done = subprocess.run(
        [python, PROGRAMS / "trainer_surface.py", package], env=kept, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _differences(name: str, theirs: dict[str, Any], ours: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Where and in what ours is not the same. It may have more: names, methods, and parameters that may be left out."""
    if ours is None:
        yield name, "missing"
        return
    for what in ("value", "members"):
        if theirs.get(what) != ours.get(what):
            yield name, what
    if not set(theirs.get("properties", ())) <= set(ours.get("properties", ())):
        yield name, "properties"
    yield from _different_parameters(name, theirs.get("parameters", []), ours.get("parameters", []))
    for method, parameters in theirs.get("methods", {}).items():
        if method == "__call__":
            continue  # of options, which inherit it here
        if method not in ours["methods"]:
            yield f"{name}.{method}", "missing"
        else:
            yield from _different_parameters(f"{name}.{method}", parameters, ours["methods"][method])


def _different_parameters(place: str, theirs: list[Any], ours: list[Any]) -> Iterator[tuple[str, str]]:
    if [each["name"] for each in theirs] != [each["name"] for each in ours[: len(theirs)]]:
        yield place, "parameters"
        return
    for their, our in zip(theirs, ours, strict=False):
        different = [what for what in ("default", "kind") if their[what] != our[what]]
        if not _takes(our["type"], their["type"]):
            different.append("type")
        if different:
            yield f"{place}.{their['name']}", ", ".join(different)
    for more in ours[len(theirs) :]:
        if more["default"] is None:
            yield f"{place}.{more['name']}", "required"


def _takes(ours: str | None, theirs: str | None) -> bool:
    """Whether whatever may be given there may be given here."""
    if ours is None or theirs is None:
        return True
    taken = set(ours.split(" | "))
    return set(theirs.split(" | ")) <= taken | ({"int"} if "float" in taken else set())
