"""A training runtime, read from a document in the shape of Kubeflow's TrainingRuntime.

Fields that are not known here are passed over: the files are Kubeflow's. What is ours is an annotation below
`trainmaster.io/`, and never needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from trainmaster.protocol.function_runner import MPI_LAUNCHER
from trainmaster.trainer.constants import (
    DATASET_INITIALIZER,
    GPU_LABEL,
    GPU_MIG_PREFIX,
    JOB_INDEX_LABEL,
    JOBSET_NAME_LABEL,
    MODEL_INITIALIZER,
    NODE,
    RUNTIME_FRAMEWORK_LABEL,
    TORCH_TUNE,
    TRAINJOB_ANCESTOR_LABEL,
)
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
    left_out: tuple[str, ...] = ()
    """Variables whose values only a cluster knows; without one they are not set."""
    in_cluster: bool = False
    """Whether it is a runtime of the cluster that jobs run on, of which a job there can be a TrainJob."""
    origin: str = ""
    document: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def runtime_of(definition: TrainingRuntime) -> Runtime:
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
    return {} if policy is None or (policy == MPI and framework in _WITHOUT_MPI) else _VARIABLES.get(policy, {})


def torchrun_variables(ranks_per_node: int) -> dict[str, str]:
    """What `torchrun` reads, for images that start it themselves: one process of the job on each node."""
    return {
        "PET_NNODES": "$(WORLD_SIZE)",
        "PET_NPROC_PER_NODE": str(ranks_per_node),
        "PET_NODE_RANK": "$(NODE_RANK)",
        "PET_MASTER_ADDR": "$(MASTER_ADDR)",
        "PET_MASTER_PORT": "$(MASTER_PORT)",
    }


PREFIX = "trainmaster.io/"
PACKAGES, PRETRAINED_MODEL, TRAINING_TYPE = f"{PREFIX}packages", f"{PREFIX}pretrained-model", f"{PREFIX}training-type"
TRAINER_STEP = "trainer"
"""The step of the job that trains, whatever the job is called: with MPI, `launcher`."""
RESOURCE_NAMES: Mapping[str, str] = MappingProxyType(
    {GPU_LABEL: "gpu", "amd.com/gpu": "gpu", "ephemeral-storage": "storage"}
)
"""A cluster's name of a resource -> the one in `resources_per_node`."""
VENDOR = "nvidia.com/"
_POD_LABEL = re.compile(r"metadata\.(?:labels|annotations)\['([^']+)'\]")
"""A field of a pod that a variable may have its value from."""


class RuntimeDocumentError(ValueError):
    """A document is no training runtime; the message names it and the field."""

    def __init__(self, where: str, path: str, message: str, name: str | None = None) -> None:
        super().__init__(f"{where}: {path}: {message}" if path else f"{where}: {message}")
        self.name = name
        """What the runtime is called, where that could be read."""


def kind_of(document: object) -> str | None:
    kind = document.get("kind") if isinstance(document, Mapping) else None
    return kind if isinstance(kind, str) else None


def read_runtime(document: object, where: str) -> TrainingRuntime:
    """The runtime of a document; `where` is what errors call it. Raises RuntimeDocumentError if it is none."""
    root = _Field(document, where)
    kinds = [str(kind.value) for kind in RuntimeKind]
    kind = root.at("kind").text()
    if kind not in kinds:
        root.at("kind").refuse(f"is {kind}; a runtime is a {' or a '.join(kinds)}")
    name = root.at("metadata", "name").text()
    try:
        return _read(root, RuntimeKind(kind), name)
    except RuntimeDocumentError as error:
        error.name = name
        raise


def _read(root: _Field, kind: RuntimeKind, name: str) -> TrainingRuntime:
    framework = root.at("metadata", "labels", RUNTIME_FRAMEWORK_LABEL).text()
    annotations = root.at("metadata", "annotations")
    jobs = root.at("spec", "template", "spec", "replicatedJobs")
    node = _container(jobs, TRAINER_STEP, NODE)
    if node is None:
        jobs.refuse(f"has no job called {NODE} with a container")
    variables = _environment(node)
    resources = _resources(node)
    policies = root.at("spec", "mlPolicy")
    policy = _policy(policies)
    training_type = annotations.at(TRAINING_TYPE).optional_text()
    built_in = training_type is not None or framework == TORCH_TUNE
    # An image of torchtune's has nothing of our trainers, which do its work here.
    image = None if built_in and training_type is None else node.at("image").optional_text()
    return TrainingRuntime(
        name=name,
        kind=kind,
        framework=framework,
        trainer_type=TrainerType.BUILTIN_TRAINER if built_in else TrainerType.CUSTOM_TRAINER,
        training_type=training_type,
        image=image,
        num_nodes=policies.at("numNodes").positive(default=1),
        ranks_per_node=_ranks_per_node(policy, policies, resources),
        policy=policy,
        command=node.at("command").texts(),
        args=node.at("args").texts(),
        environment={**variables_of(policy, framework), **variables.values},
        resources=resources,
        packages=tuple(filter(None, map(str.strip, (annotations.at(PACKAGES).optional_text() or "").splitlines()))),
        pretrained_model=annotations.at(PRETRAINED_MODEL).optional_text() or _storage_uri(jobs, MODEL_INITIALIZER),
        dataset=_storage_uri(jobs, DATASET_INITIALIZER),
        job_name_variables=variables.of_job_name,
        left_out=variables.left_out,
        origin=root.where,
        document=root.mapping(),
    )


