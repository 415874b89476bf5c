"""The step of an initializer: `python -m trainmaster.training.initializer dataset`, or `model`.

Brings what the job names into the account's cache, unless it is there, and lays links to it into a directory of this
node and attempt, which DATASET_PATH or MODEL_PATH names to the ranks. What they make in there is theirs alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trainmaster.jobs import inputs
from trainmaster.protocol import environment
from trainmaster.protocol.addresses import is_public
from trainmaster.training import steps
from trainmaster.training.errors import InputError, PreparingError, UnavailableError
from trainmaster.training.fetching.access import Access, Remedies
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.steps import Progress, Tell, doing, note, size_text

BACK_OFF_S = (2.0, 10.0, 30.0)
"""Before each further try; the clients below try again by themselves before that."""
_EXTRAS = {"huggingface": "hub", "s3": "s3", "cache": "cache"}

Files = Mapping[str, Path]
"""What was fetched: paths below the directory of the ranks, and where the files lie."""
_Fetched = TypeVar("_Fetched")


def main(part: str) -> None:
    """Fetch one part, and place it."""
    document = inputs.initializers()
    spec = document[part]
    uri = spec["storage_uri"]
    try:
        access = access_of(part, spec, document)
        progress = Progress({part: 1.0})
        progress.begin(part)
        began = time.monotonic()
        doing(f"fetching {uri}")
        files = _fetch(part, spec, access, lambda share: progress.at(share, f"fetching {uri}"))
        _place(files, Path(os.environ[environment.PREPARED_DIR], part))
    except PreparingError as error:
        error.args = (f"{part}-initializer: {error}",)
        raise
    size = size_text(sum(path.stat().st_size for path in files.values()))
    count = f"{len(files)} files" if len(files) > 1 else "1 file"
    note(f"{part}-initializer: {uri}: {count}, {size}, in {time.monotonic() - began:.1f} s")
    Cache(access.cache).forget_unused()
    progress.finish()


def access_of(part: str, spec: Mapping[str, Any], document: Mapping[str, Any]) -> Access:
    """What may be reached, and as whom. What the clients read of the environment is set there.

    Args:
        part: `dataset` or `model`.
        spec: what is fetched.
        document: the input file of the steps.
    """
    where = f"workload.initializers.{part}"
    secrets = {field: os.environ.pop(name, None) for field, name in environment.INITIALIZER_SECRETS.items()}
    access = replace(
        Access.from_environ(os.environ),
        hub_token=secrets["access_token"],
        remedies=Remedies(
            hub_name="check the name",
            hub_token=f"give a token in {where}.access_token",
            hub_mirror="name a mirror in workload.environment.HF_ENDPOINT",
            s3_keys=(
                "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in workload.environment"
                if spec["type"] == "cache"
                else f"give access_key_id and secret_access_key in {where}"
            ),
        ),
    )
    if not access.private_urls:
        for name in document["endpoints_of_the_job"]:
            _require_public(os.environ.get(name, ""), f"workload.environment.{name}")
        _require_public(spec.get("endpoint") or "", f"{where}.endpoint")
    given = {
        "AWS_ENDPOINT_URL_S3": spec.get("endpoint"),
        "AWS_REGION": spec.get("region"),
        "AWS_ACCESS_KEY_ID": secrets["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": secrets["secret_access_key"],
    }
    os.environ.update({name: value for name, value in given.items() if value})
    if secrets["access_key_id"]:
        os.environ.pop("AWS_SESSION_TOKEN", None)  # it belongs to the key of the environment
    return access


def in_role(spec: Mapping[str, Any], access: Access) -> Access:
    """The same, with the keys of the role that is to be assumed, if one is."""
    role = spec.get("role_arn") or spec.get("iam_role")
    if not role:
        return access
    from trainmaster.training.fetching.s3 import assumed

    return replace(access, s3_credentials=assumed(role, access.remedies.s3_keys))


def patiently(fetch: Callable[[], _Fetched]) -> _Fetched:
    """Try again for a while where a source does not answer. What came before is not fetched again."""
    for number, wait_s in enumerate(BACK_OFF_S, start=1):
        try:
            return fetch()
        except UnavailableError as error:
            doing(f"{error}; trying again in {wait_s:.0f} s, {number} of {len(BACK_OFF_S)} times")
            time.sleep(wait_s)
    return fetch()


def _fetch(part: str, spec: Mapping[str, Any], access: Access, tell: Tell) -> Files:
    uri, ignored = spec["storage_uri"], spec.get("ignore_patterns") or ()
    if spec["type"] == "huggingface":
        from trainmaster.training.fetching import hub

        return patiently(lambda: hub.repository(uri, part, access, tell, ignored=ignored))
    if spec["type"] == "s3":
        from trainmaster.training.fetching import s3

        return _files_below(patiently(lambda: s3.directory(uri, in_role(spec, access), tell, ignored=ignored)))
    from trainmaster.training.tables import sharded
    from trainmaster.training.tables.shard_processes import Gang

    gang = Gang.of_environment()
    with gang.leading() if gang else contextlib.nullcontext():
        return _files_below(patiently(lambda: sharded(spec, in_role(spec, access), tell, gang)))


def _place(files: Files, target: Path) -> None:
    """Fill a directory with links to files. One that is there stays, as it may be mounted elsewhere, and is emptied."""
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    for name, path in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise InputError(f"the file {name!r} would lie outside of its directory")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(path)


def _files_below(directory: Path) -> Files:
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*")) if path.is_file()}


def _require_public(url: str, field: str) -> None:
    """Refuse an address of the job's own that leads into a private network."""
    host = urlsplit(url).hostname
    if not host:
        return
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError) as error:
        raise InputError(f"{field}: there is no host {host}") from error
    if not all(is_public(ipaddress.ip_address(address)) for address in found):
        raise InputError(
            f"{field}: it leads to {host}, which is no public address; this server lets jobs read from public "
            "addresses alone"
        )


if __name__ == "__main__":
    chosen = sys.argv[1]
    kind = inputs.initializers()[chosen]["type"]
    steps.end_when_told()
    steps.run(lambda: main(chosen), f"pip install 'trainmaster[{_EXTRAS[kind]}]'")
