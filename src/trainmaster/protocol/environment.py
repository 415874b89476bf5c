"""The environment of a rank: what the worker sets and the code inside a job reads.

Beside these a rank sees what `torchrun` would have set (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
NODE_RANK, GROUP_RANK, MASTER_ADDR, MASTER_PORT), CUDA_VISIBLE_DEVICES, and the three variables of
Kubeflow's progress reports.
"""

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
CA = "TRAINMASTER_CA"
"""Certificates of the authorities to trust where the server is reached by HTTPS; unset means the system's."""
KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
KUBEFLOW_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"

RESERVED_PREFIX = "TRAINMASTER_"
"""A job may not set variables with this prefix itself."""
