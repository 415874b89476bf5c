"""A Slurm cluster as its command line programs show it."""

from __future__ import annotations

import logging
import os
import pwd
import re
from collections.abc import Sequence

from trainmaster.backends.cluster.engine import EngineAwayError, EngineLaunch, EngineRefusedError
from trainmaster.backends.slurm.access import Partition, SlurmCluster, SlurmRefusedError
from trainmaster.backends.slurm.commands import TIMEOUT_S, SlurmCommands
from trainmaster.backends.slurm.inventory import SlurmNode, nodes_of
from trainmaster.backends.slurm.listing import SACCT_ARGUMENTS, SQUEUE_ARGUMENTS, SlurmJob, jobs_of
from trainmaster.backends.slurm.options import SlurmOptions, minutes
from trainmaster.backends.slurm.render import sbatch_arguments, sbatch_environment

_log = logging.getLogger(__name__)

_NAME_LIST = 200
"""How many jobs sacct is asked about at a time."""
_NO_ACCOUNTING = ("", "(null)", "accounting_storage/none")


class SlurmPrograms:
    def __init__(self, instance: str, options: SlurmOptions, *, timeout_s: float = TIMEOUT_S) -> None:
        self._instance = instance
        self._options = options
        self._commands = SlurmCommands(options, timeout_s=timeout_s)
        self._has_accounting: bool | None = None

    def cluster(self) -> SlurmCluster:
        config, partitions = self._config(), self._partitions()
        self._commands.path_of("sbatch")
        return SlurmCluster(config.get("SLURM_VERSION", ""), config.get("ClusterName", ""), partitions)

    def nodes(self) -> tuple[SlurmNode, ...]:
        return nodes_of(self._asked("its nodes", "scontrol", "--details", "--oneliner", "show", "node"))

    def jobs(self, name: str = "") -> Sequence[SlurmJob]:
        whose = () if self._options.account_users else (f"--user={os.geteuid()}",)
        chosen = ("--name", name) if name else ()
        return list(jobs_of(self._asked("jobs", "squeue", *whose, *SQUEUE_ARGUMENTS, *chosen), self._instance))

    def ended(self, *, names: Sequence[str] = (), handles: Sequence[str] = ()) -> Sequence[SlurmJob]:
        found: list[SlurmJob] = []
        selector, values = ("--name", names) if names else ("--jobs", handles)
        if not values or not self._is_accounted():
            return found
        whose = "--allusers" if self._options.account_users else f"--uid={os.geteuid()}"
        for start in range(0, len(values), _NAME_LIST):
            chosen = f"{selector}={','.join(values[start : start + _NAME_LIST])}"
            try:
                text = self._commands.run("sacct", *SACCT_ARGUMENTS, whose, chosen)
            except (EngineAwayError, SlurmRefusedError) as error:
                _log.warning("Slurm's accounting does not answer: %s", error)
                break
            found += jobs_of(text, self._instance)
        return found

    def submit(self, launch: EngineLaunch, script: str) -> str:
        user = _user_of(launch)
        environment = sbatch_environment(launch, self._commands.environment(), user)
        arguments = sbatch_arguments(launch)
        printed = self._commands.run("sbatch", *arguments, script=script, environment=environment, user=user)
        handle = printed.strip().splitlines()[-1].partition(";")[0]
        if not handle.isdigit():
            raise EngineAwayError(f"sbatch printed {printed.strip()!r} in place of a job id")
        return handle

    def cancel(self, handle: str) -> None:
        try:
            self._commands.run("scancel", handle)
        except SlurmRefusedError as error:
            if not re.search(r"invalid job id|already complet", str(error), re.IGNORECASE):
                raise EngineAwayError(f"Slurm does not cancel job {handle}: {error}") from error

    def close(self) -> None:
        """Nothing is open between two programs."""

    def _asked(self, what: str, program: str, *arguments: str) -> str:
        try:
            return self._commands.run(program, *arguments)
        except SlurmRefusedError as error:
            raise EngineAwayError(f"Slurm does not show {what}: {error}") from error

    def _is_accounted(self) -> bool:
        if self._has_accounting is None:
            self._has_accounting = self._config().get("AccountingStorageType", "") not in _NO_ACCOUNTING
        return self._has_accounting

    def _config(self) -> dict[str, str]:
        text = self._asked("its configuration", "scontrol", "show", "config")
        pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
        return {name.strip(): value.strip() for name, _, value in pairs}

    def _partitions(self) -> dict[str, Partition]:
        text = self._asked("its partitions", "scontrol", "--oneliner", "show", "partition")
        records = (dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines())
        return {
            fields["PartitionName"]: Partition(
                state=fields.get("State", "UP"),
                is_default=fields.get("Default") == "YES",
                max_minutes=minutes(longest) if (longest := fields.get("MaxTime", ""))[:1].isdigit() else None,
            )
            for fields in records
            if "PartitionName" in fields
        }


def _user_of(launch: EngineLaunch) -> pwd.struct_passwd | None:
    """Who submits an attempt; None: the server's user."""
    uid = launch.needs.uid
    if uid is None:
        return None
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        raise EngineRefusedError(
            f"jobs of account {launch.needs.account} are submitted as uid {uid}, whom the server's machine does not "
            "know; create that user on it and on the cluster, or give the account another uid"
        ) from None
