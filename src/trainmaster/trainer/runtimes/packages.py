"""What is installed where the jobs of a runtime run: asked by a small job there."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainmaster.client import Client, ClientError, NotFoundError
from trainmaster.protocol.function_runner import MPI_LAUNCHER
from trainmaster.trainer.resources import nodes_from
from trainmaster.trainer.runtimes.definition import TrainingRuntime

_log = logging.getLogger(__name__)

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
        except NotFoundError:
            pass  # it was refused
        except ClientError as error:
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
