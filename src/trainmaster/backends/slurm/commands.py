"""Runs Slurm's programs, and tells a cluster that is away from one that refuses."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from trainmaster.backends.cluster.engine import EngineAwayError
from trainmaster.backends.slurm.access import SlurmRefusedError
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.backends.slurm.refusals import CONFIGURATION_MISSING, CONTROLLER_AWAY, TOO_MANY, passing_problem

TIMEOUT_S = 60.0
"""Slurm's programs try for half a minute and longer to reach a controller that is away."""

_ASKS = 4
"""How often a program asks a controller that has too many requests: a look at the cluster takes several, and one of
them may always be one too many."""
_PAUSE_S = 0.5
_SUBMITS = "sbatch"
"""Asks once: a limit on jobs lasts, and the job is handed over again later."""

_OPTION_VARIABLES = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SINFO_", "SACCT_", "SCONTROL_", "SALLOC_", "SRUN_")
"""Prefixes of variables that change what Slurm's programs do, as in a server that was started in a Slurm job."""
_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")


class SlurmCommands:
    """Runs the programs that the options name. Thread-safe."""

    def __init__(self, options: SlurmOptions, *, timeout_s: float = TIMEOUT_S) -> None:
        self._options = options
        self._timeout_s = timeout_s

    def run(
        self,
        program: str,
        *arguments: str,
        script: str = "",
        environment: Mapping[str, str] | None = None,
        user: pwd.struct_passwd | None = None,
    ) -> str:
        """What a program prints, run as a user, or as the server's. Raises EngineAwayError and SlurmRefusedError."""
        asks = 1 if program == _SUBMITS else _ASKS
        while True:
            try:
                return self._run(program, *arguments, script=script, environment=environment, user=user)
            except _TooManyError:
                asks -= 1
                if not asks:
                    raise
            time.sleep(_PAUSE_S)

    def _run(
        self,
        program: str,
        *arguments: str,
        script: str,
        environment: Mapping[str, str] | None,
        user: pwd.struct_passwd | None,
    ) -> str:
        conf = self._options.conf or os.environ.get("SLURM_CONF", "")
        if conf and not os.path.exists(conf):
            # Slurm's programs would wait for it for a minute.
            raise EngineAwayError(f"{CONFIGURATION_MISSING}. There is no {conf}")
        try:
            process: subprocess.Popen[str] = subprocess.Popen(
                [self.path_of(program), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self.environment() if environment is None else environment,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                **_identity(user),
            )
        except OSError as error:
            raise EngineAwayError(f"{program} cannot be run: {error}") from error
        with process:
            try:
                printed, problem = process.communicate(script, timeout=self._timeout_s)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    seconds = f"{self._timeout_s:.0f} s"
                    raise EngineAwayError(f"{program} has not answered after {seconds}. {CONTROLLER_AWAY}") from None
                raise
        if process.returncode != 0:
            raise _error_of(_words_of(problem) or _words_of(printed) or f"{program} failed", process.returncode)
        return printed

    def path_of(self, program: str) -> str:
        """Raises EngineAwayError if it is not installed."""
        place = self._options.bin_dir or os.environ.get("PATH", os.defpath)
        if (path := shutil.which(program, path=place)) is None:
            where = f"in {self._options.bin_dir}" if self._options.bin_dir else "on the PATH of the server"
            raise EngineAwayError(
                f"{program} was not found {where}: install Slurm's client programs there, or name their directory with "
                "the option bin_dir"
            )
        return path

    def environment(self) -> dict[str, str]:
        """The server's, without what would change Slurm's output."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT_VARIABLES or not name.startswith(_OPTION_VARIABLES)
        }
        kept["LC_ALL"] = "C"
        if self._options.conf:
            kept["SLURM_CONF"] = self._options.conf
        if self._options.bin_dir:
            # The script calls srun, which is likely to be in the same place on the nodes.
            kept["PATH"] = f"{self._options.bin_dir}:{kept.get('PATH', os.defpath)}"
        return kept


class _TooManyError(EngineAwayError):
    """The controller has too many requests, or too many jobs."""


def _identity(user: pwd.struct_passwd | None) -> dict[str, Any]:
    if user is None:
        return {}
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    # The server's working directory may be closed to that user.
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups, "cwd": "/"}


def _error_of(words: str, code: int) -> Exception:
    if meaning := passing_problem(words):
        kind = _TooManyError if meaning == TOO_MANY else EngineAwayError
        return kind(f"{meaning}. Slurm: {words}")
    if code < 0:
        return EngineAwayError(f"Slurm's program was killed by signal {-code}: {words}")
    return SlurmRefusedError(words)


def _words_of(printed: str) -> str:
    """Without the names of programs and without repetitions, on one line."""
    lines: list[str] = []
    for line in printed.splitlines():
        words = line.strip()
        for part in ("sbatch: ", "squeue: ", "scancel: ", "scontrol: ", "sacct: ", "error: ", "fatal: "):
            words = words.removeprefix(part)
        if words and words not in lines:
            lines.append(words)
    return "; ".join(lines)
