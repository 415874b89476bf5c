"""Where names, defaults and values of `trainmaster.trainer` are not those of the real package, and why.

The surfaces of both are held against it, and docs/reference/kubeflow-differences.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One, as a row of the page."""

    what: str
    theirs: str
    ours: str
    why: str
    places: Mapping[str, str] = field(default_factory=dict)
    """Where it shows in the surfaces, and in what; none of what only a call shows."""


NO_COUNTERPART = "our trainers do not support it; refused rather than ignored"

SURFACE: tuple[Difference, ...] = (
    Difference(
        what="`CustomTrainer.pip_index_urls`, `DEFAULT_PIP_INDEX_URLS`",
        theirs="the public index",
        ours="none",
        why="the index is configured where jobs run; a default here would override it",
        places={
            "trainer.CustomTrainer.pip_index_urls": "default",
            "types.CustomTrainer.pip_index_urls": "default",
            "constants.DEFAULT_PIP_INDEX_URLS": "value",
        },
    ),
    Difference(
        what="`TrainingRuntimeSource.sources`, and so `ContainerBackendConfig.runtime_source`",
        theirs="`github://kubeflow/trainer`",
        ours="none",
        why="runtimes are built in; nothing is fetched from the web unasked",
        places={
            "trainer.TrainingRuntimeSource.sources": "default",
            "trainer.ContainerBackendConfig.runtime_source": "default",
        },
    ),
    Difference(
        what="`ContainerBackendConfig.dataset_initializer_image`, `model_initializer_image`",
        theirs="kubeflow's images",
        ours="`None`",
        why="initializers are built in, and run in the job's image",
        places={
            "trainer.ContainerBackendConfig.dataset_initializer_image": "default",
            "trainer.ContainerBackendConfig.model_initializer_image": "default",
        },
    ),
    Difference(
        what="`ContainerBackendConfig.pull_policy` with an unknown value",
        theirs="means `IfNotPresent`",
        ours="ValueError",
        why="a misspelt `Always` should not be ignored",
        places={"trainer.ContainerBackendConfig.pull_policy": "type"},
    ),
    Difference(
        what="`KubernetesBackendConfig.client_configuration`",
        theirs="an object of the `kubernetes` package, which must be installed",
        ours="the same object, or a ValueError",
        why="the package is not needed to refuse other objects",
        places={"trainer.KubernetesBackendConfig.client_configuration": "type"},
    ),
    Difference(
        what="`wait_for_job_status(status=...)`",
        theirs="a set",
        ours="any collection of statuses; the default is immutable",
        why="a list works as well as a set",
        places={"trainer.TrainerClient.wait_for_job_status.status": "default, type"},
    ),
    Difference(
        what="`DEFAULT_COMMAND`, `EXEC_FUNC_SCRIPT`, `MPI_COMMAND`, `TORCH_COMMAND`, `DEFAULT_FRAMEWORK_IMAGES`, "
        "`POD_LABEL_SELECTOR` of `constants`",
        theirs="exist",
        ours="do not exist",
        why="functions are not passed through a shell, and runtimes name their images",
        places={
            "constants.DEFAULT_COMMAND": "missing",
            "constants.EXEC_FUNC_SCRIPT": "missing",
            "constants.MPI_COMMAND": "missing",
            "constants.TORCH_COMMAND": "missing",
            "constants.DEFAULT_FRAMEWORK_IMAGES": "missing",
            "constants.POD_LABEL_SELECTOR": "missing",
        },
    ),
)

BESIDE: tuple[Difference, ...] = (
    Difference(
        what="packages of `torch-distributed`",
        theirs="the local backend also installs torch with `packages_to_install`; without any packages, the job fails",
        ours='only the named packages; use `packages_to_install=["torch"]` if the server has no torch',
        why="a job without packages starts at once, with the installed packages",
    ),
    Difference(
        what="a server or a cluster that does not answer in time",
        theirs="TimeoutError (Kubernetes; the other backends use no server)",
        ours="TimeoutError",
        why="the same on every backend",
    ),
    Difference(
        what="`TrainerClient()` where `TRAINMASTER_URL` or `trainmaster login` names a server",
        theirs="the Kubernetes cluster",
        ours="that server, on its default backend; without a server the Kubernetes cluster, else this machine",
        why="a server can have several backends; `client.backend` says what was chosen, and why",
    ),
    Difference(
        what="credentials of `KubernetesBackendConfig`",
        theirs="used by the client itself",
        ours="used by the server: read from the kubeconfig on the same machine, else sent and stored encrypted; "
        "needs the scope `cluster_admin` once for each cluster",
        why="jobs outlive the client",
    ),
    Difference(
        what="a job on a cluster without Kubeflow Trainer",
        theirs="RuntimeError",
        ours="runs as an Indexed Job",
        why="only Kubeflow's own client needs TrainJobs",
    ),
    Difference(
        what="a job of a Kubernetes runtime with initializers, or with MPI",
        theirs="a TrainJob",
        ours="an Indexed Job; our initializers and `mpirun` run in its pods",
        why="the worker fetches data and starts processes in the same way on every backend",
    ),
    Difference(
        what="`RuntimePatch` on Kubernetes",
        theirs="changes any replicated job of the runtime",
        ours="changes the pods of the replicated job `node`; anything else is a ValueError",
        why="there are no other pods: initializers run in these, too",
    ),
    Difference(
        what="deleting a TrainJob on Kubernetes that another client made",
        theirs="deletes it",
        ours="RuntimeError; it is listed and shown, with its logs",
        why="jobs of others are not touched",
    ),
    Difference(
        what="`LoraConfig.quantize_base=True` of a `BuiltinTrainer`",
        theirs="passed to torchtune (Kubernetes)",
        ours="ValueError",
        why=NO_COUNTERPART,
    ),
    Difference(
        what="`TorchTuneInstructDataset.new_system_prompt` of a `BuiltinTrainer`",
        theirs="passed to torchtune (Kubernetes)",
        ours="ValueError",
        why=NO_COUNTERPART + "; write it into the rows",
    ),
    Difference(
        what="`role_arn` of an S3 initializer of a `BuiltinTrainer`",
        theirs="passed to the initializer (Kubernetes)",
        ours="ValueError",
        why=NO_COUNTERPART + "; give access keys",
    ),
    Difference(
        what="other `ignore_patterns` of an initializer of a `BuiltinTrainer`",
        theirs="passed to the initializer (Kubernetes)",
        ours="ValueError",
        why=NO_COUNTERPART + "; leave them out",
    ),
    Difference(
        what="`ContainerBackendConfig.initializer_timeout` for an initializer of a `BuiltinTrainer`",
        theirs="no built-in trainers on this backend",
        ours="ValueError",
        why="our trainers fetch in the step that prepares rows; use `ActiveDeadlineSeconds` to limit the whole job",
    ),
)
"""What only calls show, and the cases do not: unit tests of the client have it."""
