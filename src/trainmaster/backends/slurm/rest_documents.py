"""The documents of slurmrestd: what a job is described by, and what its lists mean. Pure: it asks nobody.

Version v0.0.38 names options as sbatch does and writes plain values. Since v0.0.39, numbers may be unset or infinite,
and states are lists.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainmaster.backends.cluster.engine import EngineRefusedError
from trainmaster.backends.slurm.access import Partition
from trainmaster.backends.slurm.hostlist import expanded
from trainmaster.backends.slurm.inventory import SlurmNode, all_gres
from trainmaster.backends.slurm.listing import SlurmJob, marks
from trainmaster.backends.slurm.options import UNLIMITED, minutes
from trainmaster.backends.slurm.states import STATES

OLDEST, NEWEST = 38, 44
"""The versions that are understood: v0.0.38 and so on."""
_PLAIN = 38
"""Up to this version, values are plain."""
_INFINITE = 0xFFFF_FFFE
"""Slurm's largest plain numbers stand for none, and for no limit."""

Values = dict[str, Any]


def _same(name: str, convert: Callable[[str], Any] = str) -> Callable[[str], Values]:
    return lambda value: {name: convert(value)}


def _set(name: str, convert: Callable[[str], int]) -> Callable[[str], Values]:
    return lambda value: {name: {"set": True, "infinite": False, "number": convert(value)}}


def _megabytes(value: str) -> int:
    return int(value.removesuffix("M"))


def _time_limit(value: str) -> Values:
    if value == UNLIMITED:
        return {"time_limit": {"set": False, "infinite": True, "number": 0}}
    return _set("time_limit", minutes)(value)


def _signal(value: str) -> Values:
    name, _, seconds = value.partition("@")
    return {"kill_warning_signal": name} | _set("kill_warning_delay", int)(seconds)


def _nothing(_: str) -> Values:
    return {}


_COMMON: Mapping[str, Callable[[str], Values]] = {
    "job-name": _same("name"),
    "partition": _same("partition"),
    "account": _same("account"),
    "qos": _same("qos"),
    "reservation": _same("reservation"),
    "ntasks": _same("tasks", int),
    "ntasks-per-node": _same("tasks_per_node", int),
    "cpus-per-task": _same("cpus_per_task", int),
    "tmp": _same("temporary_disk_per_node", _megabytes),
    "constraint": _same("constraints"),
    "prefer": _same("prefer"),
    "nice": _same("nice", int),
    "dependency": _same("dependency"),
    "chdir": _same("current_working_directory"),
    "output": _same("standard_output"),
    "licenses": _same("licenses"),
    "mail-user": _same("mail_user"),
    "wckey": _same("wckey"),
    # The request names the variables, and no limit of this machine goes along.
    "export": _nothing,
    "propagate": _nothing,
}
_UP_TO_38: Mapping[str, Callable[[str], Values]] = {
    **_COMMON,
    "nodes": lambda value: {"nodes": [int(value), int(value)]},
    "mem": _same("memory_per_node", _megabytes),
    "gres": _same("gres"),
    "exclusive": lambda _: {"exclusive": "true"},
    "time": lambda value: {} if value == UNLIMITED else {"time_limit": minutes(value)},
    "signal": _same("signal"),
    # Its own word for that, requeue, is not heeded.
    "no-requeue": lambda _: {"no_requeue": True},
    "mail-type": _same("mail_type"),
}
_FROM_39: Mapping[str, Callable[[str], Values]] = {
    **_COMMON,
    "nodes": lambda value: {"minimum_nodes": int(value), "maximum_nodes": int(value)},
    "mem": _set("memory_per_node", _megabytes),
    "gres": lambda value: {"tres_per_node": ",".join(f"gres/{each}" for each in value.split(","))},
    "exclusive": lambda _: {"shared": ["none"]},
    "time": _time_limit,
    "signal": _signal,
    "no-requeue": lambda _: {"requeue": False},
    "mail-type": lambda value: {"mail_type": value.split(",")},
}


def submission(script: str, comment: str, environment: Mapping[str, str], version: int) -> Values:
    """What is posted for a batch script, whose #SBATCH lines slurmrestd does not read."""
    known = _UP_TO_38 if version <= _PLAIN else _FROM_39
    job: Values = {"comment": comment}
    for name, value in _directives(script):
        if name not in known:
            raise EngineRefusedError(f"slurmrestd cannot be asked for --{name}; remove it from the option extra_args")
        job |= known[name](value)
    variables = [f"{name}={value}" for name, value in environment.items()]
    return {"script": script, "job": {**job, "environment": dict(environment) if version <= _PLAIN else variables}}


def _directives(script: str) -> Iterator[tuple[str, str]]:
    """As for sbatch, they end before the first line that is no comment: what follows has text of users."""
    for line in itertools.takewhile(lambda line: line.startswith("#"), script.splitlines()):
        if line.startswith("#SBATCH --"):
            name, _, value = line.removeprefix("#SBATCH --").partition("=")
            yield name, value


# -- lists --


