"""Every runtime that a client can name (of its sources, its server, built in), and what is installed for its jobs."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster import client as api
from trainmaster.client import Client
from trainmaster.protocol.function_runner import MPI_LAUNCHER
from trainmaster.trainer.errors import NotFoundError
from trainmaster.trainer.resources import nodes_from
from trainmaster.trainer.runtimes.document import TrainingRuntime, runtime_of
from trainmaster.trainer.runtimes.sources import (
    FoundRuntimes,
    RuntimeFileProblem,
    SourceError,
    SourceReader,
    built_in,
    read_files,
    read_into,
)
from trainmaster.trainer.types import Listing, Runtime

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    found: FoundRuntimes
    chosen: bool = False
    """Whether the user named it: then what cannot be read of it might be what is looked for."""


class RuntimeCatalog:
    """Runtimes by name. Of several with a name the first counts: sources in their order, the server's, built-in ones.

    Nothing is remembered between two calls, but for what comes from the network (`SourceCache`).
    """

    def __init__(
        self, client: Client | None = None, sources: Sequence[str] = (), *, reader: SourceReader | None = None
    ) -> None:
        self._client = client
        self._sources = tuple(sources)
        self._reader = reader or SourceReader()

    def list(self) -> Listing[Runtime]:
        """All runtimes. What cannot be read is logged, and left out."""
        return Listing(runtime_of(definition) for definition in self.definitions())

    def get(self, name: str) -> Runtime:
        """The runtime of a name.

        Raises:
            NotFoundError: there is none.
            ValueError: it cannot be read, or a source before it cannot, so that nobody knows whether it is the one.
        """
        return runtime_of(self.definition(name))

    def definitions(self) -> Sequence[TrainingRuntime]:
        """All runtimes, with everything that a job takes from them."""
        found: dict[str, TrainingRuntime] = {}
        for place in self._places():
            for problem in place.found.problems:
                _log.warning("%s", problem.message)
            for definition in place.found.runtimes:
                found.setdefault(definition.name, definition)
        return tuple(found.values())

    def definition(self, name: str) -> TrainingRuntime:
        """The runtime of a name, with everything that a job takes from it.

        Raises:
            NotFoundError: there is none.
            ValueError: it cannot be read, or a source before it cannot.
        """
        known: list[str] = []
        for place in self._places():
            if definition := place.found.get(name):
                for variable in definition.left_out:
                    _log.warning("%s: %s has its value from a cluster, and is not set", definition.origin, variable)
                return definition
            for problem in place.found.problems:
                if problem.runtime == name or (problem.runtime is None and place.chosen):
                    raise ValueError(f"the runtime {name!r} cannot be read: {problem.message}")
                _log.warning("%s", problem.message)
            known += [runtime.name for runtime in place.found.runtimes]
        raise NotFoundError("runtime", name, dict.fromkeys(known))

    def _places(self) -> Iterator[_Place]:
        """Where runtimes are, each looked at when its turn comes."""
        for source in self._sources:
            yield _Place(found=self._of_source(source), chosen=True)
        if self._client is not None:
            yield _Place(found=_of_server(self._client))
        yield _Place(found=built_in())

    def _of_source(self, source: str) -> FoundRuntimes:
        try:
            found = read_files(self._reader.files(source))
        except SourceError as error:
            return FoundRuntimes(problems=(RuntimeFileProblem(message=str(error)),))
        if found.runtimes or found.problems:
            return found
        return FoundRuntimes(problems=(RuntimeFileProblem(message=f"{source}: there is no training runtime in it"),))


def _of_server(client: Client) -> FoundRuntimes:
    answer = client.runtimes.list()
    found: dict[str, TrainingRuntime] = {}
    problems = [
        RuntimeFileProblem(message=f"the server's {each['file']}: {each['message']}") for each in answer["problems"]
    ]
    for runtime in answer["runtimes"]:
        read_into(found, problems, runtime["document"], f"the server's {runtime['file']}")
    return FoundRuntimes(runtimes=tuple(found.values()), problems=tuple(problems))


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
    afterwards.

    Raises:
        ClientError: the server refuses the job, such as one that needs an image and has none.
        RuntimeError: the job failed; the message has its last lines.
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
