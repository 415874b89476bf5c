"""What an operator says of a Kubernetes cluster."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, SecretStr, field_validator, model_validator

from trainmaster.backends.cluster.engine import ClusterOptions
from trainmaster.backends.kubernetes.overlays import check_overlay
from trainmaster.plain_yaml import YamlError, parse_yaml
from trainmaster.protocol.launch import PullPolicy
from trainmaster.server.core.resources import quantity

_NAME = r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"
_NAME_OR_EMPTY = rf"({_NAME})|^$"
_KEY = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
_KEY_OR_EMPTY = rf"({_KEY})|^$"
_HIGHEST_PRIORITY = 10
ASSUMED = ("count", "cpu", "memory", "storage", "gpus", "gpu_type")
"""What may be said of nodes that the server is not allowed to list."""


def _pairs(value: Any) -> Any:
    """`--set` gives text: `pool=gpu,zone=a`."""
    if not isinstance(value, str):
        return value
    pairs = (part.partition("=") for part in value.split(",") if part.strip())
    return {name.strip(): amount.strip() for name, _, amount in pairs}


def _words(value: Any) -> Any:
    return tuple(word.strip() for word in value.split(",") if word.strip()) if isinstance(value, str) else value


def _document(value: Any) -> Any:
    """YAML text, or what a settings file has already made of it."""
    if not isinstance(value, str):
        return value
    try:
        return parse_yaml(value, "it") if value.strip() else {}
    except YamlError as error:
        raise ValueError(str(error)) from None


class KubernetesOptions(ClusterOptions):
    kubeconfig: str = Field(
        default="",
        description="The path of a kubeconfig file on the server. Empty: what is mounted into the server's own pod, "
        "else the files of KUBECONFIG, else ~/.kube/config.",
    )
    kubeconfig_content: SecretStr = Field(
        default=SecretStr(""), description="The text of a kubeconfig, in place of a file on the server."
    )
    context: str = Field(default="", description="The context of the kubeconfig. Empty: its current one.")
    token: SecretStr = Field(
        default=SecretStr(""), description="A bearer token, in place of the credentials of the kubeconfig."
    )
    namespace: str = Field(
        default="", pattern=_NAME_OR_EMPTY, description="The namespace of the jobs. Empty: that of the context."
    )
    image: str = Field(
        default="",
        pattern=r"^\S*$",
        description="The image of jobs that name none; it has a shell and Python 3.11 or newer. Commands in "
        "other images need neither there: an init container brings the Python of this one. Empty: jobs without an "
        "image are refused.",
    )
    image_pull_policy: PullPolicy = Field(
        default=PullPolicy.IF_NOT_PRESENT, description="When nodes pull images, unless a job says otherwise."
    )
    image_pull_secrets: Annotated[tuple[Annotated[str, Field(pattern=_NAME)], ...], BeforeValidator(_words)] = Field(
        default=(), description="The names of Secrets with credentials for registries, separated by commas."
    )
    service_account: str = Field(
        default="",
        pattern=_NAME_OR_EMPTY,
        description="The service account of the pods, whose token is mounted. Empty: the namespace's default account, "
        "and no token.",
    )
    priority_classes: Annotated[
        dict[Annotated[int, Field(ge=0, le=_HIGHEST_PRIORITY)], Annotated[str, Field(pattern=_NAME)]],
        BeforeValidator(_pairs),
    ] = Field(
        default={},
        description="The PriorityClass of jobs from a priority on, such as `0=low,5=normal,8=high`. Empty: Kubernetes "
        "is not told of priorities.",
    )
    node_selector: Annotated[dict[Annotated[str, Field(pattern=_KEY)], str], BeforeValidator(_pairs)] = Field(
        default={}, description="Labels that every node must have, such as `pool=training`."
    )
    tolerations: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_document)] = Field(
        default=(),
        description="Taints that do not keep the jobs away, as in a pod: a YAML list, such as "
        "`[{key: nvidia.com/gpu, operator: Exists}]`.",
    )
    node_lost_after_s: int = Field(
        default=120, ge=0, description="How long a node may be unreachable until Kubernetes takes its pods away."
    )
    gpu_resource: str = Field(
        default="nvidia.com/gpu",
        pattern=_KEY,
        description="The resource that counts GPUs; for MIG slices their own, such as `nvidia.com/mig-3g.20gb`.",
    )
    gpu_type_label: str = Field(
        default="nvidia.com/gpu.product",
        pattern=_KEY_OR_EMPTY,
        description="The label of nodes with the type of their GPUs.",
    )
    gpu_memory_label: str = Field(
        default="nvidia.com/gpu.memory",
        pattern=_KEY_OR_EMPTY,
        description="The label of nodes with the memory of each of their GPUs, in MiB.",
    )
    gpu_memory_mb: int = Field(
        default=0,
        ge=0,
        description="The memory of a GPU whose node does not tell it. 0: unknown; counts as too little.",
    )
    shm_mb: int = Field(
        default=0,
        ge=0,
        description="The size of /dev/shm for jobs that do not say. 0: as much memory as the job has, or the node.",
    )
    kueue_queue: str = Field(
        default="",
        pattern=_NAME_OR_EMPTY,
        description="The LocalQueue of Kueue that the jobs are submitted to. Empty: Kueue does not see them.",
    )
    keep_train_jobs_s: int = Field(
        default=120,
        ge=0,
        le=86_400,
        description="How long an ended TrainJob stays in the cluster, for clients of Kubeflow.",
    )
    pod_template: Annotated[dict[str, Any], BeforeValidator(_document)] = Field(
        default={},
        description="What is merged into the template of every pod, as `kubectl patch` does: YAML with `metadata` and "
        "`spec`. The container of the job is called `worker`.",
    )
    assumed_node: Annotated[dict[str, str], BeforeValidator(_pairs)] = Field(
        default={"count": "64", "cpu": "256", "memory": "2Ti", "storage": "8Ti", "gpus": "8"},
        description="If the server may not list nodes, what it takes them to be like: count, cpu, memory, storage, "
        "gpus and gpu_type, such as `count=4,cpu=64,memory=512Gi,gpus=8,gpu_type=H100-80GB`.",
    )

    @field_validator("pod_template")
    @classmethod
    def _check_overlay(cls, given: dict[str, Any]) -> dict[str, Any]:
        check_overlay(given)
        return given

    @field_validator("assumed_node")
    @classmethod
    def _check_assumed(cls, given: dict[str, str]) -> dict[str, str]:
        for name, amount in given.items():
            if name not in ASSUMED:
                raise ValueError(f"{name!r} is none of {', '.join(ASSUMED)}")
            if name != "gpu_type":
                quantity(amount)
        return given

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.kubeconfig and self.kubeconfig_content.get_secret_value():
            raise ValueError("kubeconfig and kubeconfig_content exclude each other")
        return self

    @property
    def own_image(self) -> str:
        return self.image

    def priority_class(self, priority: int) -> str:
        """That of the highest priority which does not exceed the job's."""
        reached = [least for least in self.priority_classes if least <= priority]
        return self.priority_classes[max(reached)] if reached else ""
