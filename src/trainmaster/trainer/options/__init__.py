"""Options of `train()`: each changes one thing of the job that is submitted.

An option is called with the job document, the trainer and the kind of backend, and changes the document in place; so
is any function of yours that is given for one. The kind of backend is None where the server chooses it; what it cannot
do, it then refuses itself.
"""

from __future__ import annotations

from trainmaster.trainer.options.common import (
    ActiveDeadlineSeconds,
    AllowWaitingForNodes,
    Annotations,
    Labels,
    Limits,
    MaxRetries,
    Name,
    Option,
    Preemptible,
    Priority,
    Queue,
    TrainerArgs,
    TrainerCommand,
    Volume,
    Volumes,
)
from trainmaster.trainer.options.kubernetes import (
    ContainerPatch,
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    PodSpecPatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    RuntimePatch,
    TrainingRuntimeSpecPatch,
)

__all__ = [
    "ActiveDeadlineSeconds",
    "AllowWaitingForNodes",
    "Annotations",
    "ContainerPatch",
    "JobSetSpecPatch",
    "JobSetTemplatePatch",
    "JobSpecPatch",
    "JobTemplatePatch",
    "Labels",
    "Limits",
    "MaxRetries",
    "Name",
    "Option",
    "PodSpecPatch",
    "PodTemplatePatch",
    "Preemptible",
    "Priority",
    "Queue",
    "ReplicatedJobPatch",
    "RuntimePatch",
    "TrainerArgs",
    "TrainerCommand",
    "TrainingRuntimeSpecPatch",
    "Volume",
    "Volumes",
]
