"""The program that runs every case with one client, in the environment of that client.

`python run_cases.py kubeflow|trainmaster local|container|ours DIRECTORY INDEX_URL` writes a line of JSON for each case
into `outcomes.jsonl` of the directory; clients print what they like.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import input_cases
import job_cases
import type_cases
from blackbox_world import Place, World


def local(api: Any, options: Any, directory: Path) -> Place:
    """The machine it runs on. What kubeflow removes may be the directory that another of its jobs is in."""
    config = api.LocalProcessBackendConfig(cleanup_venv=False)
    return Place(make_client=lambda: api.TrainerClient(backend_config=config))


def ours(api: Any, options: Any, directory: Path) -> Place:
    """Our backend behind kubeflow's own client."""
    from trainmaster.trainer.kubeflow import KubeflowBackend

    def make_client() -> Any:
        client = api.TrainerClient(backend_config=api.LocalProcessBackendConfig())
        client.backend = KubeflowBackend()
        return client

    return Place(make_client=make_client)


def container(api: Any, options: Any, directory: Path) -> Place:
    """Containers of the engine and the runtime that the environment names."""
    sources = [os.environ["BLACKBOX_RUNTIME"]]
    config = {"runtime_source": api.TrainingRuntimeSource(sources=sources), "pull_policy": "Never"}
    if hasattr(options, "Volumes"):
        needed = (str(directory), os.environ["BLACKBOX_INDEX"])
        return Place(
            make_client=lambda: api.TrainerClient(backend_config=api.ContainerBackendConfig(**config)),
            options=(options.Volumes([options.Volume(source=path, target=path) for path in needed]),),
        )
    config |= {"container_host": os.environ["BLACKBOX_ENGINE"], "container_runtime": "docker"}
    return Place(
        make_client=lambda: api.TrainerClient(backend_config=api.ContainerBackendConfig(**config)),
        installs=False,
        inside="/workspace",
        outside=lambda name: Path.home() / ".kubeflow" / "trainer" / "containers" / name,
    )


PLACES = {"local": local, "ours": ours, "container": container}


def make_no_environments(directory: Path) -> None:
    """Let kubeflow find a Python that does nothing: from here on, it only matters whether a job is accepted."""
    directory.mkdir()
    (directory / "python").write_text("#!/bin/sh\nexit 1\n")
    (directory / "python").chmod(0o755)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"


def main(package: str, backend: str, directory: Path, index_url: str) -> None:
    tempfile.tempdir = str(directory / "temporary")
    (directory / "temporary").mkdir()
    api = importlib.import_module(f"{package}.trainer")
    options = importlib.import_module(f"{package}.trainer.options")
    world = World(api, options, PLACES[backend](api, options, directory), directory, index_url)
    code = 1
    try:
        world.start_jobs()
        make_no_environments(directory / "no-python")
        with (directory / "outcomes.jsonl").open("w") as file:
            for case in (*type_cases.CASES, *input_cases.CASES, *job_cases.CASES):
                print(json.dumps({"case": case.__name__, "outcome": come_to(case, world)}), file=file, flush=True)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        world.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a thread of kubeflow's waits for a job that was deleted and goes on


def come_to(case: Callable[[World], str], world: World) -> str:
    """The outcome of a case; that it broke is one too."""
    try:
        return case(world)
    except Exception:
        return f"the case broke: {traceback.format_exc()}"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
