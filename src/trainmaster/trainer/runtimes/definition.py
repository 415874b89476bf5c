"""A training runtime with all its fields, and the variables of its mlPolicy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trainmaster.protocol.function_runner import MPI_LAUNCHER
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


TORCH, MPI, JAX, XGBOOST = "torch", "mpi", "jax", "xgboost"
POLICIES = (MPI, TORCH, JAX, XGBOOST)
"""The first of them that a file has counts."""
UNKNOWN_POLICIES = ("flux",)
"""Policies of Kubeflow's that nothing here can carry out."""
OPEN_MPI = "OpenMPI"

_VARIABLES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        JAX: {
            "JAX_COORDINATOR_ADDRESS": "$(MASTER_ADDR):$(MASTER_PORT)",
            "JAX_NUM_PROCESSES": "$(WORLD_SIZE)",
            "JAX_PROCESS_ID": "$(RANK)",
        },
        XGBOOST: {
            "DMLC_TRACKER_URI": "$(MASTER_ADDR)",
            "DMLC_TRACKER_PORT": "$(MASTER_PORT)",
            "DMLC_TASK_ID": "$(RANK)",
            "DMLC_NUM_WORKER": "$(WORLD_SIZE)",
        },
        MPI: {
            # Open MPI would tie each process to a core: those of several jobs to the same ones.
            MPI_LAUNCHER: "mpirun --oversubscribe --bind-to none -n $(WORLD_SIZE)",
            # Containers often have no user but root, whom Open MPI asks twice.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    }
)
_WITHOUT_MPI = frozenset({"deepspeed"})
"""Frameworks whose files ask for MPI, and which need none where RANK and MASTER_ADDR are set."""


def variables_of(policy: str | None, framework: str) -> Mapping[str, str]:
    """The variables of each process."""
    if policy is None or (policy == MPI and framework in _WITHOUT_MPI):
        return {}
    return _VARIABLES.get(policy, {})


def torchrun_variables(ranks_per_node: int) -> dict[str, str]:
    """What `torchrun` reads, for images that start it themselves: one process of the job on each node."""
    return {
        "PET_NNODES": "$(WORLD_SIZE)",
        "PET_NPROC_PER_NODE": str(ranks_per_node),
        "PET_NODE_RANK": "$(NODE_RANK)",
        "PET_MASTER_ADDR": "$(MASTER_ADDR)",
        "PET_MASTER_PORT": "$(MASTER_PORT)",
    }
