"""The environment of a rank: what the worker sets and the code inside a job reads.

Beside these a rank sees what `torchrun` would have set (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
NODE_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT), CUDA_VISIBLE_DEVICES, and the three variables of
Kubeflow's progress reports.
"""

from __future__ import annotations

from types import MappingProxyType

from trainmaster.protocol.secrets import HUB_TOKEN, SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN

JOB_ID = "TRAINMASTER_JOB_ID"
ATTEMPT = "TRAINMASTER_ATTEMPT"
ATTEMPT_ID = "TRAINMASTER_ATTEMPT_ID"
"""With NODE also how strays of an attempt are found: every process that descends from a rank inherits it."""
NODE = "TRAINMASTER_NODE"
"""The index of this node in its attempt."""
EVENTS_FILE = "TRAINMASTER_EVENTS_FILE"
"""Where this rank appends its events, one JSON object a line."""
METRICS_FILE = "TRAINMASTER_METRICS_FILE"
"""Where this rank appends its metrics, one JSON object a line."""
CONTROL_FILE = "TRAINMASTER_CONTROL_FILE"
"""Written by the worker when the rank should save or stop; absent until then."""
OWNER_FILE = "TRAINMASTER_OWNER_FILE"
"""Names the attempt that may commit checkpoints of this job; read again at every commit."""
OWNER_URL = "TRAINMASTER_OWNER_URL"
"""The same over HTTP, where the server's files cannot be read."""
TOKEN_FILE = "TRAINMASTER_TOKEN_FILE"
"""The token of the attempt's ranks, to be compared with the owner's and to be sent to OWNER_URL."""
CHECKPOINT_DIR = "TRAINMASTER_CHECKPOINT_DIR"
"""Where committed checkpoints of this job lie, one directory each."""
RESUME_FROM = "TRAINMASTER_RESUME_FROM"
"""The committed checkpoint to go on from; unset on a start from nothing."""
OUTPUT_DIR = "TRAINMASTER_OUTPUT_DIR"
"""Where the job leaves its results."""
INPUTS_DIR = "TRAINMASTER_INPUTS_DIR"
"""Where the inputs of the launch lie, such as a trainer's `training.json`."""
PREPARED_DIR = "TRAINMASTER_PREPARED_DIR"
"""Of this node and attempt: where a preparing step leaves what the ranks go on with."""
WORKSPACE = "/workspace"
"""Where programs for Kubeflow look for a dataset and a model: /workspace/dataset, /workspace/model."""
GANG_DIR = "TRAINMASTER_GANG_DIR"
"""Below PREPARED_DIR: where those meet that make a table's shards together; unset where one process has them made."""
CACHE_DIR = "TRAINMASTER_CACHE_DIR"
"""What was fetched and prepared, for all jobs of the account on this node."""
SERVICE_HOST = "TRAINMASTER_SERVICE_HOST"
"""Where a service listens: on this machine alone; in a container, which is parted from it, on all addresses."""
DATA_ROOTS = "TRAINMASTER_DATA_ROOTS"
"""Directories, parted by colons, below which local files that a job names must lie."""
ARTIFACTS_DIR = "TRAINMASTER_ARTIFACTS_DIR"
"""Below which lies what jobs leave, each in a directory of its own."""
PRIVATE_URLS = "TRAINMASTER_PRIVATE_URLS"
"""1 when URLs that a job names may lead to addresses that are not public."""
SCAIDRIVE_URL = "TRAINMASTER_SCAIDRIVE_URL"
SCAIATLAS_URL = "TRAINMASTER_SCAIATLAS_URL"
"""Where `scaidrive:` and `scaiatlas:` paths are fetched from; unset where the server knows no such service."""
TOKENS = MappingProxyType(
    {
        HUB_TOKEN: "TRAINMASTER_HUB_TOKEN",
        SCAIDRIVE_TOKEN: "TRAINMASTER_SCAIDRIVE_TOKEN",
        SCAIATLAS_TOKEN: "TRAINMASTER_SCAIATLAS_TOKEN",
    }
)
"""The variable of each token that was passed on with a job; in steps that fetch, and nowhere else."""
INITIALIZER_SECRETS = MappingProxyType(
    {
        "access_token": "TRAINMASTER_INITIALIZER_ACCESS_TOKEN",
        "access_key_id": "TRAINMASTER_INITIALIZER_ACCESS_KEY_ID",
        "secret_access_key": "TRAINMASTER_INITIALIZER_SECRET_ACCESS_KEY",
    }
)
"""The variable of each sealed field of an initializer; in its own step, and nowhere else."""
CA = "TRAINMASTER_CA"
"""Certificates of the authorities to trust where the server is reached by HTTPS; unset means the system's."""
KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
KUBEFLOW_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"

ENDPOINTS = ("HF_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS")
"""Variables of a job that say where to fetch from."""
FETCHING = frozenset(
    {
        *ENDPOINTS,
        "AWS_ACCESS_KEY_ID",
        "AWS_DEFAULT_REGION",
        "AWS_REGION",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "HF_HUB_DISABLE_XET",
        "HF_HUB_DOWNLOAD_TIMEOUT",
        "HF_HUB_ETAG_TIMEOUT",
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "OMP_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
    }
)
"""The variables of a job that reach a process of ours which holds tokens. It gets no others: many name code to load
(`PYTHONPATH`, `LD_PRELOAD`, `OPENSSL_CONF`, `PATH`, `BASH_ENV`), or would show somebody else what it sends
(`HTTPS_PROXY`, `SSL_CERT_FILE`, `SSLKEYLOGFILE`). What the operator set on the machine stays."""

CREDENTIALS = frozenset(
    {
        *TOKENS.values(),
        *INITIALIZER_SECRETS.values(),
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
    }
)
"""What a process of ours drops before it runs code that comes with a model."""

REFERABLE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What a value of the job's own variables may name as `$(RANK)`, as in a Kubernetes manifest: so a runtime's file says
what another framework calls them."""

RESERVED_PREFIX = "TRAINMASTER_"
"""A job may not set variables with this prefix itself."""

TOKEN_HEADER = "x-trainmaster-token"
"""A header of every request that the server passes on to a service; holds the token of the attempt's ranks
(`TRAINMASTER_TOKEN_FILE`). Others on the machine can reach the service's port: by the token it knows that the server
sent the request and authenticated the caller."""
