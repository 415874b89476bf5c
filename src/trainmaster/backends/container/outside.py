"""`python -m trainmaster.backends.container.outside`: a container as a process, for a worker that stays outside of it.

An image without a Python that runs the worker is run by a worker on the machine. For the worker, this process is the
rank: it starts the rank's container, copies what that writes, passes signals on, and ends as it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.backends.container.engine import Engine, NoSuchCommandError
from trainmaster.backends.container.rendering import KEEP
from trainmaster.protocol.environment import EVENTS_FILE
from trainmaster.protocol.reasons import Reason

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_EXIT_NOT_FOUND = 127
_EXIT_KILLED = 128 + signal.SIGKILL
_LOOK_S = 0.2
_LAST_OUTPUT_S = 10.0


def main(arguments: list[str]) -> int:
    """Run the container of a plan, with what is to run in it, to its end; the exit code."""
    plan, *command = arguments
    # Before any thread is started, so that none of them is interrupted by one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    described = json.loads(Path(plan).read_bytes())
    engine = Engine(described["engine"])
    name = f"{described['name']}-{os.environ['RANK']}"
    document = _document(described["document"], command)
    engine.create(name, document)
    try:
        engine.start(name)
    except NoSuchCommandError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the rank's log
        engine.remove(name)
        return _EXIT_NOT_FOUND
    code = _followed(engine, name)
    if code == _EXIT_KILLED and "Memory" in document["HostConfig"]:
        # Engines do not agree on whether they tell; and nobody else kills what has a limit.
        _tell(Reason.OUT_OF_MEMORY, "the container was killed by the kernel: out of memory")
    if document["Labels"][KEEP] == "no":
        engine.remove(name)
    return code


def _document(planned: Mapping[str, Any], command: list[str]) -> dict[str, Any]:
    document = {**planned, "Env": [f"{name}={value}" for name, value in _own_variables().items()]}
    if command:
        document["Entrypoint"], document["Cmd"] = command[:1], command[1:]
    return document


def _own_variables() -> dict[str, str]:
    """What the worker has set for this rank; what is the machine's own does not concern the container."""
    text = Path(f"/proc/{os.getppid()}/environ").read_text(errors="surrogateescape")
    machines = dict(line.partition("=")[::2] for line in text.split("\0") if line)
    return {name: value for name, value in os.environ.items() if machines.get(name) != value}


def _followed(engine: Engine, name: str) -> int:
    """Copy what a running container writes and pass signals on to it; its exit code."""
    copying = [
        threading.Thread(target=_copy, args=(engine, name, channel, stream), daemon=True)
        for channel, stream in (("stdout", 1), ("stderr", 2))
    ]
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(engine.wait(name)), daemon=True)
    for thread in (*copying, waiting):
        thread.start()
    while waiting.is_alive():
        found = signal.sigtimedwait(_PASSED_ON, _LOOK_S)
        if found is not None:
            engine.kill(name, signal.Signals(found.si_signo).name)
    for thread in copying:
        thread.join(_LAST_OUTPUT_S)
    return ended[0] if ended else 1


def _copy(engine: Engine, name: str, channel: str, descriptor: int) -> None:
    for piece in engine.follow(name, channel):
        while piece:
            piece = piece[os.write(descriptor, piece) :]


def _tell(reason: Reason, message: str) -> None:
    """Say to the worker why this rank fails."""
    with contextlib.suppress(OSError, KeyError), open(os.environ[EVENTS_FILE], "a") as file:
        file.write(json.dumps({"type": "failed", "reason": reason, "message": message, "t": time.time()}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
