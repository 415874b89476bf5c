"""From a choice to a client of the server, which has what was chosen."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainmaster import client as api
from trainmaster.client import local
from trainmaster.client.cluster import Engine
from trainmaster.client.server_lookup import URL_VARIABLE
from trainmaster.trainer.server_choice import Choice, Surroundings

_VARIABLES = ("DOCKER_HOST", "CONTAINER_HOST")
"""Where a server looks for an engine; as they were when it was started."""
_ANEW = (
    "have the server started with it when no job runs in a container: `trainmaster down` stops the local one, and the "
    "next client starts it"
)


def connect(choice: Choice, around: Surroundings) -> api.Client:
    """A client of the server that was chosen; the local one is started when none runs.

    Raises:
        ClientError: the server cannot be used.
        ValueError: it lacks the backend, or its engine is another than was asked for.
        RuntimeError: no engine answers.
    """
    if choice.server is not None:
        return api.Client(choice.server.url, choice.server.api_key, ca=choice.server.ca)
    started: local.LocalServer | None = None
    if choice.engine and not around.environment.get(URL_VARIABLE) and not around.login:
        found = local.find()
        started = found or local.start(settings=choice.engine)
        if found is not None or not local.started_here(started):
            started = None
    client = api.Client()
    try:
        if choice.name is not None:
            check_engine(choice.engine, client.cluster.backend(choice.name)["engine"], around.environment)
    except api.NotFoundError as error:
        client.close()
        raise ValueError(str(error)) from error
    except BaseException:
        client.close()
        # Others would find it with an engine that does not answer; the next client starts one with what it asks for.
        if started is not None and local.running() == started:
            local.stop()
        raise
    return client


def check_engine(asked: Mapping[str, str], engine: Engine | None, environment: Mapping[str, str]) -> None:
    """See that the engine of a server is the one that was asked for.

    Args:
        asked: `container_host` and `container_runtime`, where they matter.
        engine: the server's; None where it has none.
        environment: of this process, whose variables the server need not have.

    Raises:
        ValueError: it is another.
        RuntimeError: none answers.
    """
    if engine is None:
        return
    host, runtime = asked.get("container_host"), asked.get("container_runtime")
    if engine["problem"]:
        known = {"container_host": host, **{name: environment.get(name) for name in _VARIABLES}}
        untried = [f"{name} {value}" for name, value in known.items() if value and value not in engine["problem"]]
        hint = f". It did not try {untried[0]}: {_ANEW}" if untried else ""
        raise RuntimeError(f"{engine['problem']}{hint}")
    used = f"the server uses {engine['name']} at {engine['host']}; leave it out, or {_ANEW}"
    if runtime and runtime != engine["name"]:
        raise ValueError(f"container_runtime is {runtime}, and {used}")
    if host and _socket(host) != _socket(engine["host"] or ""):
        raise ValueError(f"container_host is {host}, and {used}")


def _socket(host: str) -> str:
    """A host, however it is written: links to a socket lead to the same engine."""
    scheme, _, path = host.rpartition("://")
    if scheme in ("", "unix", "http+unix"):
        return os.path.realpath(f"/{path.lstrip('/')}")
    return host.rstrip("/")
