"""What a user of `fireworks-ai` does: trainer jobs from their creation to their deletion, and training in between."""

import time
from datetime import timedelta
from typing import Any

import fireworks.training.sdk as fireworks
from batches import batch, logprobs, losses
from fireworks_faults import failed_start, lost_answers, mistakes, names, reordered_chunks, restarted, taken_name
from fireworks_session import ADAM, JOB, KEY, MODEL, URL, base_url, manager, service_at, started, trainer_at
from scenarios import ask, main, raised

CONFIG = {"lora_rank": 8, "display_name": "a trainer", "inactivity_timeout": timedelta(minutes=30)}


def shapes() -> Any:
    """A training shape, resolved; and the trainer that most scenarios use, launched on it."""
    profile = manager.resolve_training_profile("accounts/fireworks/trainingShapes/cpu")
    again = manager.resolve_training_profile(profile.training_shape_version)
    CONFIG["training_shape_ref"] = profile.training_shape_version
    endpoint = started(JOB, **CONFIG)
    passed = trainer_at(endpoint.base_url).forward(batch(fireworks), "cross_entropy").result()
    return {
        "version": profile.training_shape_version,
        "again": vars(again) == vars(profile),
        "context": profile.max_supported_context_length,
        "nodes": profile.node_count,
        "endpoint_context": endpoint.max_context_length,
        "rows": len(logprobs(passed)),
        "missing": raised(lambda: manager.resolve_training_profile("accounts/fireworks/trainingShapes/nobodys")),
        "short": raised(lambda: manager.resolve_training_profile("cpu")),
    }


def lifecycle() -> Any:
    """Created once, however often it is asked for, and seen."""
    endpoint = started(JOB, **CONFIG)
    again = manager.create(fireworks.TrainerJobConfig(base_model=MODEL, requested_job_id=JOB, **CONFIG))
    job = manager.get(JOB)
    existing = manager.wait_for_existing(JOB, poll_interval_s=0.2, timeout_s=300)
    return {
        "account": manager.account_id,
        "endpoint": endpoint.base_url,
        "job_name": endpoint.job_name,
        "same": (again.job_id, existing.base_url) == (endpoint.job_id, endpoint.base_url),
        "state": job["state"],
        "display_name": job.get("displayName"),
        "missing": raised(lambda: manager.get("nobodys")),
    }


def refused() -> Any:
    """What the server does not want, and why."""

    def created(**fields: Any) -> Any:
        return raised(lambda: manager.create(fireworks.TrainerJobConfig(**{"base_model": MODEL, **fields})))

    stranger = fireworks.TrainerJobManager(api_key="fw_nobody", base_url=URL)
    return {
        "unknown_model": created(base_model="accounts/fireworks/models/nobodys"),
        "unknown_argument": created(extra_args=["--no-such-argument"]),
        "unknown_shape": created(training_shape_ref="accounts/fireworks/trainingShapes/nobodys"),
        "stranger": raised(lambda: stranger.account_id),
        "resume_of_nothing": raised(lambda: manager.resume_and_wait("nobodys", timeout_s=5)),
    }


