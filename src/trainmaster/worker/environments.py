"""Python environments for jobs that need packages: made once, keyed by content, shared by the account's jobs.

    <cache>/environments/<key>/             a virtual environment
    <cache>/environments/<key>/ready.json   written last; an environment without it is removed and made again
    <cache>/locks/environments-<key>        held while it is made

An environment sees the worker's own packages (the base) and contains only what they lack. This is a preparing step of
the job: it runs as the job's user with the worker's Python.

Packages are installed with uv if it is on the PATH, else with pip. pip counts the base's packages as installed. uv does
not see them: it resolves with the base's versions as constraints, and installs what the base lacks; if that has no
solution, pip decides.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from trainmaster.protocol import environment as names
from trainmaster.protocol.account_files import remove_tree
from trainmaster.protocol.documents import read_document, write_document
from trainmaster.protocol.launch import ENVIRONMENT_FILE, PACKAGES_FILE
from trainmaster.protocol.reasons import Reason

_SIGNS: tuple[tuple[re.Pattern[str], Reason | None, str], ...] = (
    # No reason: the verdict recognizes our last line.
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
"""Pattern in an installer's output, the reason of the failure, and what to say of it."""
_MISPLACING = frozenset({"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONPATH", "PYTHONHOME"})
"""Variables that would make the installer look or write outside of the environment."""
_CREDENTIALS = re.compile(r"://[^/@\s]+@")
_MAX_QUOTE = 1000


