"""How the worker of a node starts on a cluster: its command, its variables, and what its exit codes mean."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from importlib import resources

from trainmaster.backends.cluster.engine import ClusterOptions, EngineLaunch, engine_name
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.server.core.states import CONSEQUENCES, AttemptOutcome
from trainmaster.worker import bootstrap

SPEC = "TRAINMASTER_WORKER"
TOKEN = "TRAINMASTER_WORKER_TOKEN"
SOURCE = "TRAINMASTER_BOOTSTRAP"
SHOWN_SOURCE = "(the text of trainmaster/worker/bootstrap.py)"
PYTHON = "TRAINMASTER_PYTHON"
INTERPRETER = bootstrap.INTERPRETER


def command(source: str, *arguments: str) -> tuple[str, ...]:
    """Runs the Python source that is in a variable. Isolated: the working directory, which may be /tmp, has no modules
    for it. Without site packages it starts in half the time."""
    return (
        "sh",
        "-c",
        f'if [ ! -x "${PYTHON}" ] && ! command -v "${PYTHON}" >/dev/null 2>&1; then {PYTHON}=python3; fi; '
        f'exec "${PYTHON}" -I -S -c "${source}" "$@"',
        "sh",
        *arguments,
    )


COMMAND = command(SOURCE)
"""The same for every attempt: what differs is in variables."""

_REACH = "set the option server_url, or advertise_url of the server, to an address that they can reach"
UNHEARD = f"its workers run on the cluster, and have not reached this server at {{url}} yet; if they never do, {_REACH}"
"""While they try, with the address that they try."""
GIVES_UP_AFTER_S = bootstrap.PATIENCE_S + 30.0
"""A worker that does not reach the server ends sooner than this, and its exit code says why."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
MESSAGES: Mapping[int, str] = {
    bootstrap.TOO_OLD: "the Python of its nodes is older than 3.11; name a newer one with the option `python`",
    bootstrap.UNREACHABLE: f"its nodes cannot reach this server; {_REACH}",
    bootstrap.REFUSED: "the server refused the worker: the attempt was over when it started",
    bootstrap.NO_ROOM: "its nodes cannot write to the directory for work; name another with the option work_dir",
    _NOT_FOUND: "there is no Python where its worker starts, on the nodes or in the image; name one with the option "
    "`python`, or use another image",
    _NOT_EXECUTABLE: "the Python of the option `python` cannot be executed where its worker starts",
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


def launch(
    request: AttemptRequest, options: ClusterOptions, *, instance: str, digest: str, node_variable: str, ca_pem: str
) -> EngineLaunch:
    """What starts the workers of an attempt, the same on every node."""
    spec = {
        "server_url": request.server_url,
        "attempt_id": request.attempt_id,
        "digest": digest,
        "work_dir": options.work_dir,
        "node_variable": node_variable,
        "grace_s": request.launch.grace_s,
        "ca_pem": ca_pem,
    }
    return EngineLaunch(
        name=engine_name(instance, request.attempt_id),
        instance=instance,
        request=request,
        grace_s=request.launch.grace_s,
        command=COMMAND,
        environment={SPEC: json.dumps(spec), SOURCE: _source(), PYTHON: options.python or sys.executable},
        secrets={TOKEN: request.token},
    )


def reason_of_launch(reason: Reason) -> Reason:
    """What the end of an attempt that no worker claimed means for its launch."""
    permanent = CONSEQUENCES[reason].outcome is AttemptOutcome.PERMANENT
    return Reason.LAUNCH_REFUSED if permanent else reason


@functools.cache
def _source() -> str:
    return resources.files("trainmaster.worker").joinpath("bootstrap.py").read_text(encoding="utf-8")
