"""Checks the data of a job before it is submitted: a process reads real rows, as the server has nothing of the training
stack. It has limits of time and memory, runs as the user of the account's jobs, and can reach what a job can."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trainmaster.protocol import account_files
from trainmaster.protocol.account_files import User
from trainmaster.protocol.environment import CACHE_DIR, ENDPOINTS, FETCHING, RESERVED_PREFIX, TOKENS
from trainmaster.protocol.run_directory import SEARCH_ONLY
from trainmaster.server.coordinator.account_users import runs_as
from trainmaster.server.coordinator.admission import importable
from trainmaster.server.coordinator.launch import fetching_environment
from trainmaster.server.core.accounts import Account
from trainmaster.server.core.errors import ConflictError, RefusedError
from trainmaster.server.core.training.types import TRAIN_EXTRA
from trainmaster.server.settings.settings import Settings

TIMEOUT_S = 120.0
MEMORY_BYTES = 8 << 30
"""Of address space: libraries map more than they use."""
AT_ONCE_OF_AN_ACCOUNT = 2
AT_ONCE = 4
"""Of all accounts: each has a process, and a thread of a few that the server has for more than this."""
MAX_ANSWER_BYTES = 32 << 20
"""What a check may say: the server holds it in memory."""
NEEDED = ("transformers", "datasets")
"""Packages without which nothing can be looked at."""
_LAST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCheck:
    document: Mapping[str, Any]
    """As `training.json` has it."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Where shipped files go in the working directory, and where their content lies."""
    environment: Mapping[str, str] = field(repr=False, default_factory=dict)
    tokens: Mapping[str, str] = field(repr=False, default_factory=dict)
    """By the names of secrets."""
    limit: int = 3


class DataChecks:
    """Runs checks. Belongs to one event loop."""

    def __init__(self, settings: Settings, *, installed: Callable[[str], bool] = importable) -> None:
        self._settings = settings
        self._installed = installed
        self._under_way: Counter[str] = Counter()

    async def run(self, account: Account, check: DataCheck) -> dict[str, Any]:
        """What was found; RefusedError when it cannot be looked at, ConflictError while too many others are."""
        absent = [name for name in NEEDED if not self._installed(name)]
        if absent:
            raise RefusedError(f"this server cannot read training data: it lacks {', '.join(absent)}; {TRAIN_EXTRA}")
        endpoints = [name for name in check.environment if name in ENDPOINTS]
        if endpoints and not self._settings.private_sources:
            raise RefusedError(
                f"environment.{endpoints[0]}: a check on this server asks the usual services alone; its operator can "
                "allow others with the setting private_urls"
            )
        uid = runs_as(account, self._settings)
        if self._under_way[account.account_id] >= AT_ONCE_OF_AN_ACCOUNT:
            raise ConflictError("other checks of your account are running; wait for them")
        if self._under_way.total() >= AT_ONCE:
            raise ConflictError("other checks are running on this server; try again in a minute")
        self._under_way[account.account_id] += 1
        try:
            return await asyncio.to_thread(self._run, check, uid)
        finally:
            self._under_way[account.account_id] -= 1

    def _run(self, check: DataCheck, uid: int | None) -> dict[str, Any]:
        request = {"document": check.document, "limit": check.limit, "memory_bytes": MEMORY_BYTES}
        directory = _laid_out(check.files, uid)
        with contextlib.ExitStack() as stack:
            stack.callback(_remove, directory)
            # Files, as a pipe has no end while somebody holds it, and no bound. Nobody but the server can open them.
            private = functools.partial(os.open, mode=0o600)
            streams = [
                stack.enter_context(open(directory / name, "xb+", opener=private)) for name in ("in", "out", "err")
            ]
            asked, answer, errors = streams
            asked.write(json.dumps(request).encode())
            asked.seek(0)
            if (code := self._exit_code(check, directory, uid, streams)) != 0:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST_BYTES))
                raise RefusedError(_failure(code, errors.read(_LAST_BYTES)))
            if answer.seek(0, os.SEEK_END) > MAX_ANSWER_BYTES:
                raise RefusedError("the result of the check is too large; set a lower limit, or check fewer sources")
            answer.seek(0)
            found: dict[str, Any] = json.load(answer)
            return found

    def _exit_code(self, check: DataCheck, directory: Path, uid: int | None, streams: Sequence[IO[bytes]]) -> int:
        """Run the process to its end, or end it; its exit code."""
        user = None if uid is None else User.of(uid)
        try:
            process = subprocess.Popen(
                # Without -P and -s, a shipped file would be imported in the place of a module of its name.
                [sys.executable, "-s", "-P", "-m", "trainmaster.training.data_check"],
                cwd=directory / "work",
                env=self._environment(check, directory, uid),
                start_new_session=True,
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                user=user.uid if user else None,
                group=user.gid if user else None,
                extra_groups=user.groups if user else None,
            )
        except PermissionError as error:
            raise RefusedError(
                f"uid {uid}, which runs the jobs of this account, may not execute {error.filename}: install "
                "Trainmaster where it may"
            ) from error
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise RefusedError(
                f"the check took longer than {TIMEOUT_S:g} s, and was stopped; check fewer or smaller sources"
            ) from None
        finally:
            # Whatever it started is in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _environment(self, check: DataCheck, directory: Path, uid: int | None) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(RESERVED_PREFIX)}
        home = directory / "home"
        return {
            **inherited,
            **({} if uid is None else {"HOME": str(home)}),
            **fetching_environment(self._settings),
            **{name: value for name, value in check.environment.items() if name in FETCHING},
            **{TOKENS[name]: token for name, token in check.tokens.items() if name in TOKENS},
            CACHE_DIR: str(home / "cache"),
            "HF_MODULES_CACHE": str(home / "modules"),
        }


def _laid_out(files: Mapping[str, Path], uid: int | None) -> Path:
    """A directory of the check's own, with `work` (the shipped files) and `home`, which belong to the user. `home` is
    empty: libraries read settings and credentials (`.netrc`) and import from there, and the process holds tokens."""
    directory = Path(tempfile.mkdtemp(prefix="trainmaster-check-"))
    user = None if uid is None else User.of(uid)
    try:
        giver = account_files.UserDirectoryBuilder(user=user)
        giver.lay_out(directory, "home", {}, link=False)
        giver.lay_out(directory, "work", files, link=user is None)
        if user is not None:
            # Last: until here, nobody but the server could reach what lies in there.
            account_files.claim_directory(directory, "", mode=SEARCH_ONLY)
    except FileExistsError as error:
        account_files.remove_tree(directory)
        raise RefusedError(f"files: {error.filename} is shipped as a file and as a directory") from error
    except BaseException:
        account_files.remove_tree(directory)
        raise
    return directory


def _remove(directory: Path) -> None:
    with contextlib.suppress(OSError):  # what it left running may still write there
        account_files.remove_tree(directory)


def _failure(code: int, errors: bytes) -> str:
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    last = lines[-1][:500] if lines else "it wrote no error"
    if "MemoryError" in last or "bad_alloc" in last or code == -signal.SIGABRT:
        return f"the check needed more than {MEMORY_BYTES >> 30} GiB of memory: {last}"
    return f"the check failed: {last}"
