"""`python -m trainmaster.backends.container.outside`: a container as a process, for a worker that stays outside of it.

An image without a Python that runs the worker is run by a worker on the machine, and so are steps that have images of
their own. For the worker, this process is the rank, or the step: it starts the container, copies what that writes,
passes signals on, and ends as it ends. When such steps are done the worker itself becomes this process, and the
container is that of its node, in which another worker goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainmaster.backends.container.engine import Engine, EngineError, NoSuchCommandError, RefusedByEngineError
from trainmaster.backends.container.gangs import Gang
from trainmaster.backends.container.memory import KernelKills
from trainmaster.backends.container.rendering import KEEP, NODE, RUN_DIR
from trainmaster.backends.container.secret_files import put_secrets, remove_secrets
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.rundir import RunDirectory, exit_document
from trainmaster.protocol.secrets import Secrets

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_EXIT_NOT_FOUND = 127
_EXIT_KILLED = 128 + signal.SIGKILL
_EXIT_LOST = 1
_GOING_ON = ("running", "paused")
_LOOK_S = 0.2
_AWAY_S = 0.5
_LAST_OUTPUT_S = 10.0
_OUT_OF_MEMORY = "the container was killed by the kernel: out of memory"
_OURS = (environment.RESERVED_PREFIX, environment.KUBEFLOW_URL, environment.KUBEFLOW_TOKEN)
"""How the variables begin that lead to files of the run directory, or to the worker."""


def main(arguments: list[str]) -> int:
    """Run the container of a plan's step, with what is to run in it, to its end; the exit code.

    Standard input holds the variables of the step, or the secrets of the node.
    """
    plan, step, *command = arguments
    # Before any thread is started, so that none of them is interrupted by one.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    described = json.loads(Path(plan).read_bytes())
    planned = described["containers"][step]
    engine, given = Engine(described["engine"]), json.load(sys.stdin)
    if planned["secrets"] is not None:
        return _become_node(engine, planned, Secrets.from_json(given))
    try:
        return (_lead if "gang" in planned else _run)(engine, planned, given, command)
    except _KilledError:
        os.kill(os.getpid(), signal.SIGKILL)  # which is what the worker is to see
        raise


class _KilledError(Exception):
    """The container was killed, and not by the kernel."""


def _lead(engine: Engine, planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]) -> int:
    """Be a step with a gang beside it."""
    variables = {**variables, environment.GANG_DIR: "gang"}
    (head, *names), members = planned["names"], {**planned, "document": planned["gang"]["document"]}
    commands = ([command[0], *planned["gang"]["argv"], str(index)] for index in range(len(names)))
    documents = {name: _document(members, variables, own) for name, own in zip(names, commands, strict=True)}
    gang = Gang(
        engine,
        head,
        documents,
        end_of=lambda name: _end(engine, name),
        tell=lambda reason, message: _tell(variables, reason, message),
    )
    try:
        with gang:
            return _run(engine, planned, variables, command)
    except _KilledError:
        if gang.broke_head:
            return _EXIT_LOST
        raise


def _run(engine: Engine, planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]) -> int:
    """Be a rank, or a step that prepares."""
    name = planned["names"][int(variables["LOCAL_RANK"])]
    document = _document(planned, variables, command)
    engine.create(name, document)
    try:
        engine.start(name)
    except NoSuchCommandError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the rank's log
        engine.remove(name)
        return _EXIT_NOT_FOUND
    code, is_out_of_memory = _run_to_end(engine, name, at_once=not planned["reports"])
    if document["Labels"][KEEP] == "no":
        engine.remove(name)
    if is_out_of_memory:
        _tell(variables, Reason.OUT_OF_MEMORY, _OUT_OF_MEMORY)
    elif code == _EXIT_KILLED:
        raise _KilledError(name)
    return code


def _become_node(engine: Engine, planned: Mapping[str, Any], secrets: Secrets) -> int:
    """Be the worker of a node whose container goes on in its place. There, how the node ends is written down."""
    (name,), document, handed = planned["names"], planned["document"], Path(planned["secrets"])
    try:
        put_secrets(handed, secrets)
        engine.create(name, document)
        engine.start(name)
    except (EngineError, NoSuchCommandError, OSError) as error:
        remove_secrets(handed)
        is_final = isinstance(error, RefusedByEngineError | NoSuchCommandError)
        _end_node(document["Labels"], Reason.LAUNCH_REFUSED if is_final else Reason.ENGINE_UNAVAILABLE, str(error))
        return _EXIT_LOST
    code, is_out_of_memory = _run_to_end(engine, name)
    if is_out_of_memory:
        _end_node(document["Labels"], Reason.OUT_OF_MEMORY, _OUT_OF_MEMORY)
    return code


def _end_node(labels: Mapping[str, str], reason: Reason, message: str) -> None:
    """Write down how a node ended, unless its container has."""
    directory, node = RunDirectory(Path(labels[RUN_DIR])), int(labels[NODE])
    if directory.document(exit_document(node)) is not None:
        return
    unknown = dict.fromkeys(("exit_code", "signal", "rank", "step", "stop_cause", "started_at"))
    evidence: dict[str, Any] = {"last_lines": [], "frame": None, "oom_kills": None}
    end = {"reason": reason, "message": message, **unknown, "ended_at": time.time(), "evidence": evidence}
    directory.put_document(exit_document(node), {**end, "streams": dict(directory.streams(node))})


def _document(planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]) -> dict[str, Any]:
    """The container of a step, with its variables and its command; without one, the image's own."""
    given = {name: text for name, text in variables.items() if planned["reports"] or not name.startswith(_OURS)}
    given |= dict(line.partition("=")[::2] for line in planned["document"]["Env"])
    document = {**planned["document"], "Env": [f"{name}={text}" for name, text in given.items()]}
    if planned["reports"]:
        host = document["HostConfig"]
        document["HostConfig"] = {**host, "Mounts": [*host["Mounts"], *_streams(variables)]}
    _check_sources(document)
    if command:
        document["Entrypoint"], document["Cmd"] = command[:1], command[1:]
    return document


