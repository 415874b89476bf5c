"""The worker of a node of a cluster, where `bootstrap` has brought it: finds out where it is, and runs a courier."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from trainmaster.protocol.environment import ECHO
from trainmaster.protocol.request import ContainerOverrides
from trainmaster.worker.courier import run_courier
from trainmaster.worker.processes import set_undumpable
from trainmaster.worker.uplink import AttemptRefusedError

_NAME_WITHIN_S = 600.0
"""How long the server's name, or the network, may be missing when a node has just come up."""
_PORTS = {"http": 80, "https": 443}


def run_remote(given: bytes) -> int:
    """Run one node; `given` is the document that `bootstrap` leaves on standard input. Returns the exit code."""
    set_undumpable()  # it holds the attempt's token
    spec = json.loads(given)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    node = int(os.environ.pop(spec["node_variable"]))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = ContainerOverrides(
        address=address_towards(spec["server_url"]),
        # Without the variable, the node shows the attempt only its own GPUs.
        gpus=tuple(filter(None, gpus.split(","))) if gpus is not None else None,
    )
    echoes = os.environ.pop(ECHO, "") == "1"
    directory = Path(spec["work_dir"]) / "attempts" / f"{spec['attempt_id']}.{node}"
    try:
        run_courier(
            spec["server_url"],
            spec["token"],
            spec["attempt_id"],
            node,
            directory,
            own=own,
            grace_s=spec["grace_s"],
            caches=Path(spec["work_dir"]) / "caches",
            echoes=echoes,
        )
    except AttemptRefusedError as error:
        sys.stderr.write(f"trainmaster: the server refused this attempt: {error}\n")
        return 1
    return 0


def address_towards(server_url: str) -> str:
    """The address of this node by which it reaches the server, which may be away: peers reach the node there, too."""
    parts = urlsplit(server_url)
    deadline = time.monotonic() + _NAME_WITHIN_S
    while True:
        try:
            family, kind, _, _, target = socket.getaddrinfo(
                parts.hostname, parts.port or _PORTS[parts.scheme], type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing, and chooses the way
                return str(probe.getsockname()[0])
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)
