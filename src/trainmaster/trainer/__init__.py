"""Kubeflow's Trainer SDK, by its own names, on a Trainmaster server.

`from trainmaster.trainer import TrainerClient, CustomTrainer` in place of `from kubeflow.trainer import ...`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from trainmaster.trainer.constants import DATASET_PATH as DATASET_PATH
from trainmaster.trainer.constants import MODEL_PATH as MODEL_PATH
from trainmaster.trainer.types import *  # noqa: F403
from trainmaster.trainer.types import __all__ as _types

if TYPE_CHECKING:
    from trainmaster.trainer.client import TrainerClient as TrainerClient
    from trainmaster.trainer.errors import NameRefusedError as NameRefusedError
    from trainmaster.trainer.errors import NotFoundError as NotFoundError
    from trainmaster.trainer.resources import get_tpu_num_nodes as get_tpu_num_nodes
    from trainmaster.trainer.server_choice import ContainerBackendConfig as ContainerBackendConfig
    from trainmaster.trainer.server_choice import KubernetesBackendConfig as KubernetesBackendConfig
    from trainmaster.trainer.server_choice import LocalProcessBackendConfig as LocalProcessBackendConfig
    from trainmaster.trainer.server_choice import ServerBackendConfig as ServerBackendConfig
    from trainmaster.trainer.server_choice import TrainingRuntimeSource as TrainingRuntimeSource
    from trainmaster.trainer.status import update_trainjob_status as update_trainjob_status

_ON_USE = {
    **dict.fromkeys(("ContainerBackendConfig", "KubernetesBackendConfig"), "server_choice"),
    **dict.fromkeys(("LocalProcessBackendConfig", "ServerBackendConfig", "TrainingRuntimeSource"), "server_choice"),
    **dict.fromkeys(("NameRefusedError", "NotFoundError"), "errors"),
    "TrainerClient": "client",
    "get_tpu_num_nodes": "resources",
    "update_trainjob_status": "status",
}
"""Name -> its module, imported on first use: training code calls `update_trainjob_status`, and should not wait for an
HTTP library."""
if not TYPE_CHECKING:  # type checkers cannot read a list that is computed
    __all__ = ["DATASET_PATH", "MODEL_PATH", *_types, *_ON_USE]


def __getattr__(name: str) -> object:
    if name in _ON_USE:
        return getattr(import_module(f"{__name__}.{_ON_USE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_USE})
