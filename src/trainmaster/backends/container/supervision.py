"""`python -m trainmaster.backends.container.supervision`: a container as a process, for a worker outside of it.

A worker on the machine runs images without a suitable Python, and steps with images of their own. For the worker, this
process is the rank, or the step: it starts the container, copies its output, passes signals on, and ends as it ends.
When such steps are done, the worker itself becomes this process, and the container is that of its node, in which
another worker continues.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.backends.container.container_process import (
    AWAY_S,
    REMOVED,
    SIGNALS,
    GangContainers,
    KernelKills,
    followed,
    process_of,
    ran_out_of_memory,
)
from trainmaster.backends.container.container_spec import KEEP, NODE, RUN_DIR
from trainmaster.backends.container.engine import (
    ContainerEngine,
    ContainerEngineError,
    EngineAwayError,
    NoSuchCommandError,
    RefusedByEngineError,
)
from trainmaster.backends.container.secret_files import put_secrets, remove_secrets
from trainmaster.protocol import environment
from trainmaster.protocol.documents import put_answer
from trainmaster.protocol.reasons import Reason, exit_record
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.protocol.secrets import Secrets

_EXIT_NOT_FOUND = 127
_EXIT_KILLED = 128 + signal.SIGKILL
_EXIT_LOST = 1
_ENGINE_S = 60.0
"""How long to wait for an engine that does not answer, before there is a container."""
_NOT_STARTED = (None, "created", "configured", "initialized")
_MAX_MESSAGE = 2000
_OUT_OF_MEMORY = "the container was killed by the kernel: out of memory"
_OURS = (environment.RESERVED_PREFIX, environment.KUBEFLOW_URL, environment.KUBEFLOW_TOKEN)
"""Prefixes of variables that lead to files of the run directory, or to the worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a container ended; with a reason, why it failed, or never started."""

    code: int = _EXIT_LOST
    reason: Reason | None = None
    message: str = ""


def main(arguments: list[str]) -> int:
    """Run the container of a step of a plan, with this command, to its end; returns the exit code.

    Standard input has the variables of the step, or the secrets of the node.
    """
    plan, step, *command = arguments
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    described = json.loads(Path(plan).read_bytes())
    planned = described["containers"][step]
    engine, given = ContainerEngine(described["engine"]), json.load(sys.stdin)
    if planned["secrets"] is not None:
        return _become_node(engine, planned, Secrets.from_json(given))
    end = run_container(engine, planned, given, command)
    if end.reason is not None:
        put_answer({"reason": end.reason, "message": end.message[:_MAX_MESSAGE]})
    elif end.code == _EXIT_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)  # which is what the worker is to see
    return end.code


def run_container(
    engine: ContainerEngine, planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]
) -> End:
    """As a rank or a preparing step: run its container to the end."""
    try:
        return (_lead if "gang" in planned else _run)(engine, planned, variables, command)
    except (ContainerEngineError, OSError) as error:
        return End(reason=_reason_of(error), message=str(error))
    except Exception as error:
        traceback.print_exc()
        return End(reason=Reason.WORKER_LOST, message=f"the container's supervisor failed: {error!r}")


def _lead(engine: ContainerEngine, planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]) -> End:
    variables = {**variables, environment.GANG_DIR: "gang"}
    (head, *names), members = planned["names"], {**planned, "document": planned["gang"]["document"]}
    commands = ([command[0], *planned["gang"]["argv"], str(index)] for index in range(len(names)))
    documents = {name: _document(members, variables, own) for name, own in zip(names, commands, strict=True)}
    with GangContainers(engine, head, documents) as gang:
        end = _run(engine, planned, variables, command)
    if end.code == 0:
        return end
    if gang.out_of_memory:
        message = f"{gang.out_of_memory[0]} was killed by the kernel: out of memory"
        return End(reason=Reason.OUT_OF_MEMORY, message=message)
    return End() if gang.broke_head else end


def _run(engine: ContainerEngine, planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]) -> End:
    name = planned["names"][int(variables["LOCAL_RANK"])]
    document = _document(planned, variables, command)
    try:
        _start(engine, name, document)
        code, is_out_of_memory = _run_to_end(engine, name, copies=True, at_once=not planned["reports"])
    except NoSuchCommandError as error:
        print(error, file=sys.stderr)  # noqa: T201 - this is the rank's log
        code, is_out_of_memory = _EXIT_NOT_FOUND, False
    if document["Labels"][KEEP] == "no":
        # If this fails, the monitor removes it.
        with contextlib.suppress(ContainerEngineError):
            engine.remove(name)
    if is_out_of_memory:
        return End(code=code, reason=Reason.OUT_OF_MEMORY, message=_OUT_OF_MEMORY)
    if code == REMOVED:
        return End(reason=Reason.WORKER_LOST, message=f"container {name} was removed while it ran")
    return End(code=code)


def _become_node(engine: ContainerEngine, planned: Mapping[str, Any], secrets: Secrets) -> int:
    """As the worker of a node that continues in its container, which normally records the node's exit."""
    (name,), document, handed = planned["names"], planned["document"], Path(planned["secrets"])
    labels = document["Labels"]
    try:
        put_secrets(handed, secrets)
        _start(engine, name, document)
    except (ContainerEngineError, NoSuchCommandError, OSError) as error:
        remove_secrets(handed)
        _end_node(labels, _reason_of(error), str(error))
        return _EXIT_LOST
    code, is_out_of_memory = _run_to_end(engine, name, copies=False)
    if is_out_of_memory:
        _end_node(labels, Reason.OUT_OF_MEMORY, _OUT_OF_MEMORY)
    elif code != 0:
        said = ""
        with contextlib.suppress(ContainerEngineError):
            said = engine.output(name)[-_MAX_MESSAGE:]
        _end_node(labels, Reason.WORKER_LOST, f"the worker in container {name} ended with exit code {code}: {said}")
    return _EXIT_LOST if code == REMOVED else code


