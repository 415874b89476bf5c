"""`python -m trainmaster.worker`: the fork server, one worker in the foreground, or one node of a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainmaster.protocol.request import ContainerOverrides
from trainmaster.protocol.secrets import NO_SECRETS, Secrets

REMOTE = "remote"


def main(arguments: list[str] | None = None) -> int:
    if (sys.argv[1:] if arguments is None else arguments) == [REMOTE]:
        # A job waits for it: nothing else is imported.
        from trainmaster.worker.remote import run_remote

        return run_remote(sys.stdin.buffer.read())
    import argparse

    from trainmaster.worker.forkserver import serve
    from trainmaster.worker.supervise import run_worker

    parser = argparse.ArgumentParser(prog="python -m trainmaster.worker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fork_server = commands.add_parser("fork-server", help="fork workers on request, until it is retired")
    fork_server.add_argument("--directory", type=Path, required=True, help="holds its socket, lock and log")
    run = commands.add_parser("run", help="run one node of an attempt in the foreground")
    run.add_argument("--run-dir", type=Path, required=True, help="the attempt's run directory")
    run.add_argument("--node", type=int, required=True, help="the node's index in the attempt")
    run.add_argument("--secrets", type=Path, help="a file in memory with the job's secrets; it is removed when read")
    run.add_argument("--within", default="{}", help="JSON: what is different in the container where this runs")
    commands.add_parser(REMOTE, help="run one node for a server reached by HTTP, as standard input says")
    chosen = parser.parse_args(arguments)
    if chosen.command == "fork-server":
        return serve(chosen.directory)
    secrets = _taken(chosen.secrets) if chosen.secrets else NO_SECRETS
    return run_worker(chosen.run_dir, chosen.node, secrets, ContainerOverrides.from_json(json.loads(chosen.within)))


def _taken(path: Path) -> Secrets:
    """Read the secrets from a file and remove it; none if it is gone."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return NO_SECRETS
    path.unlink(missing_ok=True)
    return Secrets.from_json(document)


if __name__ == "__main__":
    sys.exit(main())
