"""What to do about the errors that Slurm prints or answers."""

from __future__ import annotations

CONFIGURATION_MISSING = (
    "Slurm's configuration was not found: name slurm.conf with the option conf, or set SLURM_CONF for the server"
)
CONTROLLER_AWAY = (
    "Slurm's controller does not answer: see that slurmctld runs and is reached from here (`scontrol ping`)"
)
TOO_MANY = "Slurm accepts no more jobs of this user at the moment"
PROBLEMS = (
    (
        ("configuration source", "cannot stat file", "unable to process configuration", "clustername needs to be"),
        CONFIGURATION_MISSING,
    ),
    (
        ("munge", "auth_g_pack", "authentication credential", "authentication error"),
        "Slurm cannot prove who the server is: start munged on this machine, with the cluster's munge.key",
    ),
    (
        (
            "unable to contact slurm controller", "connection refused", "socket timed out", "zero bytes were",
            "connection timed out", "no route to host", "connection reset", "unexpected message received",
            "standby mode", "communication connection failure", "slurm_receive_msg", "unable to resolve",
            "persistent connection", "transport endpoint", "slurm database",
        ),
        CONTROLLER_AWAY,
    ),
    (
        (
            "temporarily unable to accept", "resource temporarily unavailable", "job submit limit",
            "maxsubmitjob", "submitjobsperaccount", "too many jobs", "job/step already completing",
        ),
        TOO_MANY,
    ),
)  # fmt: skip
"""What Slurm says -> what that means. All of these may pass."""

_REMEDIES = (
    ("invalid partition", "change the option partition; `sinfo -s` lists those that there are"),
    ("invalid account", "change the option account; `sacctmgr show associations user=$USER` lists those of the server"),
    ("invalid qos", "change the option qos; `sacctmgr show qos` lists those that there are"),
    ("reservation", "change the option reservation; `scontrol show reservation` lists those that there are"),
    ("invalid feature", "a node has to have every capability of the job and the option constraint as a feature"),
    ("invalid generic resource", "the option gres names GPUs as Slurm does; `sinfo -o %G` shows how"),
    ("gres", "the option gres names GPUs as Slurm does; `sinfo -o %G` shows how"),
    ("temporary disk", "ask for less storage, or have the nodes declare their TmpDisk in slurm.conf"),
    ("memory", "ask for less memory: no node of the partition has as much"),
    ("node configuration", "ask for fewer GPUs, cores or less memory per node: no node of the partition has as many"),
    ("node count", "ask for fewer nodes, or choose another partition"),
    ("more processors", "ask for fewer cores or nodes: the partition does not have as many"),
    ("time limit", "lower max_runtime_seconds, or the option time, to the limit of the partition"),
    ("dependency", "report this: no job has a dependency but on itself"),
    ("access/permission", "let the server's user use this partition and account"),
    ("not permitted", "let the server's user use this partition and account"),
    ("user id", "the server's user must exist on the cluster"),
    ("unrecognized option", "an option of extra_args does not exist in this version of Slurm"),
    ("invalid option", "an option of extra_args does not exist in this version of Slurm"),
    ("accounting/qos policy", "ask for less, or have the limits of the account raised"),
)
"""What sbatch prints, in the order in which it is looked for -> what to do."""


def explained(words: str) -> str:
    """sbatch's error with what to do about it.

    >>> explained("Batch job submission failed: Invalid partition name specified")
    'Batch job submission failed: Invalid partition name specified. To do: change the option partition; `sinfo -s` lists those that there are'
    """  # noqa: E501
    lower = words.lower()
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in lower), "")
    return f"{words}. To do: {remedy}" if remedy else words


def passing_problem(words: str) -> str:
    """What an error means that may pass by itself, or once an administrator mends the cluster; empty: it will not."""
    lower = words.lower()
    return next((meaning for signs, meaning in PROBLEMS if any(sign in lower for sign in signs)), "")