def _streams(variables: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """What a rank or a step reports in; all else of the node's directory is the worker's to write."""
    for path in (variables[environment.EVENTS_FILE], variables[environment.METRICS_FILE]):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        yield {"Type": "bind", "Source": path, "Target": path, "ReadOnly": False}


def _check_sources(document: Mapping[str, Any]) -> None:
    """See that no step before has put a link where the engine is to mount something of the run directory.

    Raises:
        OSError: one has.
    """
    top = document["Labels"][RUN_DIR]
    for source in (mount["Source"] for mount in document["HostConfig"]["Mounts"]):
        if source.startswith(f"{top}/") and os.path.realpath(source) != os.path.realpath(top) + source[len(top) :]:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), source)


def _run_to_end(engine: Engine, name: str, *, at_once: bool = False) -> tuple[int, bool]:
    """The exit code of a running container, and whether it ended for want of memory."""
    kills = KernelKills(engine.process(name))
    code = _followed(engine, name, at_once=at_once)
    kills.join(_LOOK_S)
    return code, code == _EXIT_KILLED and (kills.count > 0 or engine.ran_out_of_memory(name))


def _followed(engine: Engine, name: str, *, at_once: bool) -> int:
    """Copy what a running container writes and pass signals on to it; its exit code.

    `at_once` is for an image that fetches: it has nothing to save, and as the first process of its container it would
    not even hear a signal that it did not ask for.
    """
    copying = [
        threading.Thread(target=_copy, args=(engine, name, channel, stream), daemon=True)
        for channel, stream in (("stdout", 1), ("stderr", 2))
    ]
    ended: list[int] = []
    waiting = threading.Thread(target=lambda: ended.append(_end(engine, name)), daemon=True)
    for thread in (*copying, waiting):
        thread.start()
    asked: list[int] = []
    while waiting.is_alive():
        found = signal.sigtimedwait(_PASSED_ON, _LOOK_S)
        if found is not None:
            asked.append(found.si_signo)
        with contextlib.suppress(EngineError):
            while asked:
                kills = at_once and asked[0] == signal.SIGTERM
                engine.kill(name, "SIGKILL" if kills else signal.Signals(asked[0]).name)
                del asked[0]
    for thread in copying:
        thread.join(_LAST_OUTPUT_S)
    return ended[0] if ended else _EXIT_LOST


def _end(engine: Engine, name: str) -> int:
    """The exit code of a container, once it has ended; an engine that is away meanwhile is waited for."""
    while True:
        try:
            return engine.wait(name)
        except EngineError:
            time.sleep(_AWAY_S)
            with contextlib.suppress(EngineError):
                if engine.state(name) is None:
                    return _EXIT_LOST


def _copy(engine: Engine, name: str, channel: str, descriptor: int) -> None:
    """Copy what a container writes, to its end. After an engine was away it is told from the beginning again."""
    copied = 0
    while True:
        try:
            told = 0
            for piece in engine.follow(name, channel):
                rest = piece[max(copied - told, 0) :]
                told += len(piece)
                while rest:
                    written = os.write(descriptor, rest)
                    copied, rest = copied + written, rest[written:]
            if engine.state(name) not in _GOING_ON:
                return
        except EngineError:
            time.sleep(_AWAY_S)


def _tell(variables: Mapping[str, str], reason: Reason, message: str) -> None:
    """Say to the worker why this rank fails."""
    with contextlib.suppress(OSError), open(variables[environment.EVENTS_FILE], "a") as file:
        file.write(json.dumps({"type": "failed", "reason": reason, "message": message, "t": time.time()}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
