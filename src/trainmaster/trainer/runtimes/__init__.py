"""Training runtimes, in files like Kubeflow's: all that a client can name, and the packages that their jobs find."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster import client as api
from trainmaster.client import Client
from trainmaster.protocol.function_runner import MPI_LAUNCHER
from trainmaster.trainer.errors import NotFoundError
from trainmaster.trainer.place import Place
from trainmaster.trainer.resources import nodes_from
from trainmaster.trainer.runtimes.document import TrainingRuntime, runtime_of
from trainmaster.trainer.runtimes.sources import FoundRuntimes, SourceError, SourceReader, built_in, read_files
from trainmaster.trainer.types import Listing, Runtime

__all__ = ["RuntimeCatalog", "TrainingRuntime", "runtime_of", "runtime_packages"]

_log = logging.getLogger(__name__)


class RuntimeCatalog:
    """Runtimes by name. Of several with a name the first counts: sources in their order, those of the Kubernetes
    cluster that jobs run on, the server's, built-in ones.

    Nothing is remembered between two calls, but for what comes from the network (`SourceCache`).
    """

    def __init__(
        self,
        client: Client | None = None,
        sources: Sequence[str] = (),
        *,
        place: Place | None = None,
        reader: SourceReader | None = None,
    ) -> None:
        self._client = client
        self._place = place
        self._sources = tuple(sources)
        self._reader = reader or SourceReader()

    def list(self) -> Listing[Runtime]:
        """All runtimes. What cannot be read is logged, and left out."""
        return Listing(runtime_of(definition) for definition in self.definitions())

    def definitions(self) -> Sequence[TrainingRuntime]:
        """All runtimes, with everything that a job takes from them."""
        found: dict[str, TrainingRuntime] = {}
        for place, _ in self._places():
            for problem in place.problems:
                _log.warning("%s", problem.message)
            for name, definition in place.runtimes.items():
                found.setdefault(name, definition)
        return tuple(found.values())

    def definition(self, name: str) -> TrainingRuntime:
        """The runtime of a name, with everything that a job takes from it; NotFoundError: there is none.

        Raises ValueError if it cannot be read, or a source before it cannot: nobody knows then which is the one.
        """
        known: list[str] = []
        for place, is_source in self._places():
            if definition := place.runtimes.get(name):
                for variable in definition.left_out:
                    unless = " unless the job is a TrainJob" if definition.in_cluster else ""
                    _log.warning(
                        "%s: %s has its value from a cluster, and is not set%s", definition.origin, variable, unless
                    )
                return definition
            for problem in place.problems:
                if problem.runtime == name or (problem.runtime is None and is_source):
                    raise ValueError(f"the runtime {name!r} cannot be read: {problem.message}")
                _log.warning("%s", problem.message)
            known += place.runtimes
        raise NotFoundError("runtime", name, dict.fromkeys(known))

    def _places(self) -> Iterator[tuple[FoundRuntimes, bool]]:
        """Where runtimes are, each read when its turn comes; and whether it is a source that the user named."""
        for source in self._sources:
            yield self._of_source(source), True
        if self._client is not None:
            if self._place is not None and self._place.cluster is not None:
                yield _of_cluster(self._client, self._place.cluster), False
            yield _of_server(self._client), False
        yield built_in(), False

    def _of_source(self, source: str) -> FoundRuntimes:
        try:
            found = read_files(self._reader.files(source))
        except SourceError as error:
            found = FoundRuntimes()
            found.refuse(str(error))
        if not found.runtimes and not found.problems:
            found.refuse(f"{source}: there is no training runtime in it")
        return found


def _of_cluster(client: Client, name: str) -> FoundRuntimes:
    """None, where Kubeflow Trainer is not installed."""
    found = FoundRuntimes()
    for runtime in client.cluster.runtimes(name)["runtimes"]:
        found.read(runtime["document"], f"the {runtime['kind']} of {name}")
    found.runtimes = {each: replace(definition, in_cluster=True) for each, definition in found.runtimes.items()}
    return found


def _of_server(client: Client) -> FoundRuntimes:
    answer = client.runtimes.list()
    found = FoundRuntimes()
    for problem in answer["problems"]:
        found.refuse(f"the server's {problem['file']}: {problem['message']}")
    for runtime in answer["runtimes"]:
        found.read(runtime["document"], f"the server's {runtime['file']}")
    return found


RESULT = "result.json"
LOOK = """\
def look():
    import importlib.metadata
    import shutil
    import subprocess

    found = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower(), f"{name}=={distribution.version}")
    accelerators = []
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
        if listed.returncode == 0:
            accelerators = [line for line in listed.stdout.splitlines() if line.strip()]
    return {"packages": [found[name] for name in sorted(found)], "accelerators": accelerators}
"""
"""What the job runs. It may be an image with an old Python and nothing of ours."""


def runtime_packages(client: Client, runtime: TrainingRuntime, *, backend: str | None = None) -> list[str]:
    """Print and return the packages, such as `torch==2.9.0`, and the GPUs of a node on which a runtime's jobs run.

    A job of one node looks, in the runtime's image where it has one. It waits for its turn like any other, and is gone
    afterwards. Raises ClientError if the server refuses the job, and RuntimeError, with its last lines, if it failed.
    """
    handle = f"packages-{secrets.token_hex(5)}"
    document = _document(runtime, handle, backend)
    try:
        client.submit(document)
        with contextlib.closing(client.follow_events(handle)) as events:
            for _ in events:
                pass
        found = _result(client, handle, runtime)
    finally:
        try:
            client.delete(handle, purge=True)
        except api.NotFoundError:
            pass  # it was refused
        except api.ClientError as error:
            _log.warning("the job %s cannot be deleted: %s", handle, error)
    lines = [*found["packages"], *found["accelerators"]]
    sys.stdout.write("\n".join([f"{runtime.name}: {len(found['packages'])} packages", *lines]) + "\n")
    return lines


def _document(runtime: TrainingRuntime, handle: str, backend: str | None) -> dict[str, Any]:
    nodes = nodes_from(1, dict(runtime.resources) or None)
    workload: dict[str, Any] = {
        "kind": "function",
        "source": LOOK,
        "name": "look",
        "arguments": {},
        # One process looks, which needs no launcher.
        "environment": {name: value for name, value in runtime.environment.items() if name != MPI_LAUNCHER},
        "packages": list(runtime.packages),
    }
    if runtime.image is not None:
        workload["image"] = runtime.image
    return {
        "name": handle,
        "handle": handle,
        "labels": {"trainmaster.io/runtime": runtime.name},
        "workload": workload,
        # Without a word of the runtime's it needs no GPU, and so waits for none.
        "resource_config": {"gpu_count": 0, **nodes.resource_config},
        **({"backend": backend} if backend is not None else {}),
    }


def _result(client: Client, handle: str, runtime: TrainingRuntime) -> dict[str, Sequence[str]]:
    job = client.get(handle)
    if job["status"] != "COMPLETED":
        error = job["error"]
        why = [error["error_message"], *error["last_lines"]] if error else [job["status"]]
        raise RuntimeError("\n".join([f"the packages of runtime {runtime.name} cannot be listed: {why[0]}", *why[1:]]))
    with tempfile.TemporaryDirectory() as directory:
        client.results.download(handle, directory, patterns=[RESULT])
        found: dict[str, Sequence[str]] = json.loads((Path(directory) / RESULT).read_text("utf-8"))
    return found
