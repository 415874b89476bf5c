"""The job spec: what a request may say, how it is read, stored and shown.

One module per config. Requests are strict: unknown fields are refused, and every problem is named with its
path. Stored specs are read tolerantly.
"""

from trainmaster.server.core.spec.data import DataConfig
from trainmaster.server.core.spec.documents import (
    SPEC_VERSION,
    dump,
    load_stored,
    redacted,
    secret_values,
    unsealed_values,
    with_secrets_of,
    with_server_defaults,
)
from trainmaster.server.core.spec.output import OutputConfig
from trainmaster.server.core.spec.parse import parse, parse_submit
from trainmaster.server.core.spec.problems import problems_from
from trainmaster.server.core.spec.resources import ResourceConfig, SchedulingConfig
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.spec.training import TrainingConfig
from trainmaster.server.core.training.types import FrameworkType, TrainingType

__all__ = [
    "SPEC_VERSION",
    "DataConfig",
    "FrameworkType",
    "OutputConfig",
    "ResourceConfig",
    "SchedulingConfig",
    "SubmitJobRequest",
    "TrainingConfig",
    "TrainingType",
    "dump",
    "load_stored",
    "parse",
    "parse_submit",
    "problems_from",
    "redacted",
    "secret_values",
    "unsealed_values",
    "with_secrets_of",
    "with_server_defaults",
]
