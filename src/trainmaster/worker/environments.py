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
import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from trainmaster.protocol import environment as names
from trainmaster.protocol.account_files import remove_tree
from trainmaster.protocol.documents import read_document, write_document
from trainmaster.protocol.launch import ENVIRONMENT_FILE, PACKAGES_FILE
from trainmaster.protocol.reasons import Reason

# Installing packages into an environment: with uv where it is on the PATH, with pip where it is not.
#
# pip takes what the base has for installed, because the environment sees it. uv looks at the environment alone: it is
# asked what it would install if the base's versions were given, and installs only what the base has not. Where that has
# no answer, pip has the last word.

_SIGNS: tuple[tuple[re.Pattern[str], Reason | None, str], ...] = (
    # The verdict finds this one by itself, in our last line.
    (re.compile(r"No space left on device|Disk quota exceeded"), None, "No space left on device"),
    (
        re.compile(r"40[13] (?:Client )?Error|HTTP error 40[13]|HTTP status client error \(40[13]"),
        Reason.CREDENTIALS_REFUSED,
        "the index refused the credentials",
    ),
    (
        re.compile(
            r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProtocolError|"
            r"connection broken by|HTTP error 5\d\d|50[0-4] Server Error|HTTP status server error|"
            r"error sending request|dns error"
        ),
        Reason.STORAGE_UNAVAILABLE,
        "the index did not answer",
    ),
)
"""What an installer's output shows of why it failed; the reason, and what to say of it."""
_MISPLACING = frozenset({"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME"})
"""Variables that would have the installer look or write elsewhere than in the environment."""
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_MAX_QUOTE = 1000


