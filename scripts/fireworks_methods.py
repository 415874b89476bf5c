"""What becomes of the public methods of `fireworks.training.sdk` here: a section of `docs/reference/compatibility.md`.

The methods are read off the installed client; what becomes of each is said here, with the test that calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.server.doors.fireworks.errors import COLLECTIONS

SECTION = """
## fireworks-ai

This section lists the public classes of `fireworks.training.sdk` {version} that send requests, without their `_async`
variants. The guide is [The Fireworks API](../guides/fireworks.md).

- *works*: the named test calls the method through that client, against a real server;
- *refused*: the method fails at once, with the reason;
- *not available*: its routes answer 404 with the reason, and clients do not retry;
- *no request*: the method sends no request.
"""

WORKS, REFUSED, ABSENT, OWN = "works", "refused", "not available", "no request"


@dataclass(frozen=True)
class Fate:
    """What becomes of a method."""

    kind: str
    why: str = ""
    test: str = ""
    """That calls it."""


_LIFE = Fate(WORKS, test="test_jobs_are_created_once_and_leave_a_tombstone")
_KILLED = Fate(WORKS, test="test_killed_trainers_are_resumed")
_TRAINED = Fate(WORKS, test="test_training_lowers_the_loss_waited_for_or_not")
_STATES = Fate(WORKS, test="test_states_are_loaded_with_their_optimizer")
_PROMOTED = Fate(WORKS, test="test_checkpoints_of_a_deleted_job_are_promoted")
_MANAGED = Fate(WORKS, test="test_service_clients_make_their_own_trainers")
_SELDOM = Fate(WORKS, test="test_methods_that_recipes_seldom_call_work")
_DIRECT = Fate(WORKS, "on a service client with a trainer's address", _SELDOM.test)
_REFERENCE = Fate(WORKS, test="test_reference_models_stay_as_they_were")
_OWN = Fate(OWN)
_SESSIONS = Fate(ABSENT, COLLECTIONS["trainingSessions"], "test_what_is_not_here_is_told_at_once")
_JOBS = Fate(ABSENT, COLLECTIONS["dpoJobs"], "test_what_is_not_here_is_told_at_once")
_DEPLOYED = Fate(ABSENT, COLLECTIONS["deployments"])
_NO_HEADS = Fate(
    REFUSED, "there are no embeddings and no projection heads", "test_methods_that_are_not_here_say_so_at_once"
)
_NO_SAMPLER = Fate(
    REFUSED,
    "by the client itself, which samples only from a deployment",
    "test_methods_that_are_not_here_say_so_at_once",
)

_CLIENT = {
    "account_id": _LIFE,
    "close": _OWN,
    "delete_training_session": Fate(WORKS, "there are never any to delete", "test_what_is_not_here_is_told_at_once"),
    "list_checkpoints": _PROMOTED,
    "list_training_job_checkpoints": _JOBS,
    "list_training_session_checkpoints": _SESSIONS,
    "model_is_moe": Fate(WORKS, test="test_base_models_are_described"),
    "promote_checkpoint": _PROMOTED,
    "promote_session_checkpoint": _SESSIONS,
    "promote_training_job_checkpoint": _JOBS,
    "resolve_training_profile": Fate(WORKS, test="test_shapes_are_resolved_and_launched"),
}
METHODS: Mapping[str, Mapping[str, Fate]] = {
    "FireworksClient": _CLIENT,
    "TrainerJobManager": {
        **_CLIENT,
        "create": _LIFE,
        "create_and_wait": _LIFE,
        "delete": _LIFE,
        "get": _LIFE,
        "reconnect_and_wait": _KILLED,
        "resume_and_wait": _KILLED,
        "try_get": _LIFE,
        "wait_for_existing": _LIFE,
        "wait_for_ready": Fate(WORKS, test="test_trainer_that_waits_says_for_what"),
    },
    "FiretitanServiceClient": {
        "close": _MANAGED,
        "create_base_training_client": _DIRECT,
        "create_deployment_sampler": _DEPLOYED,
        "create_deployment_sampler_for_model": _DEPLOYED,
        "create_inference_deployment_sampler": _DEPLOYED,
        "create_lora_training_client": _SELDOM,
        "create_reference_client": _REFERENCE,
        "create_rest_client": _OWN,
        "create_sampling_client": _NO_SAMPLER,
        "create_training_client": _TRAINED,
        "create_training_client_from_state": _SELDOM,
        "create_training_client_from_state_with_optimizer": _MANAGED,
        "delete_training_session": _OWN,
        "deployment_id": _DEPLOYED,
        "deployment_shape": _OWN,
        "from_firetitan_config": Fate(WORKS, "with create_deployment=False", _MANAGED.test),
        "get_server_capabilities": _DIRECT,
        "get_telemetry": _OWN,
        "hotload_sampler_snapshot": _DEPLOYED,
        "list_checkpoints": _SELDOM,
        "managed_trainer_job_id": _MANAGED,
        "promote_checkpoint": _SELDOM,
        **dict.fromkeys(
            (
                "accelerator_count",
                "accelerator_type",
                "managed_accelerator_count",
                "managed_accelerator_type",
                "managed_deployment_id",
                "managed_deployment_shape",
                "managed_max_context_length",
                "managed_training_profile",
                "max_context_length",
                "reference_client_job_id",
                "reference_job_id",
                "reference_trainer_job_id",
                "release_references",
                "requires_initial_sampler_sync",
                "trainer_job_id",
                "training_profile",
                "training_session_id",
                "training_session_name",
            ),
            _OWN,
        ),
    },
    "FiretitanTrainingClient": {
        "comms": _OWN,
        "create_base_training_client": _SELDOM,
        "create_sampling_client": _NO_SAMPLER,
        "forward": _REFERENCE,
        "forward_backward": _TRAINED,
        "forward_backward_contrastive": _NO_HEADS,
        "forward_backward_custom": _TRAINED,
        "forward_projection": _NO_HEADS,
        "get_info": _SELDOM,
        "get_telemetry": _OWN,
        "get_tokenizer": Fate(OWN, "it reads the tokenizer_model that the service client was given"),
        "list_checkpoints": _STATES,
        "load_adapter": _SELDOM,
        "load_state": _STATES,
        "load_state_with_optimizer": _STATES,
        "optim_step": _TRAINED,
        "resolve_checkpoint_path": _SELDOM,
        "run_id": _OWN,
        "save_state": _STATES,
        "save_weights_for_sampler": _SELDOM,
        "save_weights_for_sampler_ext": _PROMOTED,
        "supports_rdma_weight_sync": _OWN,
        "unload_model": Fate(WORKS, test="test_trainer_that_is_used_stays"),
        "weight_sync": _NO_SAMPLER,
    },
}
CLASSES: Mapping[str, Fate] = {
    "FiretitanSamplingClient": _DEPLOYED,
    "DeploymentManager": Fate(ABSENT, COLLECTIONS["deployments"], "test_what_is_not_here_is_told_at_once"),
    "DeploymentSampler": _DEPLOYED,
    "WeightSyncer": _DEPLOYED,
    "TITOSidecar": Fate(ABSENT, "it samples from a deployment"),
    **dict.fromkeys(
        (
            "APIFuture",
            "AdaptiveConcurrencyController",
            "FixedConcurrencyController",
            "SamplingConcurrencyController",
            "TITOIncrementalRenderer",
            "TITOLocalDebugSink",
            "TITORenderer",
            "TrainingShapeProfile",
        ),
        _OWN,
    ),
}
"""Where all methods share one fate."""


def fates(client: Mapping[str, Any]) -> dict[str, Fate]:
    """What becomes of every method; of classes where that is one and the same, under the name of the class.

    Raises:
        KeyError: nothing is said of one.
    """
    found = {}
    for kind, methods in client["methods"].items():
        if kind in METHODS:
            found |= {f"{kind}.{method}": METHODS[kind][method] for method in methods}
        else:
            found[f"{kind}.*"] = CLASSES[kind]
    return found


def stale(client: Mapping[str, Any]) -> list[str]:
    """What is said here of methods that the client has no more."""
    known = fates(client)
    said = [f"{kind}.{method}" for kind, methods in METHODS.items() for method in methods]
    return [name for name in [*said, *(f"{kind}.*" for kind in CLASSES)] if name not in known]


def lines(client: Mapping[str, Any]) -> Iterator[str]:
    """The section about a client."""
    yield SECTION.format(version=client["version"])
    yield "| method | here | | called by |"
    yield "|---|---|---|---|"
    for method, fate in fates(client).items():
        yield f"| `{method}` | {fate.kind} | {fate.why} | {f'`{fate.test}`' if fate.test else ''} |"