def train() -> Any:
    """Training, waited for and not; a reference; a loss of one's own; what is saved; what is left to promote."""
    url = base_url()
    data = batch(fireworks)
    trainer = trainer_at(url)
    waited = losses(trainer, ADAM, data, 6)

    other = trainer_at(url)
    pairs = [(other.forward_backward(data, "cross_entropy"), other.optim_step(ADAM)) for _ in range(6)]
    sent = [passed.result().metrics["loss:sum"] for passed, _ in pairs]
    for _, stepped in pairs:
        stepped.result()

    service = service_at(url)
    policy = service.create_training_client(base_model=MODEL, lora_rank=8, seed=2)
    untrained = logprobs(policy.forward(data, "cross_entropy").result())
    losses(policy, ADAM, data, 2)
    reference = service.create_reference_client(base_model=MODEL, lora_rank=8, policy_client=policy)
    frozen = logprobs(reference.forward(data, "cross_entropy").result())

    def cross_entropy(data: list[Any], said: list[Any]) -> Any:
        rows = zip(data, said, strict=True)
        return sum(-(lp * one.loss_fn_inputs["weights"].to_torch()).sum() for one, lp in rows), {"mine": 1.0}

    custom = trainer_at(url)
    own = []
    for _ in range(3):
        own.append(custom.forward_backward_custom(data, cross_entropy).result().metrics["loss:sum"])
        custom.optim_step(ADAM).result()

    normalized = trainer_at(url)
    normalized.forward_backward(data, "cross_entropy").result()
    metrics = (
        normalized.optim_step(ADAM, grad_accumulation_normalization="num_loss_tokens", emit_grad_norm_metrics="basic")
        .result()
        .metrics
    )

    sampled = [
        fireworks.Datum(
            model_input=one.model_input,
            loss_fn_inputs={
                "target_tokens": one.loss_fn_inputs["target_tokens"],
                "logprobs": [-1.0] * one.model_input.length,
                "advantages": [1.0] * one.model_input.length,
            },
        )
        for one in data
    ]
    policies = {
        name: normalized.forward_backward(sampled, name).result().metrics["loss:sum"]
        for name in ("importance_sampling", "ppo", "cispo", "dro", "dapo", "gspo", "reinforce")
    }

    trainer.save_state("step-6").result()
    went_on = losses(trainer, ADAM, data, 3)
    trainer.load_state_with_optimizer("step-6").result()
    rewound = losses(trainer, ADAM, data, 3)
    saved = trainer.save_weights_for_sampler_ext("step-9")
    return {
        "waited": waited,
        "sent": sent,
        "untrained": untrained,
        "frozen": frozen,
        "custom": own,
        "optim_metrics": metrics,
        "policies": policies,
        "went_on": went_on,
        "rewound": rewound,
        "sampler": {"path": saved.path, "snapshot_name": saved.snapshot_name},
        "on_the_trainer": trainer.list_checkpoints(),
        "job": manager.get(JOB)["state"],
        "mistake": raised(lambda: trainer.load_state("no-such-state").result()),
    }


def promote() -> Any:
    """After `train`: its job is deleted, and then its id is spent; what it left becomes a model."""
    before = manager.list_checkpoints(JOB)
    manager.delete(JOB)
    gone = manager.try_get(JOB)
    left = manager.list_checkpoints(JOB)
    [promotable] = [one for one in left if one["promotable"] and "/step-9-" in one["name"]]
    model = manager.promote_checkpoint(name=promotable["name"], output_model_id="my-model", base_model=MODEL)
    again = raised(
        lambda: manager.promote_checkpoint(name=promotable["name"] + "-x", output_model_id="other", base_model=MODEL)
    )
    return {
        "before": before,
        "left": left,
        "model": model,
        "again": again,
        "after": gone and gone.get("state"),
        "recreated": raised(lambda: manager.create(fireworks.TrainerJobConfig(base_model=MODEL, requested_job_id=JOB))),
    }


def managed() -> Any:
    """The service client makes its trainer itself, on a shape that the server chooses, and comes back to it later."""
    wanted = {
        "base_model": MODEL,
        "lora_rank": 8,
        "seed": 1,
        "create_deployment": False,
        "api_key": KEY,
        "base_url": URL,
    }
    data = batch(fireworks)
    service = fireworks.FiretitanServiceClient.from_firetitan_config(**wanted)
    trainer = service.create_training_client(lora_rank=8)
    losses(trainer, ADAM, data, 2)
    path = trainer.save_state("half").result().path
    went_on = losses(trainer, ADAM, data, 3)
    job_id = service.managed_trainer_job_id
    service.close()
    again = fireworks.FiretitanServiceClient.from_firetitan_config(**wanted, trainer_job_id=job_id)
    resumed = losses(again.create_training_client_from_state_with_optimizer(path), ADAM, data, 3)
    found = {
        "went_on": went_on,
        "resumed": resumed,
        "shape": manager.get(job_id).get("trainingShape"),
        "others": _other_methods(again, job_id, path),
    }
    again.close()
    manager.delete(job_id)
    return found


