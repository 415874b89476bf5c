"""Python environments for jobs that need packages: each made once, found by its content, shared by the account's jobs.

    <cache>/environments/<key>/             a virtual environment
    <cache>/environments/<key>/ready.json   written last; one without it is removed and made again
    <cache>/locks/environments-<key>        held by whoever makes it

An environment lies over the worker's own packages: it sees them, and holds only what they lack. Run as a job's
preparing step, as the job's user and with the worker's Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import site
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from trainmaster.protocol import environment as names
from trainmaster.protocol.account_files import remove_tree
from trainmaster.protocol.documents import read_document, write_document
from trainmaster.protocol.launch import ENVIRONMENT_FILE, PACKAGES_FILE
from trainmaster.worker.package_install import InstallError, install, print_line

READY = "ready.json"
KEEP_S = 90 * 24 * 3600.0
"""Unused for so long, it is removed when another one is made. No job is likely to run longer in one start."""
_LAYOUT = 1
"""Raised when environments are made in another way, so that older ones are not taken for new ones."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?=$|[\s\[<>=!~;@(])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an environment has to have."""

    requirements: tuple[str, ...]
    """In their canonical form, sorted."""
    index_urls: tuple[str, ...]

    @staticmethod
    def of(packages: Sequence[str], index_urls: Sequence[str], variables: Mapping[str, str]) -> Wanted:
        """What a job wants; where it names no index, its variables for pip may."""
        named = (variables.get("PIP_INDEX_URL", ""), *variables.get("PIP_EXTRA_INDEX_URL", "").split())
        return Wanted(
            requirements=tuple(sorted({canonical(each) for each in packages})),
            index_urls=tuple(index_urls) or (named if named[0] else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The packages of the Python that environments lie over."""

    directories: tuple[str, ...]
    versions: Mapping[str, str]
    """Canonical name -> version."""

    @staticmethod
    def own() -> Base:
        """Those of this process."""
        directories = site.getsitepackages()
        if site.ENABLE_USER_SITE:
            directories.append(site.getusersitepackages())
        found = tuple(directory for directory in directories if os.path.isdir(directory))
        return Base(directories=found, versions=installed_in(*found))


def canonical(requirement: str) -> str:
    """A requirement in one spelling: spaces, and in names case, dots, dashes and underscores, mean nothing."""
    head, _, marker = (" ".join(part.split()) for part in requirement.partition(";"))
    if (match := _NAME.match(head)) is None:
        return head  # a URL
    rest = head[match.end() :].replace(" ", "").replace("@", " @ ", 1)
    return re.sub(r"[-_.]+", "-", match[0]).lower() + rest + (f" ; {marker}" if marker else "")


def installed_in(*directories: str) -> dict[str, str]:
    """The distributions that are installed there, by their canonical names; as their directories are called."""
    found: dict[str, str] = {}
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.listdir(directory)):
                stem, dot, kind = entry.rpartition(".")
                name, dash, version = stem.partition("-")
                if dot and dash and kind in ("dist-info", "egg-info"):
                    found.setdefault(canonical(name), version.partition("-")[0])
    return found


def key_of(wanted: Wanted, base: Base, variables: Mapping[str, str]) -> str:
    """What an environment is found by: another one when anything is another that decides what is in it."""
    settings = sorted((name, value) for name, value in variables.items() if name.startswith(("PIP_", "UV_")))
    parts = (
        (_LAYOUT, sys.version, EXTENSION_SUFFIXES[0], sys.prefix, sys.base_prefix),
        (base.directories, sorted(base.versions.items())),
        (wanted.requirements, wanted.index_urls, settings),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def environment_for(wanted: Wanted, root: Path, variables: Mapping[str, str]) -> Path:
    """The environment that has these packages, made now if there is none.

    Raises:
        InstallError: they cannot be installed.
    """
    base = Base.own()
    place = root / "environments" / key_of(wanted, base, variables)
    if not _is_ready(place):
        with _lock(root, place.name) as lock:
            if not _is_ready(place):
                _make(place, wanted, base, variables, lock)
        _forget_unused(root)
    os.utime(place)
    return place


def _is_ready(place: Path) -> bool:
    """Whether it is whole, and the Python that it was made for is still there."""
    return (place / READY).exists() and (place / "bin" / "python").exists()


def _make(place: Path, wanted: Wanted, base: Base, variables: Mapping[str, str], lock: int) -> None:
    import venv  # dear to import, and not needed to find one

    if place.exists():
        _remove(place)
    # Its own pip would take seconds to install; the base's works in it just as well.
    venv.EnvBuilder(symlinks=True, with_pip=False).create(place)
    packages = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # `addsitedir` heeds the .pth files there too, by which packages are installed that lie elsewhere.
    layers = [f"import site; site.addsitedir({directory!r})\n" for directory in base.directories]
    (packages / "_trainmaster_base.pth").write_text("".join(layers))
    try:
        install(
            wanted.requirements,
            wanted.index_urls,
            python=place / "bin" / "python",
            base=base.versions,
            variables=variables,
            lock=lock,
        )
    except InstallError:
        _remove(place)
        raise
    added = installed_in(os.fspath(packages))
    for name, version in added.items():
        print_line(f"installed {name} {version}")
    if not added:
        print_line("nothing to install: the worker's own Python has all of it")
    # What was installed is on disk before the word is that says so.
    os.sync()
    write_document(place / READY, {"requirements": wanted.requirements, "installed": added, "made_at": time.time()})


@contextlib.contextmanager
def _lock(root: Path, key: str) -> Iterator[int]:
    """Hold an environment's lock; its descriptor. The installer inherits it, and so nobody else begins while it runs,
    whatever has become of us."""
    path = root / "locks" / f"environments-{key}"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_line("another job is installing the same packages; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _forget_unused(root: Path) -> None:
    before = time.time() - KEEP_S
    for place in (root / "environments").iterdir():
        with contextlib.suppress(OSError), open(root / "locks" / f"environments-{place.name}", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.stat().st_mtime < before:
                _remove(place)


def _remove(place: Path) -> None:
    # First, so that half of it is never taken for the whole.
    (place / READY).unlink(missing_ok=True)
    remove_tree(place)


def main() -> int:
    """Make or find the environment of the job that this process prepares, and leave word of it."""
    variables = dict(os.environ)
    prepared = Path(variables[names.PREPARED_DIR])
    document = read_document(Path(variables[names.INPUTS_DIR]) / PACKAGES_FILE) or {}
    wanted = Wanted.of(document["packages"], document["index_urls"], variables)
    root = Path(variables.get(names.CACHE_DIR) or prepared)
    try:
        place = environment_for(wanted, root, variables)
    except InstallError as error:
        error.tell(variables[names.EVENTS_FILE])
        return 1
    write_document(prepared / ENVIRONMENT_FILE, {"path": os.fspath(place)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
