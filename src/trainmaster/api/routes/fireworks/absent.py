"""What Fireworks has and this server does not: whoever asks for it is told so, and what there is instead.

Answered with 404, which no public client tries again; a 501 the generated one would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_DEPLOYED = "nothing is deployed here: sample through the Tinker door, or serve the files of a promoted model elsewhere"
_SERVERLESS = "there is no serverless training here: make a trainer with TrainerJobManager"
_BY_THEMSELVES = "jobs that train by themselves are submitted with POST /v1/jobs here, or with `trainmaster submit`"
_JUDGED = "nothing is evaluated here: a job of kind command runs what you have"

COLLECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "batchInferenceJobs": _DEPLOYED,
        "datasets": "data sets are files here, which jobs name in `data_config`",
        "deployedModels": _DEPLOYED,
        "deploymentShapeVersions": _DEPLOYED,
        "deploymentShapes": _DEPLOYED,
        "deployments": _DEPLOYED,
        "dpoJobs": _BY_THEMSELVES,
        "evaluationJobs": _JUDGED,
        "evaluators": _JUDGED,
        "evaluatorsV2": _JUDGED,
        "reinforcementFineTuningJobs": _BY_THEMSELVES,
        "secrets": "secrets belong to jobs here: `workload.environment` of POST /v1/jobs is sealed",
        "supervisedFineTuningJobs": _BY_THEMSELVES,
        "trainingSessions": _SERVERLESS,
        "users": "there are accounts and keys here, and no users: `trainmaster keys`",
    }
)
"""By their names below an account."""
PREFIXES: Mapping[str, str] = MappingProxyType(
    {
        "/training/v1/serverless/": _SERVERLESS,
        "/inference/": _DEPLOYED,
        "/hot_load/": _DEPLOYED,
    }
)

_BELOW_ACCOUNT = re.compile(r"/v1/accounts/[^/]+/([^/:]+)")


def absent(path: str) -> str:
    """Why there is nothing at a path; empty where nobody would look for anything there."""
    if found := _BELOW_ACCOUNT.match(path):
        return COLLECTIONS.get(found[1], "")
    return next((why for prefix, why in PREFIXES.items() if path.startswith(prefix)), "")
