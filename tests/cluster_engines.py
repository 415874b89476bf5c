"""The engines of clusters that the same tests run over. A new engine is a class, and its name in `ENGINES`.

`python -m cluster_engines slurm`, with this folder in PYTHONPATH, runs one until its standard input ends. It prints a
line of JSON: `missing` says why there can be none here; `options` and `environment` are what a server needs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray_cluster
import slurm_cluster
from engine_under_test import EngineUnderTest
from kubernetes_under_test import KubernetesUnderTest
from ray_cluster import RayCluster
from slow_dashboard import slow_dashboard
from slurm_cluster import SlurmCluster


class SlurmUnderTest(EngineUnderTest):
    kind = "slurm"
    gpus = 4
    cores = slurm_cluster.CPUS

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        (cluster.directory / "work").mkdir(exist_ok=True)

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[SlurmUnderTest]:
        with slurm_cluster.running_cluster() as cluster:
            yield cls(cluster)

    def options(self) -> dict[str, Any]:
        place = self.cluster.directory
        dirs = {"output_dir": f"{place}/out", "work_dir": f"{place}/work"}
        return {"partition": "low", "conf": str(self.cluster.conf), "poll_s": 0.2, **dirs}

    def environment(self) -> dict[str, str]:
        return {"PATH": self.cluster.environment["PATH"]}

    def counting(self, directory: Path) -> dict[str, Any]:
        return self._programs(directory, f'echo "$0 $*" >> {directory}/asked')

    def check_load(self, directory: Path, attempts: int) -> None:
        """Once when it is handed over, and once to find out whether it was before."""
        asked = [line.rpartition("/")[2] for line in (directory / "asked").read_text().splitlines()]
        assert sum(line.startswith("sbatch ") for line in asked) == attempts
        # Two for those that were under way when the leader was killed.
        assert sum(line.startswith("squeue ") and "--name" in line for line in asked) < 1.5 * attempts
        assert sum(line.startswith("scancel ") for line in asked) == 0

    @contextlib.contextmanager
    def slow(self, directory: Path) -> Iterator[dict[str, Any]]:
        turns = f"n=$(wc -l < {directory}/turns); echo >> {directory}/turns; sleep 1"
        refusal = "slurm_load_jobs error: Slurm temporarily unable to accept job, sleeping and retrying"
        (directory / "turns").touch()
        yield self._programs(directory, f'{turns}\nif [ $((n % 3)) = 2 ]; then echo "{refusal}" >&2; exit 1; fi')

    def _programs(self, directory: Path, begin: str) -> dict[str, Any]:
        """Slurm's programs, each of which does something first."""
        place = directory / "programs"
        place.mkdir()
        for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct"):
            (place / name).write_text(f'#!/bin/sh\n{begin}\nexec {shutil.which(name)} "$@"\n')
            (place / name).chmod(0o755)
        return {"bin_dir": str(place)}

    def left(self, mark: str = "") -> list[str]:
        names = self.cluster.run("squeue", "--noheader", "--format=%j").split()
        return [name for name in names if mark in name]

    def remove(self, job_id: str) -> None:
        (name,) = self.left(job_id)
        self.cluster.run("scancel", f"--name={name}")

    def kill_controller(self) -> None:
        numbers = self.cluster.run("squeue", "--noheader", "--format=%A").split()
        self.cluster.kill_controller(*numbers)

    def start_controller(self) -> None:
        self.cluster.start_controller()

    def kill_node(self) -> None:
        self.cluster.kill_node("n2")

    def start_node(self) -> None:
        self.cluster.start_node("n2")


class SlurmRestUnderTest(SlurmUnderTest):
    """Reached by slurmrestd."""

    def options(self) -> dict[str, Any]:
        return self.cluster.rest_options(work_dir=f"{self.cluster.directory}/work", poll_s=0.2)


class RayUnderTest(EngineUnderTest):
    kind = "ray"
    gpus = ray_cluster.GPUS
    cores = ray_cluster.CPUS
    lost_with_controller = True

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        (cluster.directory / "work").mkdir(exist_ok=True)

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[RayUnderTest]:
        with ray_cluster.running_ray() as cluster:
            yield cls(cluster)

    def options(self) -> dict[str, Any]:
        return {
            "address": self.cluster.address,
            "work_dir": f"{self.cluster.directory}/work",
            "poll_s": 0.5,
        }

    def check_load(self, directory: Path, attempts: int) -> None:
        """One process of the head follows all of them."""
        jobs = [each for each in self.cluster.get("/api/jobs/") if each["type"] == "SUBMISSION"]
        assert not [each for each in jobs if each["submission_id"].startswith("tm-")]

    @contextlib.contextmanager
    def slow(self, directory: Path) -> Iterator[dict[str, Any]]:
        with slow_dashboard(self.cluster.address) as slow:
            yield {"address": slow.url}

    def left(self, mark: str = "") -> list[str]:
        actors = self._states("actors", state="DEAD")
        groups = self._states("placement_groups", state="REMOVED")
        names = {each["name"].partition("/")[0] for each in [*actors, *groups]}
        return sorted(name for name in names if name.startswith("tm-") and mark in name)

    def remove(self, job_id: str) -> None:
        """By its placement group: `ray list placement-groups` shows it."""
        self.cluster.remove_group(*self.left(job_id))

    def kill_controller(self) -> None:
        self.cluster.kill(ray_cluster.HEAD)

    def start_controller(self) -> None:
        assert any(self.cluster.start_head() for _ in range(ray_cluster.TRIES)), self.cluster.log(ray_cluster.HEAD)

    def kill_node(self) -> None:
        self.cluster.kill(ray_cluster.SECOND)

    def start_node(self) -> None:
        if ray_cluster.SECOND in self.cluster.processes:
            self.cluster.kill(ray_cluster.SECOND)  # it belonged to a head that is gone
        assert self.cluster.start_second(), self.cluster.log(ray_cluster.SECOND)

    def _states(self, kind: str, *, state: str) -> list[dict[str, Any]]:
        """Those that are not in a state."""
        only = {"filter_keys": "state", "filter_predicates": "!=", "filter_values": state}
        found = self.cluster.get(f"/api/v0/{kind}", limit=10_000, **only)["data"]["result"]["result"]
        return list(found)


ENGINES: Mapping[str, Callable[[], contextlib.AbstractContextManager[EngineUnderTest]]] = {
    "slurm": SlurmUnderTest.running,
    "ray": RayUnderTest.running,
    "kubernetes": KubernetesUnderTest.running,
}
"""Kind -> a cluster, for the length of a block."""
MISSING: Mapping[str, Callable[[], str | None]] = {
    "slurm": slurm_cluster.missing,
    "ray": ray_cluster.missing,
    "kubernetes": lambda: None,
}
"""Kind -> why there can be none on this machine; None where there can."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster_engines")
    parser.add_argument("kind", choices=ENGINES)
    kind = parser.parse_args().kind
    if reason := MISSING[kind]():
        print(json.dumps({"missing": reason}), flush=True)
        return
    with ENGINES[kind]() as engine:
        print(json.dumps({"options": engine.options(), "environment": engine.environment()}), flush=True)
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
