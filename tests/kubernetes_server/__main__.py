"""`python -m kubernetes_server --nodes 2 --gpus 4 --kubeconfig FILE`: a cluster in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import tempfile
from pathlib import Path

from kubernetes_server.server import serve
from kubernetes_server.settings import ClusterSettings, Timing
from kubernetes_server.trainer.definitions import VERSIONS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kubernetes_server", description=__doc__)
    add = parser.add_argument
    add("--kubeconfig", type=Path, required=True, help="the file that is written once the server is ready")
    add("--directory", type=Path, help="for pods and logs (default: a temporary one)")
    add("--port", type=int, default=0)
    add("--nodes", type=int, default=2)
    add("--gpus", type=int, default=0, help="nvidia.com/gpu of each node")
    add("--cpu", default="8", help="of each node")
    add("--memory", default="16Gi", help="of each node")
    add("--max-pods", type=int, default=110, help="of each node")
    add("--fake", action="store_true", help="only pretend to run pods")
    add("--image", action="append", default=[], help="an image that can be pulled (default: every image)")
    add("--bare", action="append", default=[], help="an image without programs, such as sh and python3")
    add("--hidden", action="append", default=[], help="a folder of this machine that is empty in pods")
    add("--trainer", choices=VERSIONS, default="", help="install Kubeflow Trainer, with JobSet")
    add("--real-timing", action="store_true", help="wait as long as the real components do")
    add("--set", action="append", default=[], metavar="NAME=SECONDS", help="a field of settings.Timing")
    add("--with-parent", action="store_true", help="end when stdin does")
    given = parser.parse_args()
    timing = Timing.real() if given.real_timing else Timing()
    timing = dataclasses.replace(
        timing, **{name: float(value) for name, value in (each.split("=") for each in given.set)}
    )
    with contextlib.ExitStack() as stack:
        directory = given.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = ClusterSettings(
            directory=directory,
            nodes=given.nodes,
            cpu=given.cpu,
            memory=given.memory,
            gpus=given.gpus,
            max_pods=given.max_pods,
            fake=given.fake,
            images=tuple(given.image),
            bare=tuple(given.bare),
            hidden=tuple(given.hidden),
            trainer=given.trainer,
            timing=timing,
        )
        asyncio.run(serve(settings, given.kubeconfig, port=given.port, with_parent=given.with_parent))


if __name__ == "__main__":
    main()