def _other_methods(service: Any, job_id: str, path: str) -> Any:
    """What no other scenario calls, and what is refused; each with how long it took to be."""
    data = batch(fireworks)
    trainer = service.create_lora_training_client(base_model=MODEL, rank=8, seed=3)
    losses(trainer, ADAM, data, 2)
    saved = trainer.save_weights_for_sampler("of-two-steps").result().path
    [row] = [one for one in service.list_checkpoints(job_id) if one["promotable"]]
    model = service.promote_checkpoint(name=row["name"], output_model_id="of-two-steps", base_model=MODEL)["name"]
    adapted = service.create_lora_training_client(base_model=MODEL, rank=8, seed=4)
    adapted.load_adapter(model).result()
    of_state = service.create_training_client_from_state(path)
    # A service client that made its trainer itself has these two, and they fail within it.
    direct = service_at(manager.wait_for_existing(job_id, poll_interval_s=0.2, timeout_s=300).base_url)
    bases = [direct.create_base_training_client(MODEL), trainer.create_base_training_client(MODEL)]
    refused = {}
    for name, call in {
        "forward_projection": lambda: trainer.forward_projection(data).result(),
        "forward_backward_contrastive": lambda: trainer.forward_backward_contrastive(
            data, num_queries=2, temperature=0.05
        ).result(),
        "weight_sync": lambda: trainer.weight_sync().result(),
        "create_sampling_client": lambda: service.create_sampling_client(model_path=saved),
    }.items():
        began = time.monotonic()
        refused[name] = {**raised(call), "seconds": time.monotonic() - began}
    return {
        "models": [one.model_name for one in direct.get_server_capabilities().supported_models],
        "base_model": trainer.get_info().model_data.model_name,
        "resolved": trainer.resolve_checkpoint_path("half", source_job_id=job_id),
        "trained": logprobs(trainer.forward(data, "cross_entropy").result()),
        "adapted": logprobs(adapted.forward(data, "cross_entropy").result()),
        "of_state": len(logprobs(of_state.forward(data, "cross_entropy").result())),
        "bases": [logprobs(one.forward(data, "cross_entropy").result()) for one in bases],
        "refused": refused,
    }


def killed() -> Any:
    """The trainer is killed under a client; the job is resumed, and goes on from what was saved."""
    data = batch(fireworks)
    trainer = trainer_at(base_url())
    losses(trainer, ADAM, data, 2)
    trainer.save_state("step-2").result()
    found: dict[str, Any] = {"went_on": losses(trainer, ADAM, data, 3)}

    ask("kill the trainer", job=JOB)
    found["error"] = raised(lambda: trainer.forward_backward(data, "cross_entropy").result())
    found["state"] = manager.get(JOB)["state"]
    endpoint = manager.resume_and_wait(JOB, poll_interval_s=0.2, timeout_s=300)
    trainer = trainer_at(endpoint.base_url, seed=9)
    trainer.load_state_with_optimizer("step-2").result()
    found["resumed"] = losses(trainer, ADAM, data, 3)
    found["running"] = manager.reconnect_and_wait(JOB, poll_interval_s=0.2, timeout_s=300).base_url
    return found


def reconnected() -> Any:
    """A trainer that is come back to as soon as it is killed, when nobody may have noticed yet."""
    data = batch(fireworks)
    trainer = trainer_at(started("reconnected", **CONFIG).base_url)
    losses(trainer, ADAM, data, 2)
    trainer.save_state("step-2").result()
    found: dict[str, Any] = {"went_on": losses(trainer, ADAM, data, 3)}

    ask("kill the trainer", job="reconnected")
    endpoint = manager.reconnect_and_wait("reconnected", poll_interval_s=0.2, timeout_s=300)
    found["error"] = raised(lambda: trainer.forward_backward(data, "cross_entropy").result())
    trainer = trainer_at(endpoint.base_url, seed=9)
    trainer.load_state_with_optimizer("step-2").result()
    found["reconnected"] = losses(trainer, ADAM, data, 3)
    manager.delete("reconnected")
    return found


if __name__ == "__main__":
    main(
        shapes,
        lifecycle,
        refused,
        train,
        lost_answers,
        reordered_chunks,
        mistakes,
        taken_name,
        names,
        restarted,
        killed,
        promote,
        managed,
        reconnected,
        failed_start,
    )
