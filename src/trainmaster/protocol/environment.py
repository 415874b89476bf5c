"""The environment of a rank: what the worker sets and the code inside a job reads.

A rank also gets what `torchrun` would set (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, NODE_RANK, GROUP_RANK,
MASTER_ADDR, MASTER_PORT), CUDA_VISIBLE_DEVICES, and the variables of Kubeflow's progress reports.
"""

from __future__ import annotations

from types import MappingProxyType

from trainmaster.protocol.secrets import HUB_TOKEN, SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN

JOB_ID = "TRAINMASTER_JOB_ID"
ATTEMPT = "TRAINMASTER_ATTEMPT"
ATTEMPT_ID = "TRAINMASTER_ATTEMPT_ID"
"""Inherited by every descendant of a rank: with NODE, it identifies strays of an attempt."""
NODE = "TRAINMASTER_NODE"
EVENTS_FILE = "TRAINMASTER_EVENTS_FILE"
"""Where this rank appends its events, one JSON object a line."""
METRICS_FILE = "TRAINMASTER_METRICS_FILE"
"""Where this rank appends its metrics, one JSON object a line."""
CONTROL_FILE = "TRAINMASTER_CONTROL_FILE"
"""Written by the worker when the rank should save or stop; absent until then."""
OWNER_FILE = "TRAINMASTER_OWNER_FILE"
"""Names the attempt that may commit checkpoints of this job; read at every commit."""
OWNER_URL = "TRAINMASTER_OWNER_URL"
"""The same over HTTP, where the server's files cannot be read."""
ENGINE_STOPS = "TRAINMASTER_ENGINE_STOPS"
"""1 if the engine of a cluster may send ranks SIGTERM, which asks them to save and to stop."""
ENGINE_SIGNALS_RANKS = "TRAINMASTER_ENGINE_SIGNALS_RANKS"
"""1 in the environment of a worker if its engine may send SIGTERM to the ranks itself, and to them first."""
ECHO = "TRAINMASTER_ECHO"
"""1 if the worker of a node prints what the node's first rank writes, for the log that the engine keeps of it."""
TOKEN_FILE = "TRAINMASTER_TOKEN_FILE"
"""The token of the attempt's ranks: compared with the owner's, and sent to OWNER_URL."""
CHECKPOINT_DIR = "TRAINMASTER_CHECKPOINT_DIR"
RESUME_FROM = "TRAINMASTER_RESUME_FROM"
"""The committed checkpoint to resume from; unset on a fresh start."""
OUTPUT_DIR = "TRAINMASTER_OUTPUT_DIR"
INPUTS_DIR = "TRAINMASTER_INPUTS_DIR"
"""The inputs of the launch, such as a trainer's `training.json`."""
PREPARED_DIR = "TRAINMASTER_PREPARED_DIR"
"""What preparing steps leave for the ranks, per node and attempt."""
WORKSPACE = "/workspace"
"""Where programs for Kubeflow look for a dataset and a model: /workspace/dataset, /workspace/model."""
GANG_DIR = "TRAINMASTER_GANG_DIR"
"""Below PREPARED_DIR: where processes that build a table's shards together meet; unset with a single process."""
CACHE_DIR = "TRAINMASTER_CACHE_DIR"
"""Fetched and prepared data, shared by all jobs of the account on this node."""
SERVICE_HOST = "TRAINMASTER_SERVICE_HOST"
"""Where a service listens: the loopback address; in a container, all addresses."""
DATA_ROOTS = "TRAINMASTER_DATA_ROOTS"
"""Colon-separated directories that may hold the local files a job names."""
ARTIFACTS_DIR = "TRAINMASTER_ARTIFACTS_DIR"
"""Holds the results of jobs, one directory each."""
PRIVATE_URLS = "TRAINMASTER_PRIVATE_URLS"
"""1 if URLs that a job names may lead to addresses that are not public."""
SCAIDRIVE_URL = "TRAINMASTER_SCAIDRIVE_URL"
SCAIATLAS_URL = "TRAINMASTER_SCAIATLAS_URL"
"""Where `scaidrive:` and `scaiatlas:` paths are fetched from; unset if the server has no such service."""
TOKENS = MappingProxyType(
    {
        HUB_TOKEN: "TRAINMASTER_HUB_TOKEN",
        SCAIDRIVE_TOKEN: "TRAINMASTER_SCAIDRIVE_TOKEN",
        SCAIATLAS_TOKEN: "TRAINMASTER_SCAIATLAS_TOKEN",
    }
)
"""The variable of each token that was passed on with a job. Only steps that fetch get them."""
INITIALIZER_SECRETS = MappingProxyType(
    {
        "access_token": "TRAINMASTER_INITIALIZER_ACCESS_TOKEN",
        "access_key_id": "TRAINMASTER_INITIALIZER_ACCESS_KEY_ID",
        "secret_access_key": "TRAINMASTER_INITIALIZER_SECRET_ACCESS_KEY",
    }
)
"""The variable of each secret field of an initializer. Only its own step gets them."""
CA = "TRAINMASTER_CA"
"""CA certificates to trust when the server is reached by HTTPS; unset: the system's."""
KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
KUBEFLOW_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"

ENDPOINTS = ("HF_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS")
"""Variables of a job that say where to fetch from."""
_STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
FETCHING = frozenset(
    {
        *ENDPOINTS,
        *_STORE_KEYS,
        *("AWS_DEFAULT_REGION", "AWS_REGION", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        *("HF_HUB_DISABLE_XET", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_OFFLINE"),
    }
)
"""The variables of a job that reach our own processes that hold tokens. Others may name code to load (`PYTHONPATH`,
`LD_PRELOAD`, `OPENSSL_CONF`, `PATH`, `BASH_ENV`) or reveal what is sent (`HTTPS_PROXY`, `SSL_CERT_FILE`,
`SSLKEYLOGFILE`). Variables that the operator set on the machine stay."""

CREDENTIALS = frozenset({*TOKENS.values(), *INITIALIZER_SECRETS.values(), *_STORE_KEYS})
"""Dropped by our own processes before they run code that comes with a model."""

REFERABLE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that the value of a job's variable may refer to as `$(RANK)`, as in a Kubernetes manifest."""

RESERVED_PREFIX = "TRAINMASTER_"
"""Jobs may not set variables with this prefix."""

TOKEN_HEADER = "x-trainmaster-token"
"""A header of every request that the server passes on to a service: the token of the attempt's ranks
(`TRAINMASTER_TOKEN_FILE`). Others on the machine can reach the service's port; the token proves that the server sent
the request and authenticated the caller."""
