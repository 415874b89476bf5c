"""The program of the Ray job of an attempt: places its nodes, runs the worker of each, and reports how they ended.

Its source is executed by `render.LOADER` on the head node, which has connected to Ray and read `launch`; standard
library and Ray only, and without newer syntax. The last line of its output says how the nodes ended that ended badly.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

RESULT = "trainmaster-result: "
REFUSED, LOST = 77, 78
SHOWN = 8
"""Nodes whose end is reported: Ray keeps 20,000 characters."""
ADOPTS = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


class Node:
    """One node of the attempt: an actor in its bundle."""

    def __init__(self, launch: dict[str, Any], number: int) -> None:
        ray: Any = importlib.import_module("ray")
        gpus = sorted((str(gpu) for gpu in ray.get_gpu_ids()), key=lambda gpu: (len(gpu), gpu))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment.update(launch["environment"])
        environment.update(launch["secrets"])
        environment[launch["node_variable"]] = str(number)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        # A node agent that adopts orphans kills those that it does not know.
        adopts = os.environ.get(ADOPTS, "")
        spec = {
            "command": launch["command"],
            "environment": environment,
            "grace_s": launch["grace_s"],
            "lost_grace_s": launch["lost_grace_s"],
            "detach": adopts.lower() not in ("1", "true"),
        }
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", launch["keeper"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.lock = threading.Lock()
        self.result: dict[str, Any] = {}
        self.tell(json.dumps(spec))

    def wait(self) -> dict[str, Any]:
        with self.lock:
            if not self.result:
                line = self.keeper.stdout.readline() if self.keeper.stdout else b""
                self.result = json.loads(line) if line else {"exit": -9, "tail": "the process above it was killed"}
            return self.result

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self.tell("stop")

    def tell(self, line: str) -> None:
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(line.encode() + b"\n")
        self.keeper.stdin.flush()


def main(launch: dict[str, Any]) -> None:
    ray: Any = importlib.import_module("ray")
    asked: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
    try:
        bundle, group = place(ray, launch)
    except (TypeError, ValueError) as error:
        finish(ray, {"refused": str(error)[:2000]}, REFUSED)
    pause_s = 0.5
    while not group.wait(timeout_seconds=pause_s):
        if asked:
            finish(ray, {}, 0)
        pause_s = min(pause_s * 1.5, 5)
    results = follow(ray, launch, start(ray, launch, bundle, group), asked)
    bad = {number: result for number, result in sorted(results.items()) if result.get("exit") != 0}
    lost = any("lost" in result for result in bad.values())
    first = next(iter(bad.values()), {"exit": 0})
    code = LOST if lost else first["exit"] if first["exit"] >= 0 else 128 - first["exit"]
    finish(ray, {"nodes": dict(list(bad.items())[:SHOWN])}, code)


def place(ray: Any, launch: dict[str, Any]) -> tuple[dict[str, float], Any]:
    """A bundle for each node, and the group that waits until all fit."""
    bundle = dict(launch["bundle"])
    known = {name.partition(":")[2] for name in ray.cluster_resources() if name.startswith("accelerator_type:")}
    if launch["accelerators"]:
        same = [name for wanted in launch["accelerators"] for name in sorted(known) if words(name) == words(wanted)]
        more = [name for wanted in launch["accelerators"] for name in sorted(known) if words(name) > words(wanted)]
        bundle["accelerator_type:" + (same + more + launch["accelerators"][-1:])[0]] = 0.001
    options: dict[str, Any] = {}
    if launch["labels"]:
        options["bundle_label_selector"] = [launch["labels"]] * launch["nodes"]
    make = importlib.import_module("ray.util").placement_group
    try:
        group = make([bundle] * launch["nodes"], strategy=launch["strategy"], name=launch["name"], **options)
    except TypeError:
        if options:
            raise ValueError("this version of Ray cannot choose nodes by labels; 2.49 can")  # noqa: B904
        raise
    return bundle, group


def start(ray: Any, launch: dict[str, Any], bundle: dict[str, float], group: Any) -> list[Any]:
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    return [
        ray.remote(Node)
        .options(
            name=f"{launch['name']}/{number}",
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            memory=int(bundle["memory"]) if "memory" in bundle else None,
            resources=rest,
            max_restarts=0,
            max_concurrency=8,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=number
            ),
        )
        .remote(launch, number)
        for number in range(launch["nodes"])
    ]


def follow(ray: Any, launch: dict[str, Any], nodes: list[Any], asked: list[bool]) -> dict[int, dict[str, Any]]:
    """How each node ended; returns when all have."""
    results: dict[int, dict[str, Any]] = {}
    waits = {node.wait.remote(): number for number, node in enumerate(nodes)}
    told: float | None = None
    unavailable = getattr(ray.exceptions, "ActorUnavailableError", ())
    while waits:
        done, _ = ray.wait(list(waits), timeout=1)
        if asked and told is None:
            told = time.monotonic()
            for node in nodes:
                node.stop.remote()
        if told is not None and time.monotonic() > told + launch["grace_s"] + 20:
            break
        for wait in done:
            number = waits.pop(wait)
            try:
                results[number] = ray.get(wait)
            except ray.exceptions.RayError as error:
                if isinstance(error, unavailable):
                    time.sleep(1)
                    waits[nodes[number].wait.remote()] = number
                else:
                    results[number] = lost(error)
    return results


def lost(error: Exception) -> dict[str, Any]:
    """Why an actor is gone, in Ray's words, and which of four kinds that is."""
    text = str(error)
    if getattr(error, "preempted", False):
        kind = "preempted"
    elif "OutOfMemory" in type(error).__name__ or "running low on memory" in text or "OOM" in text:
        kind = "memory"
    elif re.search(r"node (has died|died|was terminated|failed)|its node", text, re.IGNORECASE):
        kind = "node"
    else:
        kind = "worker"
    return {"lost": kind, "message": text[:1000]}


def words(name: str) -> set[str]:
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return {re.sub(r"^(\d+)gb$", r"\1g", word) for word in found} - {"nvidia", "tesla"}


def finish(ray: Any, result: dict[str, Any], code: int) -> NoReturn:
    """Ray shows the last lines of a job that failed."""
    try:
        ray.shutdown()
    finally:
        sys.stdout.write("\n" + RESULT + json.dumps(result) + "\n")
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main(globals()["launch"])
