"""The control plane through `fireworks-ai`: every field of a trainer, and the generated REST client.

The trainers wait for a region in which there is no node, so that nothing runs but what `own_trainer_jobs` starts.
"""

import asyncio
import dataclasses
import logging
import os
import time
from datetime import timedelta
from typing import Any

import fireworks.training.sdk as fireworks
from fireworks import Fireworks
from own_trainer_jobs import adapter, whole_weights
from scenarios import main, raised

URL = os.environ["FIREWORKS_BASE_URL"]
KEY = os.environ["FIREWORKS_API_KEY"]
MODEL = "accounts/fireworks/models/qwen3-8b"
NOWHERE = "US_NOWHERE_1"

manager = fireworks.TrainerJobManager(api_key=KEY, base_url=URL)
rest = Fireworks(api_key=KEY, base_url=URL, account_id=manager.account_id, max_retries=0)

warnings: list[str] = []
"""What the client warned of: of an answer about deployments it shows the reason there alone."""
_listener = logging.Handler(logging.WARNING)
_listener.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger().addHandler(_listener)

FIELDS: dict[str, Any] = {
    "lora_rank": 16,
    "max_context_length": 128,
    "learning_rate": 0.5,
    "gradient_accumulation_steps": 1,
    "node_count": 2,
    "trainer_replica_count": 3,
    "display_name": "mine",
    "extra_args": ["--max-adapters 3", "--precision=float32"],
    "extra_values": {"keep_results_s": "60"},
    "accelerator_type": "NVIDIA_H100_80GB",
    "accelerator_count": 2,
    "training_shape_ref": "accounts/fireworks/trainingShapes/cpu",
    "forward_only": True,
    "auto_select_training_shape": True,
    "inactivity_timeout": timedelta(minutes=30),
    "skip_validations": True,
    "purpose": "a test",
    "preemptible": True,
    "managed_by": "a test",
    "requested_job_id": "field-requested",
    "reservation_target": "default",
}
"""Every field of a TrainerJobConfig, but the model's name, the region and those that are refused."""
REFUSED: dict[str, Any] = {
    "projection_head_dim": 4,
    "disable_inactivity_cleanup": True,
    "use_reservation": False,
    "hot_load_deployment_id": "d-1",
    "custom_image_tag": "tag-7",
}


def fields() -> Any:
    """A trainer for every field: what the server shows of it."""
    known = {field.name for field in dataclasses.fields(fireworks.TrainerJobConfig)}
    shown = {}
    for name, value in FIELDS.items():
        job_id = value if name == "requested_job_id" else f"field-{name.replace('_', '-')}"
        config = {"base_model": MODEL, "region": NOWHERE, "requested_job_id": job_id, name: value}
        created = manager.create(fireworks.TrainerJobConfig(**config))
        shown[name] = manager.get(created.job_id)
        manager.delete(created.job_id)
    refused = {
        name: raised(lambda: manager.create(fireworks.TrainerJobConfig(base_model=MODEL, **{name: value})))  # noqa: B023
        for name, value in REFUSED.items()
    }
    return {
        "shown": shown,
        "refused": refused,
        "known": sorted(known),
        "tried": sorted({*FIELDS, *REFUSED, "base_model", "region"}),
    }


def waiting() -> Any:
    """A trainer that waits: it says for what, is cancelled, resumed, and waits again."""
    manager.create(fireworks.TrainerJobConfig(base_model=MODEL, region=NOWHERE, requested_job_id="waiting"))
    late = raised(lambda: manager.wait_for_ready("waiting", poll_interval_s=0.05, pending_timeout_s=0.2))
    before = manager.get("waiting")
    steps = rest.reinforcement_fine_tuning_steps
    steps.cancel("waiting", body={})
    cancelled = manager.get("waiting")["state"]
    resumed = steps.resume("waiting", body={}).state
    again = steps.resume("waiting", body={}).state
    steps.delete("waiting")
    return {
        "late": late,
        "before": before,
        "states": [cancelled, resumed, again, manager.get("waiting")["state"]],
        "ended": raised(lambda: manager.wait_for_existing("waiting", poll_interval_s=0.05)),
    }


