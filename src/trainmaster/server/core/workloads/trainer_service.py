"""The `trainer_service` workload: a base model that is held in memory and trained on request, over HTTP. Each rank runs
a front and an engine (`trainmaster.trainer_service`) in one step; what they are to do is in `service.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from trainmaster.protocol.launch import Launch, LaunchStep, Lifetime, Readiness
from trainmaster.protocol.trainer_requests import PRECISIONS, SERVICE_FILE, ModelMode
from trainmaster.server.core.errors import Problem, RefusedError, SpecError, choice_message
from trainmaster.server.core.fields import (
    AbsolutePath,
    Arguments,
    Count,
    Flag,
    Name,
    Names,
    Positive,
    Share,
    Text,
    optional,
)
from trainmaster.server.core.workloads.base import MAX_GRACE_S, JobConfigs
from trainmaster.server.core.workloads.programs import Serving


def _precision(text: str) -> str:
    if text not in PRECISIONS:
        raise ValueError(f"must be one of {', '.join(PRECISIONS)}")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:10]) <= 1_000_000 or len(text) > 7:
        raise ValueError("must be a whole number from 1 to 1000000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 31_536_000:
        raise ValueError("must be a number of seconds, more than 0 and at most a year")
    return found


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < 1:
        raise ValueError("must be a number above 0 and below 1")
    return found


OPTIONS: Mapping[str, Callable[[str], Any] | None] = {
    "--forward-only": None,
    "--precision": _precision,
    "--max-adapters": _count,
    "--keep-results-s": _seconds,
    "--gradient-accumulation-steps": _count,
    "--sampling-share": _share,
    "--tempered-logprobs": None,
}
"""Every argument that there is, and what reads its value (ValueError with what it must be); None: it has no value."""


def read_arguments(arguments: Sequence[str]) -> tuple[dict[str, Any], dict[int, str]]:
    """The values of `--name value` or `--name=value` by name in `service.json`; and what is wrong, by position."""
    seen: set[str] = set()
    values: dict[str, Any] = {}
    wrong: dict[int, str] = {}
    left = iter(enumerate(arguments))
    for at, argument in left:
        flag, equals, value = argument.partition("=")
        if flag not in OPTIONS:
            wrong[at] = choice_message("argument", flag, OPTIONS)
            continue
        read = OPTIONS[flag]
        if read is not None and not equals and (following := next(left, None)) is not None:
            value, equals = following[1], "="
        if flag in seen:
            wrong[at] = f"{flag} is there twice"
        elif read is None and equals:
            wrong[at] = f"{flag} takes no value"
        elif read is not None and not equals:
            wrong[at] = f"{flag} needs a value"
        else:
            try:
                values[flag.removeprefix("--").replace("-", "_")] = True if read is None else read(value)
            except ValueError as error:
                wrong[at] = f"{flag} {error}"
        seen.add(flag)
    return values, wrong


KIND = "trainer_service"
SERVE = LaunchStep(name="main", argv=("-P", "-m", "trainmaster.trainer_service"), python=True)
"""A module of ours, whatever lies in the working directory."""
HEALTH = "/api/v1/healthz"
READY_WITHIN_S = 3600.0
"""A large model is read from a slow disk."""
SAVE_ALL_WITHIN_S = 300.0
"""Dozens of models may be loaded. One that has saved them ends at once, so that the rest of the time is not waited."""
MAX_LORA_RANK = 1024


class TrainerServiceSpec(Serving):
    """A base model behind the Tinker protocol; `fireworks-ai` and `tinker` are its clients."""

    kind: Literal["trainer_service"]
    base_model: Text = Field(description="The name that clients use, such as one of the server's model aliases.")
    model_path: AbsolutePath | None = optional(
        "A directory on the server with a transformers checkpoint; null: the directory that the "
        "server has for base_model."
    )
    aliases: Names = Field(default=(), description="Other names that clients may use for the base model.")
    lora_rank: Annotated[int, Strict(), Field(ge=0, le=MAX_LORA_RANK)] = Field(
        default=0, description="The rank of adapters, and the maximum that clients may request; 0: full weights."
    )
    max_context_length: Count | None = optional("The longest sequence in tokens; null: the model's own limit.")
    learning_rate: Positive | None = optional("For an optim_step that sets none.")
    gradient_accumulation_steps: Count = Field(default=1, description="Number of optim_step calls that make one step.")
    forward_only: Flag = Field(default=False, description="Only forward passes: a frozen reference model.")
    sampling_share: Share = Field(
        default=0.5, description="Share of the time that samples get when training and samples both wait."
    )
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = Field(
        default="auto",
        description="Precision of the base model; auto: bfloat16 on a GPU, float32 on the CPU; fp8: the weights of "
        "linear layers have 8 bits, and the rest is as with auto.",
    )
    extra_args: Arguments = Field(default=(), description="Arguments of the trainer process; unknown ones are refused.")
    training_shape: Text | None = optional("The training shape that set the other fields.")
    accelerator_type: Name | None = optional("As the client named it; resource_config has the matching GPU type.")
    grace_period_s: Annotated[float, Strict(), Field(ge=0, le=MAX_GRACE_S)] | None = Field(
        default=SAVE_ALL_WITHIN_S,
        description="Seconds from the request to stop until the kill; all models are saved in this time, one by one.",
    )

    @property
    def options(self) -> Mapping[str, Any]:
        """The valid ones of `extra_args`, by their names in `service.json`."""
        return read_arguments(self.extra_args)[0]

    @property
    def mode(self) -> ModelMode:
        if self.forward_only or self.options.get("forward_only"):
            return ModelMode.FORWARD_ONLY
        return ModelMode.LORA if self.lora_rank else ModelMode.FULL

    def check(self, job: JobConfigs) -> None:
        """The arguments are known, and one process runs on each GPU."""
        problems = [
            Problem(field=f"workload.extra_args[{index}]", message=message)
            for index, message in read_arguments(self.extra_args)[1].items()
        ]
        if problems:
            raise RefusedError.because(problems)
        if self.mode is ModelMode.FULL and self.options.get("precision", self.precision) == "fp8":
            message = (
                "fp8 is for a frozen base model, and lora_rank 0 trains its weights; set lora_rank, or use bfloat16"
            )
            raise SpecError([Problem(field="workload.precision", message=message)])
        gpus = job.resource_config.gpus_per_node
        if gpus and self.ranks_per_node not in (1, gpus):
            message = f"follows from the GPUs of a node, which are {gpus}; leave it out"
            raise SpecError([Problem(field="workload.ranks_per_node", message=message)])

    def compile(self, job: JobConfigs) -> Launch:
        ranks = job.resource_config.gpus_per_node or self.ranks_per_node
        running = self.model_copy(update={"ranks_per_node": ranks, "can_save": self.can_save is not False})
        return running.launch(
            job,
            SERVE,
            lifetime=Lifetime.SERVICE,
            port_environment="PORT",
            readiness=Readiness(path=HEALTH, timeout_s=READY_WITHIN_S, first_node_only=True),
            inputs={SERVICE_FILE: json.dumps(self._document(), indent=1)},
        )

    def _document(self) -> dict[str, Any]:
        """The content of `service.json`, which `trainmaster.trainer_service.configuration` reads."""
        told = {"base_model", "aliases", "lora_rank", "max_context_length", "learning_rate", "precision"}
        return {
            **self.model_dump(mode="json", include=told | {"gradient_accumulation_steps", "sampling_share"}),
            "model_path": self.model_path or "",
            "mode": self.mode,
            **{name: value for name, value in self.options.items() if name != "forward_only"},
        }
