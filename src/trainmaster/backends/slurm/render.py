"""The batch script of an attempt. Pure: it asks nobody.

Users write names and labels as they like: of these, none gets into the script.
"""

from __future__ import annotations

import math
import pwd
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from trainmaster.backends.cluster.engine import EngineLaunch, EngineRefusedError
from trainmaster.backends.slurm.inventory import GpuChoice
from trainmaster.backends.slurm.options import IMAGE, UNLIMITED, SlurmOptions, minutes
from trainmaster.protocol.environment import ENGINE_SIGNALS_RANKS

SETUP_S = 600
"""What an attempt may need in addition to max_runtime_s, which counts from the start of its ranks: it fetches the
worker, packages and data first. Its own timeout thus comes before Slurm's."""
_SIGNAL_RESOLUTION_S = 60
"""Slurm sends the signal of --signal up to this much earlier."""
_MAX_SIGNAL_S = 65_535
_HIGHEST_PRIORITY = 10
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG")
"""What jobs get of the server's environment. Nothing else, which may be secret."""
_OF_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""What sbatch needs in addition."""
_USER_VARIABLES = 'USER=$(id -un); LOGNAME=$USER; HOME=$(getent passwd "$USER" | cut -d: -f6); export USER LOGNAME HOME'
"""slurmrestd does not know those of its users."""
_NODE_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FEATURE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_COMMENT_CHARACTERS = 120
COMMENT = "trainmaster"


def batch_script(
    launch: EngineLaunch,
    options: SlurmOptions,
    gpus: GpuChoice,
    preferred: Sequence[str] = (),
    *,
    max_minutes: int | None = None,
) -> str:
    """What sbatch gets as its input. `preferred`: the features that Slurm can be asked to prefer. `max_minutes`: the
    longest time limit that the partition allows, where that is known.

    Raises EngineRefusedError if a job needs what Slurm cannot express.
    """
    if _NAME.fullmatch(launch.name) is None:
        raise ValueError(f"{launch.name!r} is no name of an attempt")
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH --{line}" for line in _directives(launch, options, gpus, preferred, max_minutes)),
        "",
    ]
    given = ("PATH",) if options.rest_url else INHERITED
    lines.append(f"# Variables of the request, the only ones of the server: {' '.join([*given, *launch.secrets])}")
    if options.rest_url:
        lines.append(_USER_VARIABLES)
    lines += [f"export {_variable(name)}={shlex.quote(value)}" for name, value in launch.environment.items()]
    lines += [
        "# Slurm's signals reach the workers directly, and their ranks; this script waits for them.",
        "trap '' TERM",
        f"export {ENGINE_SIGNALS_RANKS}=1",
        " ".join(_srun(launch, options)) + " \\",
        "    " + shlex.join(launch.command),
        "code=$?",
    ]
    if options.output_dir:
        lines.append(f'if [ "$code" -eq 0 ]; then rm -f {output_path(launch.name, options)}; fi')
    return "\n".join([*lines, 'exit "$code"', ""])


def output_path(name: str, options: SlurmOptions) -> str:
    """On the first node of an attempt; empty: nothing is kept."""
    return f"{options.output_dir.rstrip('/')}/{name}.out" if options.output_dir else ""


def _directives(
    launch: EngineLaunch,
    options: SlurmOptions,
    gpus: GpuChoice,
    preferred: Sequence[str],
    max_minutes: int | None,
) -> Iterator[str]:
    needs, nodes = launch.needs, launch.node_count
    yield f"job-name={launch.name}"
    for name in ("partition", "account", "qos", "reservation"):
        if value := getattr(options, name):
            yield f"{name}={value}"
    yield f"nodes={nodes}"
    yield f"ntasks={nodes}"
    yield "ntasks-per-node=1"
    if needs.cpu_cores:
        yield f"cpus-per-task={needs.cpu_cores}"
    if needs.memory_mb:
        yield f"mem={needs.memory_mb}M"
    if needs.storage_mb:
        yield f"tmp={needs.storage_mb}M"
    if gpus.gres:
        yield f"gres={gpus.gres}"
    constraint = "&".join(_constraints(launch, options, gpus))
    if constraint:
        yield f"constraint={constraint}"
    if expressible := [name for name in preferred if _FEATURE.fullmatch(name)]:
        yield f"prefer={'&'.join([*([constraint] if constraint else []), *expressible])}"
    if options.exclusive:
        yield "exclusive"
    if limit := _time_limit(launch, options, max_minutes):
        yield f"time={limit}"
    # To the workers, not to this script.
    yield f"signal=TERM@{min(_MAX_SIGNAL_S, max(1, math.ceil(launch.grace_s)))}"
    if options.nice and (nice := options.nice * max(0, _HIGHEST_PRIORITY - needs.priority)):
        yield f"nice={nice}"
    yield "no-requeue"
    # If the answer to a submission was lost and it was sent again: never two at a time.
    yield "dependency=singleton"
    yield "chdir=/tmp"
    yield f"output={output_path(launch.name, options) or '/dev/null'}"
    # A list of names would have slurmd run a login shell for the rest.
    yield "export=ALL"
    yield "propagate=NONE"
    yield from (argument.removeprefix("--") for argument in options.extra_args)


def _constraints(launch: EngineLaunch, options: SlurmOptions, gpus: GpuChoice) -> Iterator[str]:
    given = options.constraint
    wanted = [*launch.needs.capabilities, *([gpus.feature] if gpus.feature else [])]
    if given:
        yield f"({given})" if "|" in given and wanted and given[0] not in "([" else given
    for name in wanted:
        if _FEATURE.fullmatch(name) is None:
            raise EngineRefusedError(f"the capability {name!r} cannot be a feature of a Slurm node; leave it out")
        yield name


def _time_limit(launch: EngineLaunch, options: SlurmOptions, max_minutes: int | None) -> str:
    """In minutes, rounded up, such that the worker's own timeout comes first, if the partition allows as much."""
    limit = options.time
    if launch.request.max_runtime_s is not None:
        seconds = launch.request.max_runtime_s + SETUP_S + launch.grace_s + _SIGNAL_RESOLUTION_S
        limit = str(math.ceil(seconds / 60))
    is_longer = limit and max_minutes is not None and (limit == UNLIMITED or minutes(limit) > max_minutes)
    return str(max_minutes) if is_longer else limit


