"""`python -m trainmaster.worker`: the fork server, or one worker in the foreground."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from trainmaster.worker.forkserver import serve
from trainmaster.worker.supervise import run_worker


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments name; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainmaster.worker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fork_server = commands.add_parser("fork-server", help="fork workers on request, until it is retired")
    fork_server.add_argument("--directory", type=Path, required=True, help="holds its socket, lock and log")
    run = commands.add_parser("run", help="run one node of an attempt in the foreground")
    run.add_argument("--run-dir", type=Path, required=True, help="the attempt's run directory")
    run.add_argument("--node", type=int, required=True, help="the node's index in the attempt")
    chosen = parser.parse_args(arguments)
    if chosen.command == "fork-server":
        return serve(chosen.directory)
    return run_worker(chosen.run_dir, chosen.node)


if __name__ == "__main__":
    sys.exit(main())
