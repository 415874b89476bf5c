"""What `mlPolicy` of a runtime means: how many processes there are, and which variables tell them of each other.

The variables have the names that Kubeflow's plugins give them; their values name those of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainmaster.protocol.function_runner import MPI_LAUNCHER

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