class InstallError(Exception):
    """Packages could not be installed."""

    def __init__(self, message: str, reason: Reason | None = Reason.BAD_INPUT, output: str = "") -> None:
        super().__init__(f"packages cannot be installed: {message}")
        self.reason = reason
        """What the job is told to have failed of; None leaves that to whoever reads its last lines."""
        self.output = output
        """All that the installer said."""

    def tell(self, events_file: str) -> None:
        """Say it in the log, and to the worker."""
        print(self.output, self, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - this is the step's log
        if self.reason is not None:
            event = {"type": "failed", "reason": self.reason, "message": str(self), "t": time.time()}
            with open(events_file, "a") as file:
                file.write(json.dumps(event) + "\n")


def print_line(line: str) -> None:
    """Say what happens, in the step's log."""
    print(line, flush=True)  # noqa: T201 - this is the step's log


def install(
    requirements: Sequence[str],
    index_urls: Sequence[str],
    *,
    python: Path,
    base: Mapping[str, str],
    variables: Mapping[str, str],
    lock: int,
) -> None:
    """Install what an environment lacks.

    Args:
        requirements: what it has to have.
        index_urls: the index, and further ones; the installer's own settings when empty.
        python: the environment's interpreter.
        base: what it sees of the Python below it, by canonical names.
        variables: those of this process.
        lock: a descriptor that the installer shall keep open.

    Raises:
        InstallError: it cannot be done; the installer's whole output is in the log.
    """
    # A bare name that is there needs no index, and may be in none.
    missing = [requirement for requirement in requirements if requirement not in base]
    if not missing:
        return
    environment = {name: value for name, value in variables.items() if name not in _MISPLACING}
    environment |= _indexes(index_urls)
    # As pip does: the best version of all indexes, not of the first that has any.
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    by_pip = _Installer([str(python), "-m"], environment, lock)
    has_pip = any(importlib.util.find_spec(module) is not None for module in ("pip", "ensurepip"))
    if (uv := shutil.which("uv", path=variables.get("PATH"))) is not None:
        print_line(f"installing {', '.join(missing)} with uv")
        by_uv = _Uv(_Installer([uv, "--color", "never", "pip"], environment, lock), python, base)
        try:
            by_uv.install(missing)
        except InstallError as error:
            if error.reason is not Reason.BAD_INPUT:
                raise
            # What is wanted may replace a part of the base, or need one that no index has.
            if has_pip:
                print_line("uv finds no way to add that to what is there; trying pip")
                _install_with_pip(by_pip, missing)
            else:
                by_uv.install(missing, keep_base=False)
    elif has_pip:
        print_line(f"installing {', '.join(missing)} with pip")
        _install_with_pip(by_pip, missing)
    else:
        raise InstallError("there is no uv on the PATH, and the worker's Python has neither pip nor ensurepip")


def _install_with_pip(installer: _Installer, missing: Sequence[str]) -> None:
    if importlib.util.find_spec("pip") is None:
        installer.run("ensurepip")
    quiet = ("--disable-pip-version-check", "--no-input", "--no-color", "--progress-bar", "off")
    installer.run("pip", "install", *quiet, "--", *missing)


class _Uv:
    """Has uv install into an environment what the base lacks."""

    def __init__(self, installer: _Installer, python: Path, base: Mapping[str, str]) -> None:
        self._installer = installer
        self._python = str(python)
        self._home = python.parents[1]
        # Without what marks a build, such as +cpu: an index has the release under its plain version.
        self._base = {name: version.partition("+")[0] for name, version in base.items()}

    def install(self, missing: Sequence[str], *, keep_base: bool = True) -> None:
        """Install requirements, with the base's versions of all that it has or with others.

        Raises:
            InstallError: there is no way.
        """
        wanted = self._listed("wanted.txt", missing)
        base = self._listed("base.txt", (f"{name}=={version}" for name, version in self._base.items()))
        chosen = self._home / "chosen.txt"
        quiet = ("--no-header", "--no-annotate", "--no-emit-index-url", "--python", self._python)
        self._installer.run("compile", *quiet, *(("-c", base) if keep_base else ()), "-o", str(chosen), wanted)
        left = [line for line in chosen.read_text().splitlines() if line.strip() and not self._has(line)]
        if left:
            self._installer.run("install", "--python", self._python, "--no-deps", "--", *left)

    def _listed(self, name: str, lines: Iterable[str]) -> str:
        path = self._home / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return str(path)

    def _has(self, pinned: str) -> bool:
        """Whether the base has the very version of a line `name==version`."""
        name, _, version = pinned.partition(";")[0].strip().partition("==")
        return self._base.get(name) == version.partition("+")[0]


def _indexes(index_urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Variables that name the indexes; as arguments, anybody on the machine could read what is in their URLs."""
    if index_urls:
        further = " ".join(index_urls[1:])
        yield from (("PIP_INDEX_URL", index_urls[0]), ("PIP_EXTRA_INDEX_URL", further))
        yield from (("UV_DEFAULT_INDEX", index_urls[0]), ("UV_INDEX", further))


class _Installer:
    """Runs an installer's commands."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], lock: int) -> None:
        self._command = tuple(command)
        self._environment = environment
        self._lock = lock

    def run(self, *arguments: str) -> None:
        """Run one to its end.

        Raises:
            InstallError: it failed.
        """
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(self._lock,),
            check=False,
        )
        if done.returncode:
            raise _error_of(done.stdout)


def _error_of(output: str) -> InstallError:
    """What an installer's output says of why it failed."""
    output = _CREDENTIALS.sub("://***@", output)
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    for sign, reason, what in _SIGNS:
        if (telling := next((line for line in lines if sign.search(line)), None)) is not None:
            return InstallError(f"{what}: {telling[:_MAX_QUOTE]}", reason, output)
    return InstallError(_sentence_of(lines)[:_MAX_QUOTE], output=output)


def _sentence_of(lines: Sequence[str]) -> str:
    """What matters in an installer's lines: pip's first error; all of uv's, from its first on."""
    for number, line in enumerate(lines):
        if line.startswith("ERROR: "):
            return line.removeprefix("ERROR: ")
        if line.startswith("error: "):
            return " ".join(lines[number:]).removeprefix("error: ")
    return lines[-1] if lines else "the installer said nothing"


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