class InstallError(Exception):
    def __init__(self, message: str, reason: Reason | None = Reason.BAD_INPUT, output: str = "") -> None:
        super().__init__(f"packages cannot be installed: {message}")
        self.reason = reason
        """The reason that the job reports; None: the verdict derives it from the last lines."""
        self.output = output

    def tell(self, events_file: str) -> None:
        print(self.output, self, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - this is the step's log
        if self.reason is not None:
            event = {"type": "failed", "reason": self.reason, "message": str(self), "t": time.time()}
            with open(events_file, "a") as file:
                file.write(json.dumps(event) + "\n")


def print_line(line: str) -> None:
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
    """Install what an environment lacks of `requirements`, or raise InstallError; `base` has the packages below it.

    Without `index_urls`, the installer's own settings apply. The installer keeps the descriptor `lock` open.
    """
    # A bare name that is there needs no index, and may be in none.
    missing = [requirement for requirement in requirements if requirement not in base]
    if not missing:
        return
    environment = {name: value for name, value in variables.items() if name not in _MISPLACING}
    if index_urls:
        # As variables: everybody on the machine could read arguments, and URLs may hold passwords.
        environment |= dict.fromkeys(("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), index_urls[0])
        environment |= dict.fromkeys(("PIP_EXTRA_INDEX_URL", "UV_INDEX"), " ".join(index_urls[1:]))
    # As pip does: the best version of all indexes, not of the first that has any.
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    installer = _Installer(python, environment, lock)
    has_pip = any(importlib.util.find_spec(module) is not None for module in ("pip", "ensurepip"))
    if (uv := shutil.which("uv", path=variables.get("PATH"))) is not None:
        print_line(f"installing {', '.join(missing)} with uv")
        try:
            _install_with_uv(installer, uv, missing, base)
        except InstallError as error:
            if error.reason is not Reason.BAD_INPUT:
                raise
            # The packages may replace a part of the base, or need one that no index has.
            if has_pip:
                print_line("uv finds no way to add that to what is there; trying pip")
                _install_with_pip(installer, missing)
            else:
                _install_with_uv(installer, uv, missing, base, keep_base=False)
    elif has_pip:
        print_line(f"installing {', '.join(missing)} with pip")
        _install_with_pip(installer, missing)
    else:
        raise InstallError("there is no uv on the PATH, and the worker's Python has neither pip nor ensurepip")


def _install_with_pip(installer: _Installer, missing: Sequence[str]) -> None:
    if importlib.util.find_spec("pip") is None:
        installer.run(str(installer.python), "-m", "ensurepip")
    quiet = ("--disable-pip-version-check", "--no-input", "--no-color", "--progress-bar", "off")
    installer.run(str(installer.python), "-m", "pip", "install", *quiet, "--", *missing)


def _install_with_uv(
    installer: _Installer, uv: str, missing: Sequence[str], base: Mapping[str, str], *, keep_base: bool = True
) -> None:
    """`keep_base`: with the base's versions of all that the base has."""
    # Without a build label such as +cpu: indexes have the release under its plain version.
    versions = {name: version.partition("+")[0] for name, version in base.items()}
    python, home = str(installer.python), installer.python.parents[1]
    wanted, constraints, chosen = (home / name for name in ("wanted.txt", "base.txt", "chosen.txt"))
    wanted.write_text("".join(f"{requirement}\n" for requirement in missing))
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    quiet = ("--no-header", "--no-annotate", "--no-emit-index-url", "--python", python)
    constrained = ("-c", str(constraints)) if keep_base else ()
    command = (uv, "--color", "never", "pip")
    installer.run(*command, "compile", *quiet, *constrained, "-o", str(chosen), str(wanted))
    left = []
    for pinned in filter(str.strip, chosen.read_text().splitlines()):
        name, _, version = pinned.partition(";")[0].strip().partition("==")
        if versions.get(name) != version.partition("+")[0]:
            left.append(pinned)
    if left:
        installer.run(*command, "install", "--python", python, "--no-deps", "--", *left)


@dataclass(frozen=True, slots=True)
class _Installer:
    python: Path
    environment: Mapping[str, str]
    lock: int

    def run(self, *command: str) -> None:
        done = subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(self.lock,),
            check=False,
        )
        if done.returncode:
            raise _error_of(done.stdout)


def _error_of(output: str) -> InstallError:
    output = _CREDENTIALS.sub("://***@", output)
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    for sign, reason, what in _SIGNS:
        if (telling := next((line for line in lines if sign.search(line)), None)) is not None:
            return InstallError(f"{what}: {telling[:_MAX_QUOTE]}", reason, output)
    return InstallError(_sentence_of(lines)[:_MAX_QUOTE], output=output)


def _sentence_of(lines: Sequence[str]) -> str:
    """pip's first error; of uv's, everything from the first on."""
    for number, line in enumerate(lines):
        if line.startswith("ERROR: "):
            return line.removeprefix("ERROR: ")
        if line.startswith("error: "):
            return " ".join(lines[number:]).removeprefix("error: ")
    return lines[-1] if lines else "the installer said nothing"


READY = "ready.json"
KEEP_S = 90 * 24 * 3600.0
"""An environment that was unused for this long is removed when another one is made. Longer than any job runs."""
_LAYOUT = 1
"""Increased when environments are made differently, so that old ones are not reused."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?=$|[\s\[<>=!~;@(])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    requirements: tuple[str, ...]
    """In canonical form, sorted."""
    index_urls: tuple[str, ...]

    @staticmethod
    def of(packages: Sequence[str], index_urls: Sequence[str], variables: Mapping[str, str]) -> Wanted:
        """What a job wants; if it names no index, its pip variables may."""
        named = (variables.get("PIP_INDEX_URL", ""), *variables.get("PIP_EXTRA_INDEX_URL", "").split())
        return Wanted(
            requirements=tuple(sorted({canonical(each) for each in packages})),
            index_urls=tuple(index_urls) or (named if named[0] else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    directories: tuple[str, ...]
    versions: Mapping[str, str]

    @staticmethod
    def own() -> Base:
        directories = site.getsitepackages()
        if site.ENABLE_USER_SITE:
            directories.append(site.getusersitepackages())
        found = tuple(directory for directory in directories if os.path.isdir(directory))
        return Base(directories=found, versions=installed_in(*found))


def canonical(requirement: str) -> str:
    """A requirement in one spelling: whitespace, and in names case, dots, dashes and underscores, do not matter."""
    head, _, marker = (" ".join(part.split()) for part in requirement.partition(";"))
    if (match := _NAME.match(head)) is None:
        return head  # a URL
    rest = head[match.end() :].replace(" ", "").replace("@", " @ ", 1)
    return re.sub(r"[-_.]+", "-", match[0]).lower() + rest + (f" ; {marker}" if marker else "")


def installed_in(*directories: str) -> dict[str, str]:
    """The installed distributions by canonical name, from the names of their directories."""
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
    """Changes with everything that decides what is in an environment."""
    settings = sorted((name, value) for name, value in variables.items() if name.startswith(("PIP_", "UV_")))
    parts = (
        (_LAYOUT, sys.version, EXTENSION_SUFFIXES[0], sys.prefix, sys.base_prefix),
        (base.directories, sorted(base.versions.items())),
        (wanted.requirements, wanted.index_urls, settings),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def environment_for(wanted: Wanted, root: Path, variables: Mapping[str, str]) -> Path:
    """The environment with these packages, made now if there is none; raises InstallError if that fails."""
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
    """Whether it is complete, and its Python still exists."""
    return (place / READY).exists() and (place / "bin" / "python").exists()


def _make(place: Path, wanted: Wanted, base: Base, variables: Mapping[str, str], lock: int) -> None:
    import venv  # dear to import, and not needed to find one

    if place.exists():
        _remove(place)
    # Installing pip into it would take seconds; the base's pip works in it just as well.
    venv.EnvBuilder(symlinks=True, with_pip=False).create(place)
    packages = place / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # `addsitedir` also processes the .pth files there, by which editable packages are installed.
    layers = [f"import site; site.addsitedir({directory!r})\n" for directory in base.directories]
    (packages / "_trainmaster_base.pth").write_text("".join(layers))
    python = place / "bin" / "python"
    try:
        install(
            wanted.requirements, wanted.index_urls, python=python, base=base.versions, variables=variables, lock=lock
        )
    except InstallError:
        _remove(place)
        raise
    added = installed_in(os.fspath(packages))
    for name, version in added.items():
        print_line(f"installed {name} {version}")
    if not added:
        print_line("nothing to install: the worker's own Python has all of it")
    # The packages are on disk before the document that says so.
    os.sync()
    write_document(place / READY, {"requirements": wanted.requirements, "installed": added, "made_at": time.time()})


@contextlib.contextmanager
def _lock(root: Path, key: str) -> Iterator[int]:
    """Hold an environment's lock. The installer inherits it: nobody else starts while it runs, even if we have died."""
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
    # First, so that half an environment is never taken for a whole one.
    (place / READY).unlink(missing_ok=True)
    remove_tree(place)


def main() -> int:
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
