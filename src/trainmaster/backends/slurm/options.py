"""What an operator says of a Slurm cluster."""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from trainmaster.backends.cluster.engine import ClusterOptions

_WORD = r"^[A-Za-z0-9_.,:@%+-]*$"
_FEATURES = r"^[A-Za-z0-9_.:,&|*()\[\]-]*$"
_PATH = r"^(/[^\s\"'\\#]*)?$"
_TIME = r"^(\d+|\d+:\d\d(:\d\d)?|\d+-\d\d?(:\d\d){0,2}|UNLIMITED)?$"
_EXTRA = re.compile(r"--([a-z][a-z-]*)(=[^\s\"'\\#]*)?")

RESERVED = frozenset({
    "account", "array", "batch", "chdir", "clusters", "cluster-constraint", "comment", "constraint", "cpus-per-gpu",
    "cpus-per-task", "dependency", "error", "exclusive", "export", "export-file", "get-user-env", "gid", "gpus",
    "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "help", "hold", "ignore-pbs", "input", "job-name",
    "kill-on-invalid-dep", "mem", "mem-per-cpu", "mem-per-gpu", "nice", "no-kill", "no-requeue", "nodes", "ntasks",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "open-mode", "output",
    "oversubscribe", "parsable", "partition", "prefer", "propagate", "qos", "quiet", "requeue", "reservation",
    "signal", "test-only", "time", "time-min", "tmp", "uid", "usage", "version", "wait", "wrap",
})  # fmt: skip
"""Options of sbatch that Trainmaster sets itself, or that would break how it starts and finds jobs."""
REST_EXTRA = ("licenses", "mail-type", "mail-user", "wckey")
"""Options of sbatch in extra_args that slurmrestd can be asked for too."""
IMAGE = "{image}"
UNLIMITED = "UNLIMITED"
"""A time limit."""