def _srun(launch: EngineLaunch, options: SlurmOptions) -> Iterator[str]:
    """One worker on each node. srun waits for all of them: they end one by one, with code 0 whatever their job did. One
    that is killed takes the others with it, so that Slurm ends the job."""
    yield "srun --mpi=none --export=ALL --kill-on-bad-exit=1 --wait=0"
    yield f"--nodes={launch.node_count} --ntasks={launch.node_count} --ntasks-per-node=1"
    if launch.needs.cpu_cores:
        # From 22.05 on, srun does not take this from the job.
        yield f"--cpus-per-task={launch.needs.cpu_cores}"
    if image := launch.request.launch.image or options.image:
        if not options.container:
            raise EngineRefusedError("the cluster's option container, which says how images run, is no longer there")
        yield shlex.join(word.replace(IMAGE, image) for word in shlex.split(options.container))


def _variable(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None:
        raise ValueError(f"{name!r} is no name of a variable")
    return name


def comment_of(launch: EngineLaunch) -> str:
    """Tells administrators whose job it is, and this client which attempt."""
    needs = launch.needs
    text = "".join(each if each.isprintable() and each not in "|\"'\\" else " " for each in needs.job_name)
    return f"{COMMENT} {launch.instance} {launch.request.attempt_id} {needs.account} {text}"[:_COMMENT_CHARACTERS]


def sbatch_arguments(launch: EngineLaunch) -> tuple[str, ...]:
    return ("--parsable", f"--comment={comment_of(launch)}")


def sbatch_environment(
    launch: EngineLaunch, environment: Mapping[str, str], user: pwd.struct_passwd | None = None
) -> dict[str, str]:
    """Everything that sbatch runs with, since it exports all of that: the script names the secrets, and has none."""
    kept = {name: environment[name] for name in (*INHERITED, *_OF_SLURM) if name in environment}
    if user is not None:
        kept |= {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    return {**kept, **{_variable(name): value for name, value in launch.secrets.items()}}


def rest_environment(launch: EngineLaunch, options: SlurmOptions) -> dict[str, str]:
    """Everything that a job begins with that slurmrestd submits."""
    path = f"{options.bin_dir}:{_NODE_PATH}" if options.bin_dir else _NODE_PATH
    return {"PATH": path, **{_variable(name): value for name, value in launch.secrets.items()}}
