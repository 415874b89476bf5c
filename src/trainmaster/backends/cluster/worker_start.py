"""How the worker of a node starts on a cluster: its command, its variables, and what its exit codes mean."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from importlib import resources

from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.worker import bootstrap

SPEC = "TRAINMASTER_WORKER"
TOKEN = "TRAINMASTER_WORKER_TOKEN"
SOURCE = "TRAINMASTER_BOOTSTRAP"
PYTHON = "TRAINMASTER_PYTHON"
INTERPRETER = bootstrap.INTERPRETER


def command(source: str, *arguments: str) -> tuple[str, ...]:
    """Runs the Python source that is in a variable."""
    return (
        "sh",
        "-c",
        f'if [ ! -x "${PYTHON}" ] && ! command -v "${PYTHON}" >/dev/null 2>&1; then {PYTHON}=python3; fi; '
        f'exec "${PYTHON}" -c "${source}" "$@"',
        "sh",
        *arguments,
    )


COMMAND = command(SOURCE)
"""The same for every attempt: what differs is in variables."""

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
MESSAGES: Mapping[int, str] = {
    bootstrap.TOO_OLD: "the Python of its nodes is older than 3.11; name a newer one with the option `python`",
    bootstrap.UNREACHABLE: "its nodes cannot reach this server; set the option server_url, or advertise_url of the "
    "server, to an address that they can reach",
    bootstrap.REFUSED: "the server refused the worker: the attempt was over when it started",
    bootstrap.NO_ROOM: "its nodes cannot write to the directory for work; name another with the option work_dir",
    _NOT_FOUND: "its nodes have no Python where it was expected; name one with the option `python`",
    _NOT_EXECUTABLE: "the Python of the option `python` cannot be executed on its nodes",
}
"""Exit code of a worker that did not start -> why, and what to do."""

REASONS: Mapping[int, Reason] = {
    bootstrap.TOO_OLD: Reason.LAUNCH_REFUSED,
    bootstrap.UNREACHABLE: Reason.ENGINE_UNAVAILABLE,
    bootstrap.REFUSED: Reason.ENGINE_UNAVAILABLE,
    bootstrap.NO_ROOM: Reason.LAUNCH_REFUSED,
    _NOT_FOUND: Reason.LAUNCH_REFUSED,
    _NOT_EXECUTABLE: Reason.LAUNCH_REFUSED,
}
"""The same exit codes -> what follows for the attempt."""


def variables(
    request: AttemptRequest, *, digest: str, python: str, work_dir: str, node_variable: str, grace_s: float, ca_pem: str
) -> dict[str, str]:
    """The worker's environment, the same on every node; without its token."""
    spec = {
        "server_url": request.server_url,
        "attempt_id": request.attempt_id,
        "digest": digest,
        "work_dir": work_dir,
        "node_variable": node_variable,
        "grace_s": grace_s,
        "ca_pem": ca_pem,
    }
    return {SPEC: json.dumps(spec), SOURCE: _source(), PYTHON: python or sys.executable}


@functools.cache
def _source() -> str:
    return resources.files("trainmaster.worker").joinpath("bootstrap.py").read_text(encoding="utf-8")
