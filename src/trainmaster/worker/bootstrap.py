"""Starts the worker of a node where Trainmaster is not installed: fetches it from the server, and becomes it.

Run as `python -c SOURCE` with this file's text, on whatever Python the node has; hence no modern syntax. Variables:
TRAINMASTER_WORKER (JSON: server_url, attempt_id, digest, work_dir, node_variable, grace_s, ca_pem) and
TRAINMASTER_WORKER_TOKEN.
"""

import hashlib
import json
import os
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request

TOO_OLD, UNREACHABLE, REFUSED, NO_ROOM = 71, 72, 73, 74
"""Exit codes; `backends.cluster.worker_start` says what they mean."""
PATIENCE_S = 600


def main():  # type: ignore[no-untyped-def]
    if sys.version_info < (3, 11):  # noqa: UP036 - a node may have any Python
        say("this Python is %s, and workers need 3.11 or newer" % sys.version.split()[0])
        return TOO_OLD
    spec = json.loads(os.environ.pop("TRAINMASTER_WORKER"))
    token = os.environ.pop("TRAINMASTER_WORKER_TOKEN")
    for name in ("TRAINMASTER_BOOTSTRAP", "TRAINMASTER_PYTHON"):
        os.environ.pop(name, None)
    work = os.path.join(spec["work_dir"] or tempfile.gettempdir(), "trainmaster-%d" % os.getuid())
    try:
        os.makedirs(work, mode=0o700, exist_ok=True)
        if os.stat(work).st_uid != os.getuid():
            say("%s belongs to another user" % work)
            return NO_ROOM
        ca = os.path.join(work, "ca-%s.pem" % hashlib.sha256(spec["ca_pem"].encode()).hexdigest()[:16])
        if spec["ca_pem"]:
            write(ca, spec["ca_pem"].encode())
            os.environ["TRAINMASTER_CA"] = ca
        worker = os.path.join(work, "worker-%s.pyz" % spec["digest"])
        if not os.path.exists(worker):
            data = fetch(spec, token, ca if spec["ca_pem"] else None)
            if isinstance(data, int):
                return data
            write(worker, data)
    except OSError as error:
        say("%s: %s" % (work, error))
        return NO_ROOM
    # In memory, and not in variables: other processes of this user could read those.
    given = os.memfd_create("worker", 0)
    os.write(given, json.dumps(dict(spec, work_dir=work, token=token)).encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.execv(sys.executable, [sys.executable, "-P", worker, "remote"])


def fetch(spec, token, ca):  # type: ignore[no-untyped-def]
    """The worker's archive; or an exit code."""
    url = "%s/v1/worker/attempts/%s/package" % (spec["server_url"].rstrip("/"), spec["attempt_id"])
    request = urllib.request.Request(url, headers={"Authorization": "Bearer " + token})
    handlers = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    opener = urllib.request.build_opener(*handlers)
    deadline = time.time() + PATIENCE_S
    while True:
        try:
            with opener.open(request, timeout=30) as response:
                data = response.read()
            if hashlib.sha256(data).hexdigest()[:16] == spec["digest"]:
                return data
            problem = "the worker arrived damaged"
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404, 410):
                say("the server refuses this attempt: status %d" % error.code)
                return REFUSED
            problem = str(error)
        except (OSError, ValueError) as error:
            problem = str(error)
        if time.time() > deadline:
            say("%s cannot be reached from this node: %s" % (spec["server_url"], problem))
            return UNREACHABLE
        time.sleep(1)


def write(path, data):  # type: ignore[no-untyped-def]
    draft = "%s.%d" % (path, os.getpid())
    with open(draft, "wb") as file:
        file.write(data)
    os.replace(draft, path)


def say(message):  # type: ignore[no-untyped-def]
    sys.stderr.write("trainmaster: %s\n" % message)


if __name__ == "__main__":
    sys.exit(main())
