"""What to do about the errors with which sbatch refuses a job."""

from __future__ import annotations

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
