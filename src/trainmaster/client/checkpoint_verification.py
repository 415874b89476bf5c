"""Reading a checkpoint through the server, file by file, without keeping it: is it what was committed?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from trainmaster.client.connection import Connection
from trainmaster.client.download import THREADS, Progress
from trainmaster.client.errors import NotFoundError
from trainmaster.client.types import Artifact

MANIFEST = "manifest.json"
_CHUNK = 1 << 20


def problems(
    connection: Connection, job: str, checkpoint_id: str, artifacts: Iterator[Artifact], *, progress: Progress
) -> list[str]:
    """What is wrong with a checkpoint, a line for each file; empty when all is as it was committed.

    Raises:
        ApiError: the server said no.
        UnreachableError: it does not answer any more.
    """
    home = f"/v1/jobs/{quote(job, safe='')}/artifacts/checkpoints/{quote(checkpoint_id, safe='')}"
    there = {artifact["path"].removeprefix(f"checkpoints/{checkpoint_id}/") for artifact in artifacts}
    if MANIFEST not in there:
        return [f"{MANIFEST}: it is not there"]
    try:
        with connection.fetch(f"{home}/{MANIFEST}", headers={}) as response:
            files = [_expected(file) for file in json.loads(response.read())["files"]]
    except (ValueError, KeyError, TypeError) as error:
        return [f"{MANIFEST}: it cannot be read ({error})"]

    def problem(expected: tuple[str, int, str]) -> str | None:
        path, size, sha256 = expected
        if path not in there:
            return f"{path}: it is not there"
        try:
            found = _digest(connection, f"{home}/{quote(path)}", progress)
        except NotFoundError:
            return f"{path}: it is not there"
        return None if found == (size, sha256) else f"{path}: {found[0]} bytes that are not those committed ({size})"

    with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="verify") as pool:
        return [found for found in pool.map(problem, files) if found is not None]


def _expected(file: dict[str, Any]) -> tuple[str, int, str]:
    return str(file["path"]), int(file["size"]), str(file["sha256"])


def _digest(connection: Connection, route: str, progress: Progress) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    with connection.fetch(route, headers={}) as response:
        for data in response.iter_bytes(_CHUNK):
            size += len(data)
            digest.update(data)
            progress(len(data))
    return size, digest.hexdigest()
