"""What a training runtime says, whole; `Runtime` is what of it the user sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.trainer.types import Runtime, RuntimeKind, RuntimeTrainer, TrainerType

_DEVICES = ("gpu", "mig-", "google.com/tpu", "huawei.com/Ascend910", "cpu")
"""Resources by which a node's device is called, the first that it has."""
_DEVICE_NAMES = {"google.com/tpu": "tpu", "huawei.com/Ascend910": "npu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRuntime:
    """A runtime, with all that a job takes from it."""

    name: str
    kind: RuntimeKind
    framework: str
    trainer_type: TrainerType
    training_type: str | None = None
    """Of a built-in trainer: what it trains, such as LORA; None where the trainer's configuration says so."""
    image: str | None = None
    """None: the Python of the workers, on a backend without images; elsewhere the trainer has to name one."""
    num_nodes: int = 1
    ranks_per_node: int | None = None
    """None: one for each GPU of a node, or one."""
    policy: str | None = None
    """How the processes find each other: a name of `policies.POLICIES`; None: by RANK and MASTER_ADDR alone."""
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Values may name variables of a rank as `$(RANK)`; the worker puts theirs in."""
    resources: Mapping[str, str | int | float] = field(default_factory=dict)
    """Of each node, in the names of `resources_per_node`; amounts as they were written."""
    packages: tuple[str, ...] = ()
    pretrained_model: str | None = None
    dataset: str | None = None
    job_name_variables: tuple[str, ...] = ()
    """Variables that hold the job's name."""
    left_out: tuple[str, ...] = ()
    """Variables whose values only a cluster knows; they are not set."""
    origin: str = ""
    """Which document it was."""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """As it was written."""


def runtime_of(definition: TrainingRuntime) -> Runtime:
    """A runtime as the user sees it."""
    device, count = _device(definition)
    trainer = RuntimeTrainer(
        trainer_type=definition.trainer_type,
        framework=definition.framework,
        image=definition.image or "",
        num_nodes=definition.num_nodes,
        **({"device": device, "device_count": count} if device else {}),
    )
    trainer.set_command(definition.command)
    return Runtime(
        name=definition.name,
        trainer=trainer,
        kind=definition.kind,
        pretrained_model=definition.pretrained_model,
    )


def _device(definition: TrainingRuntime) -> tuple[str, str]:
    """What a node computes with, and how many of these all nodes have; empty where the file does not say."""
    for wanted in _DEVICES:
        for name, amount in definition.resources.items():
            if name == wanted or (wanted.endswith("-") and name.startswith(wanted)):
                text = str(amount).removesuffix(".0")
                count = str(int(text) * definition.num_nodes) if text.isdigit() else text
                return _DEVICE_NAMES.get(name, name), count
    return "", ""
