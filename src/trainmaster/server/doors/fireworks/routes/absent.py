"""What Fireworks has and this server does not: the answer says so, and what there is instead.

Collections are answered with 404, which no public client retries; the generated client would retry 501. Samplers retry
404 for two minutes, as a deployment may be loading weights then: inference is refused with 400.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from trainmaster.server.core.errors import RefusedError, TrainmasterError
from trainmaster.server.http.errors import UnknownRouteError

DEPLOYED = (
    "there are no deployments here: sample through the Tinker door, or serve the files of a promoted model elsewhere"
)
_SERVERLESS = "there is no serverless training here: make a trainer with TrainerJobManager"
_BY_THEMSELVES = "jobs that train by themselves are submitted with POST /v1/jobs here, or with `trainmaster submit`"
_JUDGED = "nothing is evaluated here: a job of kind command runs what you have"

COLLECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "batchInferenceJobs": DEPLOYED,
        "datasets": "data sets are files here, which jobs name in `data_config`",
        "deployedModels": DEPLOYED,
        "deploymentShapeVersions": DEPLOYED,
        "deploymentShapes": DEPLOYED,
        "deployments": DEPLOYED,
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
        "/inference/": DEPLOYED,
        "/hot_load/": DEPLOYED,
    }
)

_BELOW_ACCOUNT = re.compile(r"/v1/accounts/[^/]+/([^/:]+)")


def absent(path: str) -> TrainmasterError:
    """The error for a path at which there is no route."""
    if found := _BELOW_ACCOUNT.match(path):
        return UnknownRouteError(COLLECTIONS.get(found[1]))
    why = next((why for prefix, why in PREFIXES.items() if path.startswith(prefix)), None)
    return UnknownRouteError() if why is None else RefusedError(why)