def _policy(policies: _Field) -> str | None:
    """How processes find each other; the rest of `mlPolicy` is about their number."""
    for name in UNKNOWN_POLICIES:
        if policies.at(name).present:
            policies.at(name).refuse("cannot be carried out here; torch, mpi, jax and xgboost can")
    found = next((name for name in POLICIES if policies.at(name).present), None)
    implementation = policies.at(MPI, "mpiImplementation") if found == MPI else None
    if implementation is not None and implementation.value not in (None, OPEN_MPI):
        implementation.refuse(f"is {implementation.value}; only {OPEN_MPI} can be started here")
    return found


def _ranks_per_node(policy: str | None, policies: _Field, resources: Mapping[str, str | int | float]) -> int | None:
    """Processes on each node; None: one for each GPU, or one. With JAX, or without a policy, a container is one."""
    if policy in (None, JAX):
        return 1
    processes = policies.at(policy, "numProcPerNode")
    if policy == XGBOOST or processes.value in (None, "auto", "gpu"):
        return None
    if processes.value == "cpu":
        cores = str(resources.get("cpu", ""))
        if not cores.isdigit() or cores == "0":
            processes.refuse("is cpu, a process for each core, but the node's resources name no whole number of cpu")
        return int(cores)
    return processes.positive(default=1)


def _container(jobs: _Field, step: str, name: str) -> _Field | None:
    """The container of a step: of the job that is labelled so, or else is called so."""
    entries = jobs.items()
    labelled = [
        job for job in entries if job.at("template", "metadata", "labels", TRAINJOB_ANCESTOR_LABEL).value == step
    ]
    for job in [*labelled, *(job for job in entries if job.at("name").value == name)]:
        containers = job.at("template", "spec", "template", "spec", "containers").items()
        named = [container for container in containers if container.at("name").value == name]
        if named or len(containers) == 1:
            return (named or containers)[0]
    return None


def _storage_uri(jobs: _Field, step: str) -> str | None:
    container = _container(jobs, step, step)
    return None if container is None else _environment(container).values.get("STORAGE_URI") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variables:
    values: Mapping[str, str]
    of_job_name: tuple[str, ...]
    left_out: tuple[str, ...]
    """The paths of those whose value only a cluster knows."""


def _environment(container: _Field) -> _Variables:
    found: dict[str, str] = {}
    of_job_name: list[str] = []
    left_out: list[str] = []
    for entry in container.at("env").items():
        name = entry.at("name").text()
        if not entry.at("valueFrom").present:
            found[name] = entry.at("value").optional_text() or ""
            continue
        label = _POD_LABEL.fullmatch(str(entry.at("valueFrom", "fieldRef", "fieldPath").value))
        if label and label[1] == JOBSET_NAME_LABEL:
            of_job_name.append(name)
        elif label and label[1] == JOB_INDEX_LABEL:
            found[name] = "$(NODE_RANK)"
        else:
            left_out.append(f"{entry.path} ({name})")
    return _Variables(values=found, of_job_name=tuple(of_job_name), left_out=tuple(left_out))


def _resources(container: _Field) -> dict[str, str | int | float]:
    """What a node needs, in the names of `resources_per_node`. A limit wins over a request."""
    found: dict[str, str | int | float] = {}
    for place in ("requests", "limits"):
        for name, amount in container.at("resources", place).mapping().items():
            if isinstance(amount, bool) or not isinstance(amount, str | int | float):
                container.at("resources", place, name).refuse("must be an amount, such as 2 or 10Gi")
            ours = name.removeprefix(VENDOR) if name.startswith(GPU_MIG_PREFIX) else RESOURCE_NAMES.get(name, name)
            found[ours] = amount
    return found


@dataclass(frozen=True, slots=True)
class _Field:
    """A place in a document, there or not, that knows what to call itself."""

    value: Any
    where: str
    path: str = ""
    present: bool = True
    """Whether it is there: `mpi: {}` is, and so is `mpi:` with nothing after it."""

    def refuse(self, message: str) -> NoReturn:
        raise RuntimeDocumentError(self.where, self.path, message)

    def at(self, *names: str) -> _Field:
        found = self
        for name in names:
            inside = found.mapping()
            path = f"{found.path}.{name}" if found.path else name
            found = _Field(inside.get(name), self.where, path, name in inside)
        return found

    def mapping(self) -> Mapping[str, Any]:
        if self.value is None:
            return {} if self.path else self.refuse("is empty")
        if not isinstance(self.value, Mapping):
            self.refuse("must have fields")
        return self.value

    def items(self) -> list[_Field]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            self.refuse("must be a list")
        return [_Field(entry, self.where, f"{self.path}[{index}]") for index, entry in enumerate(self.value)]

    def optional_text(self) -> str | None:
        """Its text, or None. A number is taken for its digits, as people forget the quotes."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, str | int | float):
            self.refuse("must be text")
        return str(self.value)

    def text(self) -> str:
        return self.optional_text() or self.refuse("is required")

    def texts(self) -> tuple[str, ...]:
        return tuple(entry.optional_text() or "" for entry in self.items())

    def positive(self, *, default: int) -> int:
        if self.value is None:
            return default
        text = str(self.value)
        if isinstance(self.value, bool) or not text.isascii() or not text.isdigit() or int(text) < 1:
            self.refuse(f"must be a whole number from 1 on, not {self.value!r}")
        return int(text)
