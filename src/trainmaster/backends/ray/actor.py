"""The actor of one node of an attempt: starts the keeper in its bundle, and says how its worker ends.

Its source is executed on the head node, before that of the driver; standard library and Ray only, and without newer
syntax.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

ADOPTS = "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"


class Node:
    """One node of an attempt: an actor in its bundle."""

    def __init__(self, launch: dict[str, Any], keeper: str, number: int) -> None:
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
            [sys.executable, "-I", "-S", "-c", keeper],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.lock = threading.Lock()
        self.result: dict[str, Any] = {}
        self.tell(json.dumps(spec))

    def address(self) -> str:
        return str(importlib.import_module("ray.util").get_node_ip_address())

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