def jobs_in(document: Mapping[str, Any], instance: str) -> Iterator[SlurmJob]:
    """The jobs of an instance in a list of the controller, or of the accounting."""
    for each in document.get("jobs") or ():
        name = str(each.get("name") or "")
        if not name.startswith(f"tm-{instance}-"):
            continue
        comment, state = each.get("comment"), each.get("job_state")
        owner, attempt_id = marks(name, comment if isinstance(comment, str) else "", instance)
        reason = each.get("state_reason")
        elapsed_s, limit = _number(each.get("end_time")) - _number(each.get("start_time")), each.get("time_limit")
        if state is None:  # of the accounting
            state, reason = each["state"]["current"], each["state"].get("reason")
            times = each.get("time") or {}
            elapsed_s, limit = _number(times.get("elapsed")), times.get("limit")
        limit_minutes = _limit(limit)
        if owner == instance:
            yield SlurmJob(
                job_id=int(each["job_id"]),
                name=name,
                instance=owner,
                attempt_id=attempt_id,
                exit=_exit(each.get("exit_code")),
                state=_state(state),
                hosts=_hosts(each.get("nodes")),
                reason=str(reason or "None"),
                restarts=_number(each.get("restart_cnt")),
                was_preempted=_number(each.get("preempt_time")) > 0,
                elapsed_s=max(0, elapsed_s),
                limit_s=None if limit_minutes is None else 60 * limit_minutes,
            )


def _hosts(nodes: str | None) -> tuple[str, ...]:
    return () if nodes in (None, "", "None assigned") else expanded(str(nodes))


def _state(given: str | Sequence[str]) -> str:
    """The word that squeue would show: of a state and its flags, the first flag that counts."""
    words = [given] if isinstance(given, str) else list(given)
    flags = [word for word in words[1:] if word in STATES]
    return flags[0] if flags else words[0] if words else ""


def _exit(given: int | Mapping[str, Any] | None) -> str:
    if not isinstance(given, Mapping):
        return str(given or 0)
    signal = given.get("signal") or {}
    return f"{_number(given.get('return_code'))}:{_number(signal.get('id', signal.get('signal_id')))}"


def _number(given: int | Mapping[str, Any] | None) -> int:
    """A number, which may be wrapped, or not be set."""
    if isinstance(given, Mapping):
        given = given.get("number") if given.get("set", True) else 0
    return max(0, int(given or 0))


def nodes_in(document: Mapping[str, Any]) -> tuple[SlurmNode, ...]:
    return tuple(_node(each) for each in document.get("nodes") or ())


def _node(each: Mapping[str, Any]) -> SlurmNode:
    state = each.get("state") or "unknown"
    words = [state, *(each.get("state_flags") or ())] if isinstance(state, str) else state
    return SlurmNode(
        name=each["name"],
        address=each.get("address") or each["name"],
        partitions=tuple(each.get("partitions") or ()),
        cpus=_number(each.get("effective_cpus") or each.get("cpus")),
        memory_mb=max(0, _number(each.get("real_memory")) - _number(each.get("specialized_memory"))),
        storage_mb=_number(each.get("temporary_disk")),
        states=frozenset(word.upper() for word in words),
        reason=each.get("reason") or "",
        features=tuple(_words(each.get("features"))),
        gres=all_gres(each.get("gres")),
        held_cpus=_number(each.get("alloc_cpus")),
        held_memory_mb=_number(each.get("alloc_memory")),
        held_gres=all_gres(each.get("gres_used")),
    )


def _words(given: str | Iterable[str] | None) -> Iterator[str]:
    return filter(None, re.split(r",", given) if isinstance(given, str) else given or ())


def partitions_in(document: Mapping[str, Any]) -> dict[str, Partition]:
    """By name; without saying which one is the default."""
    return {each["name"]: _partition(each) for each in document.get("partitions") or ()}


def _partition(each: Mapping[str, Any]) -> Partition:
    state = each.get("state") or (each.get("partition") or {}).get("state") or "UP"
    return Partition(
        state=state if isinstance(state, str) else "+".join(state),
        max_minutes=_limit((each.get("maximums") or {}).get("time", each.get("max_time_limit"))),
    )


def _limit(given: int | Mapping[str, Any] | None) -> int | None:
    """In minutes; None: none is set, or it is infinite."""
    if isinstance(given, Mapping):
        given = given.get("number") if given.get("set") and not given.get("infinite") else None
    return int(given) if given is not None and 0 <= given < _INFINITE else None


def release_of(document: Mapping[str, Any]) -> tuple[str, str]:
    """The version of Slurm and the name of the cluster that sent a document."""
    meta = document.get("meta") or {}
    slurm = meta.get("slurm") or meta.get("Slurm") or {}
    return str(slurm.get("release") or ""), str(slurm.get("cluster") or "")


def problems_in(document: Mapping[str, Any]) -> str:
    """The errors of an answer, in Slurm's words."""
    words = (str(each.get("error") or each.get("description") or each) for each in document.get("errors") or ())
    return "; ".join(dict.fromkeys(words))
