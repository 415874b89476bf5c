"""Installing packages into an environment: with uv where it is on the PATH, with pip where it is not.

pip takes what the base has for installed, because the environment sees it. uv looks at the environment alone: it is
asked what it would install if the base's versions were given, and installs only what the base has not. Where that has
no answer, pip has the last word.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trainmaster.protocol.reasons import Reason

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
