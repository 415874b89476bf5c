"""What a node needs before its ranks start: files, their token, ports, a listener for reports, a rendezvous."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import PREPARED, RENDEZVOUS, RunDirectory, metrics_stream
from trainmaster.protocol.secrets import Secrets, secret_named
from trainmaster.protocol.users import User
from trainmaster.worker.kubeflow import KubeflowListener
from trainmaster.worker.ranks import Surroundings
from trainmaster.worker.users import open_own
from trainmaster.worker.working_directory import NO_WORKSPACE, StagingError, Workspace, make_workspace, stage


def surroundings_of(
    request: AttemptRequest,
    directory: RunDirectory,
    node: int,
    secrets: Secrets,
    *,
    control_file: Path,
    selector: selectors.BaseSelector,
    user: User | None,
    on_chunk: Callable[[], None],
) -> Surroundings:
    """Stage what the job needs, and open what it will talk to.

    Args:
        request: the attempt.
        directory: its run directory.
        node: which of its nodes this is.
        secrets: the values that were handed to the worker.
        control_file: where ranks look for what is wanted of them.
        selector: who is told of what comes in.
        user: as whom the ranks run; None: as the worker.
        on_chunk: called now and then meanwhile.

    Raises:
        StagingError: a file, or a secret, is missing.
    """
    launch, home = request.launch, directory.path / "nodes" / str(node)
    missing = launch.secrets.keys() - secrets.environment.keys()
    for step in launch.steps:
        missing |= {name for name, ref in step.secrets.items() if secret_named(ref) not in secrets.tokens}
    if missing:
        raise StagingError(f"the worker was not given the values of these variables: {', '.join(sorted(missing))}")
    working_directory = stage(request, directory.path, node, on_chunk=on_chunk, user=user)
    token_file = os.fspath(home / "token")
    with open(open_own(token_file, user, os.O_TRUNC), "w") as file:
        file.write(request.rank_token)
    metrics = metrics_stream(node, node * launch.ranks_per_node)
    listener = KubeflowListener(selector, request.rank_token, os.fspath(directory.path / metrics))
    return Surroundings(
        request=request,
        node=node,
        run_dir=directory.path,
        working_directory=working_directory,
        control_file=os.fspath(control_file),
        token_file=token_file,
        kubeflow_url=listener.url,
        secrets=secrets.environment,
        port=(request.nodes[node].port or free_port()) if launch.lifetime is Lifetime.SERVICE else None,
        user=user,
        workspace=_workspace(request, home, user),
    )


def _workspace(request: AttemptRequest, home: Path, user: User | None) -> Workspace:
    """What ranks find below /workspace. Containers have it from their engine, also those of a worker outside."""
    prepared = request.launch.prepared
    if not prepared or any(step.through for step in request.launch.steps):
        return NO_WORKSPACE
    places = {path: os.fspath(home / PREPARED / path) for path in prepared.values()}
    return make_workspace(home, prepared, places, user)


def rendezvous(
    request: AttemptRequest, directory: RunDirectory, node: int, *, wait: Callable[[], None]
) -> tuple[str, int]:
    """Where the ranks of all nodes meet: node 0 decides and writes it down, the others wait for that."""
    if node == 0:
        place = (request.nodes[0].address, free_port())
        directory.put_document(RENDEZVOUS, {"host": place[0], "port": place[1]})
        return place
    while (document := directory.document(RENDEZVOUS)) is None:
        wait()
    return str(document["host"]), int(document["port"])


def free_port() -> int:
    """One that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
