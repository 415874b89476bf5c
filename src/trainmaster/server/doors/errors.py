"""The form of an error, by the path of the request that led to it.

- Below `/v1/accounts/ACCOUNT/`, the resources of Fireworks: a gRPC status (`fireworks/errors.py`).
- Everywhere else, the envelope of the server's own API, with the statuses of `server/http/errors.py`. That includes
  the Tinker protocol, at the root (`/api/v1`) and of a trainer (`/training/v1/rlorTrainerJobs/...`): its clients read
  the status and show the message.

This is about requests that are refused. An operation that was accepted fails in its future (`futures.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from starlette.responses import Response

from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.doors.fireworks.errors import grpc_failure
from trainmaster.server.http.envelope import failure

_FIREWORKS_RESOURCES = re.compile(r"/v1/accounts/[^/]+/.+", re.DOTALL)


def failure_at(
    path: str, error: TrainmasterError, request_id: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to a request for `path` that led to `error`."""
    if _FIREWORKS_RESOURCES.fullmatch(path) is not None:
        return grpc_failure(error, headers)
    return failure(error, request_id, headers)
