"""The constants of Kubeflow's SDK, by the same names.

Left out are its shell templates and default images: functions are not shipped through a shell, and runtimes name
their images.
"""

from os import environ as _environ

GROUP = "trainer.kubeflow.org"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
TRAINJOB_KIND = "TrainJob"
TRAINJOB_PLURAL = "trainjobs"
TRAINING_RUNTIME_PLURAL = "trainingruntimes"
CLUSTER_TRAINING_RUNTIME_PLURAL = "clustertrainingruntimes"
RUNTIME_FRAMEWORK_LABEL = f"{GROUP}/framework"
TRAINJOB_ANCESTOR_LABEL = f"{GROUP}/trainjob-ancestor-step"
JOBSET_NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOBSET_RJOB_NAME_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
JOB_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
POD_PENDING = "Pending"
POD_SUCCEEDED = "Succeeded"

TRAINJOB_CREATED = "Created"
TRAINJOB_RUNNING = "Running"
TRAINJOB_COMPLETE = "Complete"
TRAINJOB_FAILED = "Failed"
UNKNOWN = "Unknown"
"""Of a status, a device or a number of devices that nobody has said."""

DATASET_INITIALIZER = "dataset-initializer"
MODEL_INITIALIZER = "model-initializer"
NODE = "node"
LAUNCHER = "launcher"

CPU_LABEL = "cpu"
GPU_LABEL = "nvidia.com/gpu"
GPU_MIG_PREFIX = "nvidia.com/mig-"
TPU_LABEL = "google.com/tpu"
NPU_LABEL = "huawei.com/Ascend910"

WORKSPACE_PATH = "/workspace"
_fetched = _environ if "TRAINMASTER_JOB_ID" in _environ else {}
DATASET_PATH = _fetched.get("DATASET_PATH", f"{WORKSPACE_PATH}/dataset")
"""Where a job finds its dataset. Inside a job it is the directory itself, also where /workspace could not be made."""
MODEL_PATH = _fetched.get("MODEL_PATH", f"{WORKSPACE_PATH}/model")
"""The same for the model."""

INITIALIZER_DEFAULT_IGNORE_PATTERNS = ["*.msgpack", "*.h5", "*.bin", "*.pt", "*.pth"]
"""Weights that are there as safetensors too; a model initializer leaves them out."""
INITIALIZER_ENV_ACCESS_TOKEN = "ACCESS_TOKEN"
TORCH_ENV_NUM_PROC_PER_NODE = "PET_NPROC_PER_NODE"
TORCH_TUNE = "torchtune"
TORCH_TUNE_COMMAND = ("tune", "run")
TORCH_TUNE_INSTRUCT_DATASET = "torchtune.datasets.instruct_dataset"
DEFAULT_MPI_USER_HOME = _environ.get("DEFAULT_MPI_USER_HOME", "").strip() or "/home/mpiuser"
JOB_NAME_UUID_LENGTH = 11
"""Hexadecimal digits of a made-up job name, after its first letter."""

DEFAULT_TRAINING_RUNTIME = _environ.get("DEFAULT_TRAINING_RUNTIME", "").strip() or "torch-distributed"
"""The runtime of a job that names none."""
DEFAULT_PIP_INDEX_URLS = [
    url for part in _environ.get("DEFAULT_PIP_INDEX_URLS", "").split(",") if (url := part.strip())
]
"""Where packages come from. None: as pip is configured where the job runs, which Kubeflow would pass over."""
