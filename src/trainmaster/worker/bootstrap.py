"""Starts the worker of a node where Trainmaster is not installed: fetches it from the server, and becomes it.

Run as `python -c SOURCE` with this file's text, on whatever Python the node has, so that one that is too old can say
so. Variables: TRAINMASTER_WORKER (JSON: server_url, attempt_id, digest, work_dir, node_variable, grace_s, ca_pem),
TRAINMASTER_WORKER_TOKEN, and TRAINMASTER_INTERPRETER (JSON: the command that starts this Python, unless its path does).
"""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any, NoReturn

INTERPRETER = "TRAINMASTER_INTERPRETER"
TOO_OLD, UNREACHABLE, REFUSED, NO_ROOM = 71, 72, 73, 74
"""Exit codes; `backends.cluster.worker_start` says what they mean."""
PATIENCE_S = 600


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - a node may have any Python
        say(f"this Python is {sys.version.split()[0]}, and workers need 3.11 or newer")
        return TOO_OLD
    spec = json.loads(os.environ.pop("TRAINMASTER_WORKER"))
    token = os.environ.pop("TRAINMASTER_WORKER_TOKEN")
    for name in ("TRAINMASTER_BOOTSTRAP", "TRAINMASTER_PYTHON"):
        os.environ.pop(name, None)
    interpreter = json.loads(os.environ.pop(INTERPRETER, "null")) or [sys.executable, "-P"]
    work = os.path.join(spec["work_dir"] or tempfile.gettempdir(), f"trainmaster-{os.getuid()}")
    try:
        os.makedirs(work, mode=0o700, exist_ok=True)
        if os.stat(work).st_uid != os.getuid():
            say(f"{work} belongs to another user")
            return NO_ROOM
        ca = os.environ.pop("TRAINMASTER_CA", None)
        if ca and os.path.exists(ca):
            os.environ["TRAINMASTER_CA"] = ca
        else:
            ca = None
        if spec["ca_pem"]:
            os.environ["TRAINMASTER_CA"] = ca = os.path.join(work, f"ca-{digest(spec['ca_pem'].encode())}.pem")
            write(ca, spec["ca_pem"].encode())
        worker = os.path.join(work, f"worker-{spec['digest']}.pyz")
        if not os.path.exists(worker):
            data = fetch(spec, token, ca)
            if isinstance(data, int):
                return data
            write(worker, data)
    except OSError as error:
        say(f"{work}: {error}")
        return NO_ROOM
    # Programs of the job import the library from there, and not another version of it.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (worker, os.environ.get("PYTHONPATH"))))
    # In memory, and not in variables: other processes of this user could read those.
    given = os.memfd_create("worker", 0)
    os.write(given, json.dumps({**spec, "work_dir": work, "token": token}).encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    return become([*interpreter, worker, "remote"])


def become(command: list[str]) -> NoReturn:
    os.execv(command[0], command)


def fetch(spec: dict[str, Any], token: str, ca: str | None) -> bytes | int:
    """The worker's archive; or an exit code."""
    url = f"{spec['server_url'].rstrip('/')}/v1/worker/attempts/{spec['attempt_id']}/package"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    handlers = [urllib.request.ProxyHandler({})]  # type: list[urllib.request.BaseHandler]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    opener = urllib.request.build_opener(*handlers)
    deadline = time.time() + PATIENCE_S
    while True:
        try:
            with opener.open(request, timeout=30) as response:
                data = bytes(response.read())
            if digest(data) == spec["digest"]:
                return data
            problem = "the worker arrived damaged"
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404, 410):
                say(f"the server refuses this attempt: status {error.code}")
                return REFUSED
            problem = str(error)
        except (OSError, ValueError) as error:
            problem = str(error)
        if time.time() > deadline:
            say(f"{spec['server_url']} cannot be reached from this node: {problem}")
            return UNREACHABLE
        time.sleep(1)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def write(path: str, data: bytes) -> None:
    # In containers that share the directory, all workers may have the same process id.
    draft = f"{path}.{os.urandom(8).hex()}"
    with open(draft, "wb") as file:
        file.write(data)
    os.replace(draft, path)


def say(message: str) -> None:
    sys.stderr.write(f"trainmaster: {message}\n")


if __name__ == "__main__":
    sys.exit(main())
