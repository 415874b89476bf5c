"""Who may use which route: written down by hand, so that a route which opens more than it should is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from trainmaster.server.app import DOORS, routers_of
from trainmaster.server.settings.settings import Role


class Who(StrEnum):
    """What a route wants to see."""

    ANYBODY = "anybody"
    ANY_KEY = "any key"
    VIEW = "view"
    MANAGE = "manage"
    ADMIN = "cluster_admin"
    WORKER = "the token of an attempt's worker"
    RANK = "the token of an attempt's ranks"
    VIEW_OR_WORKER = "view, or the token of a worker"
    SIGNATURE = "a signed address, and no key"


BY_SCOPE = {Who.VIEW: "view", Who.VIEW_OR_WORKER: "view", Who.MANAGE: "manage", Who.ADMIN: "cluster_admin"}
"""The scope that a key needs."""

AT_ROOT = {
    "GET /healthz": Who.ANYBODY,
    "GET /readyz": Who.ANYBODY,
    "GET /openapi.json": Who.ANY_KEY,
    "GET /metrics": Who.VIEW,
}

BELOW_PREFIX = {
    "POST /jobs": Who.MANAGE,
    "POST /jobs/validate": Who.MANAGE,
    "GET /jobs": Who.VIEW,
    "GET /jobs/{job_id}": Who.VIEW,
    "PATCH /jobs/{job_id}": Who.MANAGE,
    "DELETE /jobs/{job_id}": Who.MANAGE,
    "POST /jobs/{job_id}/cancel": Who.MANAGE,
    "POST /jobs/{job_id}/pause": Who.MANAGE,
    "POST /jobs/{job_id}/resume": Who.MANAGE,
    "POST /jobs/{job_id}/retry": Who.MANAGE,
    "POST /jobs/{job_id}/clone": Who.MANAGE,
    "GET /jobs/{job_id}/logs": Who.VIEW,
    "GET /jobs/{job_id}/metrics": Who.VIEW,
    "GET /jobs/{job_id}/metrics/stream": Who.VIEW,
    "GET /jobs/{job_id}/events": Who.VIEW,
    "GET /jobs/{job_id}/artifacts": Who.VIEW,
    "GET /jobs/{job_id}/artifacts/{path:path}": Who.VIEW,
    "GET /jobs/{job_id}/checkpoints": Who.VIEW,
    "POST /jobs/{job_id}/checkpoints/{checkpoint_id}/pin": Who.MANAGE,
    "POST /jobs/{job_id}/checkpoints/{checkpoint_id}/unpin": Who.MANAGE,
    "DELETE /jobs/{job_id}/checkpoints/{checkpoint_id}": Who.MANAGE,
    "GET /events": Who.VIEW,
    "GET /tombstones": Who.VIEW,
    "GET /usage": Who.VIEW,
    "POST /gc": Who.ADMIN,
    "GET /nodes": Who.VIEW,
    "GET /nodes/{node_id}": Who.VIEW,
    "GET /nodes/{node_id}/events": Who.VIEW,
    "POST /nodes/{node_id}/drain": Who.ADMIN,
    "POST /nodes/{node_id}/enable": Who.ADMIN,
    "PATCH /nodes/{node_id}": Who.ADMIN,
    "GET /runtimes": Who.VIEW,
    "GET /runtimes/{name}": Who.VIEW,
    "GET /queues": Who.VIEW,
    "PUT /queues/{name}": Who.ADMIN,
    "DELETE /queues/{name}": Who.ADMIN,
    "GET /queue": Who.VIEW,
    "GET /cluster": Who.VIEW,
    "GET /backends": Who.VIEW,
    "GET /backends/{name}": Who.VIEW,
    "PUT /backends/{name}": Who.ADMIN,
    "DELETE /backends/{name}": Who.ADMIN,
    "GET /backends/{name}/runtimes": Who.VIEW,
    "GET /backends/{name}/foreign-jobs": Who.VIEW,
    "GET /backends/{name}/foreign-jobs/{job}": Who.VIEW,
    "GET /backends/{name}/foreign-jobs/{job}/logs": Who.ADMIN,
    "PUT /blobs/{sha256}": Who.MANAGE,
    "POST /data/validate": Who.MANAGE,
    "GET /blobs/{sha256}": Who.VIEW_OR_WORKER,
    "HEAD /blobs/{sha256}": Who.VIEW_OR_WORKER,
    "GET /webhooks": Who.MANAGE,
    "POST /webhooks": Who.MANAGE,
    "GET /webhooks/{webhook_id}": Who.MANAGE,
    "PATCH /webhooks/{webhook_id}": Who.MANAGE,
    "DELETE /webhooks/{webhook_id}": Who.MANAGE,
    "POST /webhooks/{webhook_id}/test": Who.MANAGE,
    "GET /accounts": Who.VIEW,
    "POST /accounts": Who.ADMIN,
    "GET /accounts/{account_id}": Who.VIEW,
    "PATCH /accounts/{account_id}": Who.ADMIN,
    "DELETE /accounts/{account_id}": Who.ADMIN,
    "GET /keys": Who.VIEW,
    "GET /keys/current": Who.VIEW,
    "POST /keys": Who.ADMIN,
    "DELETE /keys/{key_id}": Who.ADMIN,
    "GET /worker/attempts/{attempt_id}/request": Who.WORKER,
    "GET /worker/attempts/{attempt_id}/package": Who.WORKER,
    "GET /worker/attempts/{attempt_id}/secrets": Who.WORKER,
    "POST /worker/attempts/{attempt_id}/claims/{node}": Who.WORKER,
    "POST /worker/attempts/{attempt_id}/streams/{stream:path}": Who.WORKER,
    "PUT /worker/attempts/{attempt_id}/documents/{document:path}": Who.WORKER,
    "GET /worker/attempts/{attempt_id}/documents/{document:path}": Who.WORKER,
    "GET /worker/attempts/{attempt_id}/control": Who.WORKER,
    "GET /worker/attempts/{attempt_id}/owner": Who.RANK,
    "GET /worker/attempts/{attempt_id}/files/{area}": Who.RANK,
    **{f"{method} /worker/attempts/{{attempt_id}}/files/{{area}}/{{path:path}}": Who.RANK
       for method in ("GET", "HEAD", "PUT", "POST", "DELETE")},
    **{f"{method} /jobs/{{job_id}}/proxy{rest}": Who.VIEW
       for method in ("GET", "HEAD", "OPTIONS") for rest in ("", "/{path:path}")},
    **{f"{method} /jobs/{{job_id}}/proxy{rest}": Who.MANAGE
       for method in ("POST", "PUT", "PATCH", "DELETE") for rest in ("", "/{path:path}")},
}  # fmt: skip

_JOBS = "/v1/accounts/{account_id}/rlorTrainerJobs"
_SHAPES = "/v1/accounts/{account_id}/trainingShapes"
_MODELS = "/v1/accounts/{account_id}/models"
_TRAINER = "/training/v1/rlorTrainerJobs/{account_id}/{job_id}/api/v1/{operation:path}"

FIREWORKS = {
    f"POST {_JOBS}": Who.MANAGE,
    f"GET {_JOBS}": Who.VIEW,
    f"GET {_JOBS}/{{job_id}}": Who.VIEW,
    f"DELETE {_JOBS}/{{job_id}}": Who.MANAGE,
    f"POST {_JOBS}/{{job_id}}:resume": Who.MANAGE,
    f"POST {_JOBS}/{{job_id}}:cancel": Who.MANAGE,
    f"POST {_JOBS}/{{job_id}}:executeTrainStep": Who.MANAGE,
    f"GET {_JOBS}/{{job_id}}/checkpoints": Who.VIEW,
    "POST /v1/accounts/{account_id}/checkpoints/{checkpoint}:promote": Who.MANAGE,
    "GET /v1/accounts/{account_id}/operations/{operation_id}": Who.VIEW,
    f"GET {_SHAPES}": Who.VIEW,
    f"GET {_SHAPES}/{{shape}}": Who.VIEW,
    f"GET {_SHAPES}/{{shape}}/versions": Who.VIEW,
    f"GET {_SHAPES}/{{shape}}/versions/{{version}}": Who.VIEW,
    f"GET {_MODELS}": Who.VIEW,
    f"GET {_MODELS}/{{model_id}}": Who.VIEW,
    f"DELETE {_MODELS}/{{model_id}}": Who.MANAGE,
    "GET /v1/accounts/{account_id}/deployments": Who.VIEW,
    "POST /v1/accounts/{account_id}/deployments": Who.MANAGE,
    "GET /hot_load/v1/models/hot_load": Who.VIEW,
    "POST /hot_load/v1/models/hot_load": Who.MANAGE,
    f"GET {_TRAINER}": Who.VIEW,
    **{f"{method} {_TRAINER}": Who.MANAGE for method in ("POST", "PUT", "DELETE")},
}
"""The door of `fireworks-ai`, under one address each."""

_SAVED = "/api/v1/training_runs/{run_id}/checkpoints/{place}/{name}"

TINKER = {
    **{f"GET /api/v1/{path}": Who.VIEW
       for path in ("healthz", "get_server_capabilities", "auth/apikey/me", "audit", "billing/usage/events",
                    "billing/usage/checkpoints/current", "training_runs", "training_runs/{run_id}",
                    "training_runs/{run_id}/checkpoints", "checkpoints", "samplers/{sampler_id}", "sessions",
                    "sessions/{session_id}", "sessions/{session_id}/trace_export")},
    **{f"POST /api/v1/{path}": Who.VIEW
       for path in ("client/config", "client/dynamic_config", "telemetry", "get_info", "weights_info",
                    "retrieve_future", "retrieve_futures", "session_heartbeat", "sessions/search", "auth/token",
                    "copy_weights", "join_sampling_session")},
    **{f"POST /api/v1/{path}": Who.MANAGE
       for path in ("create_session", "create_model", "create_sampling_session", "create_custom_loss", "asample",
                    "forward_backward", "forward", "optim_step", "save_weights", "save_weights_for_sampler",
                    "save_weights_external", "load_weights", "unload_model", "cancel_future",
                    "sessions/{session_id}/finish")},
    "DELETE /api/v1/auth/apikey/me": Who.VIEW,
    "PUT /api/v1/sessions/{session_id}/project": Who.MANAGE,
    f"GET {_SAVED}/archive": Who.VIEW,
    f"GET {_SAVED}/external_weights_urls": Who.VIEW,
    "GET /api/v1/downloads/{job_id}/{checkpoint_id}/archive": Who.SIGNATURE,
    "GET /api/v1/downloads/{job_id}/{checkpoint_id}/files/{name:path}": Who.SIGNATURE,
    f"DELETE {_SAVED}": Who.MANAGE,
    f"POST {_SAVED}/publish": Who.MANAGE,
    f"DELETE {_SAVED}/publish": Who.MANAGE,
    f"PUT {_SAVED}/ttl": Who.MANAGE,
}  # fmt: skip
"""The door of `tinker`, under one address each."""

PREFIXES = ("/v1", "/v1/modules/scaimind")

ROUTES = (
    AT_ROOT
    | FIREWORKS
    | TINKER
    | {operation.replace(" ", f" {prefix}", 1): who for prefix in PREFIXES for operation, who in BELOW_PREFIX.items()}
)
"""Every route under every address that it has."""


def served() -> Iterator[str]:
    """Every route that a server has."""
    yield "GET /openapi.json"
    of_doors = [router for door in DOORS for router in (*door.gateway_routers, *door.api_routers)]
    for router in routers_of({Role.API, Role.GATEWAY}):
        for route in router.routes:
            below = None if router in of_doors or not route.path.startswith("/v1/") else route.path.removeprefix("/v1")
            paths = [route.path] if below is None else [f"{prefix}{below}" for prefix in PREFIXES]
            yield from (f"{method} {path}" for path in paths for method in route.methods)