def lists() -> Any:
    """The generated client lists, filters and pages."""
    steps = rest.reinforcement_fine_tuning_steps
    for name in ("list-c", "list-a", "list-b"):
        steps.create(
            rlor_trainer_job_id=name,
            service_mode=True,
            display_name=f"named {name}",
            training_config={"base_model": MODEL, "region": NOWHERE},
            extra_query={"skipValidations": "true"},
        )

    def names(**query: Any) -> list[str]:
        found = [step.name.rpartition("/")[2] for step in steps.list(**query)]
        return [name for name in found if name.startswith("list-")]

    found = {
        "by_name": names(page_size=1),
        "by_age": names(order_by="createTime desc"),
        "filtered": names(filter='displayName="named list-b" AND state=JOB_STATE_PENDING'),
        "wrong": raised(lambda: names(filter="no filter")),
        "typed": steps.get("list-a").training_config.base_model,
    }
    for name in ("list-c", "list-a", "list-b"):
        steps.delete(name)
    return found


def models() -> Any:
    """What is known of a base model."""
    return {
        "account": manager.account_id,
        "moe": manager.model_is_moe(MODEL),
        "missing": raised(lambda: manager.model_is_moe("accounts/fireworks/models/nobodys")),
        "listed": [model.name for model in rest.models.list(account_id="fireworks")],
    }


def absent() -> Any:
    """What this server has not: the error of each, and how long it took."""
    account = f"accounts/{manager.account_id}"
    session, job = f"{account}/trainingSessions/x", f"{account}/dpoJobs/x"
    patient = Fireworks(api_key=KEY, base_url=URL, account_id=manager.account_id)
    deployments = fireworks.DeploymentManager(api_key=KEY, base_url=URL)
    wanted = fireworks.DeploymentConfig(
        deployment_id="d", base_model=MODEL, deployment_shape=f"{account}/deploymentShapes/s"
    )
    sampler = fireworks.DeploymentSampler(inference_url=URL, model=f"{account}/deployments/d", api_key=KEY)
    calls: dict[str, Any] = {
        "trainingSessions": lambda: manager.list_training_session_checkpoints(session),
        "trainingSessions:promote": lambda: manager.promote_session_checkpoint(f"{session}/checkpoints/c", "m", MODEL),
        "dpoJobs": lambda: manager.list_training_job_checkpoints(job),
        "dpoJobs:promote": lambda: manager.promote_training_job_checkpoint(f"{job}/checkpoints/c", "m", MODEL),
        "deployments": lambda: deployments.create_or_get(wanted),
        "deployments:sample": lambda: asyncio.run(sampler.sample_with_prompt_tokens([1, 2, 3], max_tokens=4)),
        "deployments:hotload": lambda: deployments.hotload("d", MODEL, "snapshot"),
        "supervisedFineTuningJobs": lambda: list(patient.supervised_fine_tuning_jobs.list()),
        "datasets": lambda: list(patient.datasets.list()),
    }
    found = {}
    for name, call in calls.items():
        began = time.monotonic()
        found[name] = {**raised(call), "seconds": time.monotonic() - began}
    manager.delete_training_session(session)  # what is not there needs no deleting
    syncer = fireworks.WeightSyncer(policy_client=None, deploy_mgr=deployments, deployment_id="d", base_model=MODEL)
    warnings.clear()
    began = time.monotonic()
    synced = {
        "done": syncer.hotload("snapshot", "base"),
        "seconds": time.monotonic() - began,
        "warnings": "".join(warnings),
    }
    return {"errors": found, "deployment": deployments.get("d"), "synced": synced}


def managed() -> Any:
    """A trainer with a deployment, as reinforcement learning asks for both: what is left of the trainer."""
    service = fireworks.FiretitanServiceClient.from_firetitan_config(
        api_key=KEY,
        base_url=URL,
        base_model=MODEL,
        lora_rank=8,
        trainer_job_id="managed",
        training_shape_id="accounts/fireworks/trainingShapes/cpu",
        deployment_shape=f"accounts/{manager.account_id}/deploymentShapes/s",
        wait_for_trainer_before_deployment=True,
    )
    warnings.clear()
    error = raised(lambda: service.create_training_client(base_model=MODEL, lora_rank=8))
    deadline = time.monotonic() + 300
    while (state := manager.get("managed")["state"]) in ("JOB_STATE_RUNNING", "JOB_STATE_CANCELLING"):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return {"error": error, "state": state, "warnings": "".join(warnings)}


main(fields, waiting, lists, models, absent, managed, whole_weights, adapter)
