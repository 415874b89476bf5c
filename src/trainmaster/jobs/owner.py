"""Whether this attempt still owns its job: asked at every commit, so that a stale attempt cannot commit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trainmaster.protocol import environment
from trainmaster.protocol.documents import read_document

ANSWER_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_REFUSED = frozenset({401, 403, 404, 410})
"""The server knows the job and says no, or knows no such job any more. Anything else is no answer."""


class NotOwnerError(RuntimeError):
    """Another attempt owns the job now: this one must not commit anything any more."""


def require_ownership(environ: Mapping[str, str]) -> None:
    """Return when this attempt owns its job now, or when there is no job.

    Where the owner is asked over HTTP and the server is away, this waits for it: unknown is not owned.

    Raises:
        NotOwnerError: another attempt owns the job, or the job is gone.
        OSError: the owner's file cannot be read.
    """
    if url := environ.get(environment.OWNER_URL):
        owned = _ask_server(url, _token(environ), environ.get(environment.CA))
    elif path := environ.get(environment.OWNER_FILE):
        owner = read_document(Path(path))
        owned = owner is not None and owner.get("token") == _token(environ)
    else:
        return
    if not owned:
        raise NotOwnerError(
            f"attempt {environ.get(environment.ATTEMPT_ID, '')} no longer owns its job: nothing was committed"
        )


def _token(environ: Mapping[str, str]) -> str:
    return Path(environ[environment.TOKEN_FILE]).read_text().strip()


def _ask_server(url: str, token: str, ca: str | None) -> bool:
    # Imported here: most jobs share the server's files and need none of it.
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    direct = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            with direct.open(request, timeout=ANSWER_TIMEOUT_S) as response:
                return bool(json.load(response)["data"]["owner"])
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _REFUSED:
                return False
            problem: Exception = error
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            problem = error
        if pause_s == _FIRST_PAUSE_S:
            sys.stderr.write(f"trainmaster: waiting for the server before a checkpoint is committed: {problem}\n")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