def minutes(value: str) -> int:
    """A time limit as sbatch takes it.

    >>> [minutes(each) for each in ("90", "90:30", "1:30:00", "2-12", "2-12:00:01")]
    [90, 91, 90, 3600, 3601]
    """
    return -(-seconds(value) // 60)


def seconds(value: str) -> int:
    """A duration as sbatch takes it and squeue shows it."""
    days, dash, rest = value.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minute, second = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minute, second = parts
    else:
        hours, minute, second = 0, parts[0], parts[1] if len(parts) > 1 else 0
    return ((int(days or 0) * 24 + hours) * 60 + minute) * 60 + second


def _words(value: Any) -> Any:
    return tuple(shlex.split(value)) if isinstance(value, str) else value


class SlurmOptions(ClusterOptions):
    partition: str = Field(
        default="", pattern=_WORD, description="The partition of the jobs. Empty: Slurm's default partition."
    )
    account: str = Field(default="", pattern=_WORD, description="The account that Slurm charges. Empty: the user's.")
    qos: str = Field(default="", pattern=_WORD, description="The quality of service. Empty: the account's.")
    constraint: str = Field(
        default="",
        pattern=_FEATURES,
        description="Features that every node must have, as --constraint takes them, such as `ib&(h100|h200)`.",
    )
    reservation: str = Field(default="", pattern=_WORD, description="The reservation that the jobs run in.")
    time: str = Field(
        default="",
        pattern=_TIME,
        description="Slurm's time limit for jobs without max_runtime_seconds, such as `2-00:00:00`. Empty: that of the "
        "partition. Never more than the partition allows.",
    )
    nice: int = Field(
        default=10,
        ge=0,
        le=100_000,
        description="Added to the nice value of a job for each step of its priority below 10: Slurm starts jobs of a "
        "higher priority first. 0: Slurm is not told of priorities.",
    )
    exclusive: bool = Field(default=False, description="Whether jobs get whole nodes, shared with nobody.")
    account_users: bool = Field(
        default=False,
        description="Whether the jobs of an account that has a uid are submitted as that user, whom the cluster must "
        "know too. The server must run as root, and Slurm must let root see and cancel the jobs of all users.",
    )
    gres: str = Field(default="gpu", pattern=r"^[A-Za-z0-9_-]+$", description="What Slurm calls GPUs in Gres.")
    gpu_memory_mb: int = Field(
        default=0,
        ge=0,
        description="The memory of a GPU whose type does not tell it. 0: unknown; counts as too little.",
    )
    container: str = Field(
        default="",
        description="How srun starts the worker of a job with an image: its options for that, or a command that runs "
        "another one in the image, which `{image}` stands for; such as `--container-image={image}` with Pyxis, or "
        "`apptainer exec --nv docker://{image}`. The container must have the environment and the network of its node. "
        "Empty: jobs with images are refused.",
    )
    image: str = Field(
        default="",
        pattern=r"^\S*$",
        description="The image of jobs that name none. Empty: they run on the nodes themselves.",
    )
    output_dir: str = Field(
        default="/tmp",
        pattern=_PATH,
        description="A directory of the nodes for what a worker prints that fails to start. Empty: nothing is kept.",
    )
    conf: str = Field(
        default="",
        pattern=_PATH,
        description="The path of slurm.conf on the server. Empty: SLURM_CONF of its environment, or Slurm's default.",
    )
    bin_dir: str = Field(
        default="",
        pattern=_PATH,
        description="The directory of sbatch and the other programs, here and on the nodes. Empty: PATH.",
    )
    rest_url: str = Field(
        default="",
        pattern=r"^(https?://[^\s/]+(/\S*)?)?$",
        description="Where slurmrestd answers, such as `http://slurm:6820`. The server then needs none of Slurm's "
        "programs, and no munge. Empty: it uses the programs.",
    )
    rest_user: str = Field(
        default="", pattern=_WORD, description="With rest_url: the user of the token, as whom jobs are submitted."
    )
    token: SecretStr = Field(
        default=SecretStr(""), description="With rest_url: the JSON Web Token, as `scontrol token` prints it."
    )
    extra_args: Annotated[tuple[str, ...], BeforeValidator(_words)] = Field(
        default=(),
        description="Further options of sbatch, each as --name or --name=value, separated by spaces, such as "
        "`--mail-type=END --licenses=solver:1`.",
    )

    @property
    def submits_as_users(self) -> bool:
        return self.account_users

    @property
    def runs_images(self) -> bool:
        return bool(self.container)

    @property
    def own_image(self) -> str:
        return self.image

    @property
    def job_nodes_apart(self) -> bool:
        return True

    @field_validator("container")
    @classmethod
    def _check_container(cls, given: str) -> str:
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise ValueError(f"{given!r} cannot be split into words: {error}") from None
        if words and not any(IMAGE in word for word in words):
            raise ValueError(f"it has to say where the image goes: {IMAGE}")
        return given

    @model_validator(mode="after")
    def _check_image(self) -> Self:
        if self.image and not self.container:
            raise ValueError("image: the option container has to say how images run")
        return self

    @model_validator(mode="after")
    def _check_rest(self) -> Self:
        used = {"rest_user": self.rest_user, "token": self.token.get_secret_value()}
        if not self.rest_url:
            if given := [name for name, value in used.items() if value]:
                raise ValueError(f"{' and '.join(given)}: these belong to the option rest_url, which is missing")
            return self
        if missing := [name for name, value in {**used, "partition": self.partition}.items() if not value]:
            raise ValueError(f"{' and '.join(missing)}: with rest_url, these have to be given")
        if self.account_users:
            raise ValueError(
                "account_users: slurmrestd submits all jobs as rest_user; leave out one of the two options"
            )
        if self.conf:
            raise ValueError("conf: it is for Slurm's programs, which are not used with rest_url; leave it out")
        for argument in self.extra_args:
            if (name := argument.removeprefix("--").partition("=")[0]) not in REST_EXTRA:
                names = ", ".join(f"--{each}" for each in REST_EXTRA)
                raise ValueError(f"extra_args: slurmrestd cannot be asked for --{name}; it can for {names}")
        return self

    @field_validator("extra_args")
    @classmethod
    def _check_extra(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for argument in given:
            if (found := _EXTRA.fullmatch(argument)) is None:
                raise ValueError(f"{argument!r} is not --name or --name=value, without spaces and quotes")
            if found[1] in RESERVED:
                raise ValueError(f"--{found[1]} is set by Trainmaster, or by another option of the cluster")
        return given