def _reason_of(error: Exception) -> Reason:
    if isinstance(error, RefusedByEngineError | NoSuchCommandError):
        return Reason.LAUNCH_REFUSED
    if isinstance(error, OSError):
        return Reason.LAUNCH_REFUSED if error.errno == errno.ELOOP else Reason.STORAGE_UNAVAILABLE
    return Reason.ENGINE_UNAVAILABLE


def _end_node(labels: Mapping[str, str], reason: Reason, message: str) -> None:
    """Record the exit of a node, unless its container has."""
    directory, node = RunDirectory(Path(labels[RUN_DIR])), int(labels[NODE])
    if directory.document(exit_document(node)) is not None:
        return
    with contextlib.suppress(FileNotFoundError):  # the job was deleted
        directory.put_document(exit_document(node), exit_record(reason, message, streams=dict(directory.streams(node))))


def _document(planned: Mapping[str, Any], variables: Mapping[str, str], command: list[str]) -> dict[str, Any]:
    """The container of a step with its variables and its command; without a command, the image's own."""
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
    """The files that a rank or a step reports in; only the worker writes to the rest of the node's directory."""
    for path in (variables[environment.EVENTS_FILE], variables[environment.METRICS_FILE]):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        yield {"Type": "bind", "Source": path, "Target": path, "ReadOnly": False}


def _check_sources(document: Mapping[str, Any]) -> None:
    """Raise OSError if an earlier step put a link where the engine will mount something of the run directory."""
    top = document["Labels"][RUN_DIR]
    for source in (mount["Source"] for mount in document["HostConfig"]["Mounts"]):
        if source.startswith(f"{top}/") and os.path.realpath(source) != os.path.realpath(top) + source[len(top) :]:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), source)


def _start(engine: ContainerEngine, name: str, document: Mapping[str, Any]) -> None:
    """Start a container, once the engine answers; raises what that says, or that it has not answered for long."""

    def start() -> None:
        # If only the answer to a start was lost, it runs; or it has ended, and must not run again.
        if engine.state(name) in _NOT_STARTED:
            engine.start(name)

    until = time.monotonic() + _ENGINE_S
    _ask(lambda: engine.create(name, document), until)
    _ask(start, until)


def _ask(question: Callable[[], None], until: float) -> None:
    while True:
        try:
            return question()
        except EngineAwayError:
            # A signal now means that the container is not wanted any more.
            if time.monotonic() >= until or signal.sigtimedwait(SIGNALS, AWAY_S) is not None:
                raise


def _run_to_end(engine: ContainerEngine, name: str, *, copies: bool, at_once: bool = False) -> tuple[int, bool]:
    process = process_of(engine, name)
    kills = KernelKills(process)
    code = followed(engine, name, process=process, copies=copies, at_once=at_once)
    return code, code == _EXIT_KILLED and ran_out_of_memory(engine, name, kills)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
