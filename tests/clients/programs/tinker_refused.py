"""What the latest `tinker` offers and this server does not do: each method's error, and how long that took."""

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import tinker
from scenarios import ask, main, raised
from tinker import types
from tinker_session import MODEL, new_trainer, prompt


def refused() -> Any:
    service = tinker.ServiceClient(project_id="a-project")
    trainer = new_trainer(service)
    saved = trainer.save_state("saved").result().path
    rest, admin = tinker.RestClient(), tinker.AdminClient()
    day = datetime(2025, 1, 1, tzinfo=UTC)
    calls: dict[str, Callable[[], Any]] = {
        "ServiceClient.copy_weights": lambda: service.copy_weights(saved).result(),
        "RestClient.copy_weights": lambda: rest.copy_weights(saved, "a-project").result(),
        "RestClient.export_session_trace": lambda: rest.export_session_trace(service.holder.get_session_id()).result(),
        "RestClient.get_audit_log": lambda: rest.get_audit_log().result(),
        "RestClient.get_billing_usage": lambda: rest.get_billing_usage(day, day).result(),
        "RestClient.whoami": lambda: rest.whoami().result(),
        "AdminClient.get_audit_log": lambda: admin.get_audit_log().result(),
        "AdminClient.get_billing_usage": lambda: admin.get_billing_usage(day, day).result(),
    }
    found = {}
    for name, call in calls.items():
        began = time.monotonic()
        found[name] = {**raised(call), "seconds": time.monotonic() - began}
    # Nothing of it was counted: the model goes on.
    return {"errors": found, "next": trainer.save_state("after").result().path}


def arguments() -> Any:
    """Arguments that methods which work do not take here."""
    service = tinker.ServiceClient()
    trainer = new_trainer(service)
    saved = trainer.save_state("saved").result().path
    sampler = service.create_sampling_client(base_model=MODEL)
    dimuon = types.DimuonOptimizerConfig()
    image = types.ImageChunk(data=b"png", format="png", expected_tokens=1)
    picture = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), image])
    targets = types.TensorData(data=[1] * 5, dtype="int64", shape=[5, 1])
    stable = {"record_stability_info": True}

    def train(given: Any, loss: str = "cross_entropy") -> Any:
        inputs = {"target_tokens": [2] * given.length, "weights": [1.0] * given.length}
        return [types.Datum(model_input=given, loss_fn_inputs=inputs)], loss

    def sample(of: Any = sampler, given: Any = None, **options: Any) -> Any:
        params = types.SamplingParams(max_tokens=2)
        return of.sample(given or prompt(), num_samples=1, sampling_params=params, **options).result()

    calls: dict[str, Callable[[], Any]] = {
        "ServiceClient.create_lora_training_client optimizer": lambda: service.create_lora_training_client(
            MODEL, rank=8, optimizer=dimuon
        ),
        "ServiceClient.create_training_client_from_state optimizer": lambda: service.create_training_client_from_state(
            saved, optimizer=dimuon
        ),
        "ServiceClient.create_sampling_client record_stability_info": lambda: sample(
            service.create_sampling_client(base_model=MODEL, **stable)
        ),
        "TrainingClient.save_weights_and_get_sampling_client record_stability_info": lambda: sample(
            trainer.save_weights_and_get_sampling_client(**stable)
        ),
        "TrainingClient.optim_step DimuonParams": lambda: trainer.optim_step(
            types.DimuonParams(learning_rate=0.1)
        ).result(),
        "TrainingClient.forward_backward stable_reinforce": lambda: trainer.forward_backward(
            *train(prompt(), "stable_reinforce")
        ).result(),
        "TrainingClient.forward_backward image": lambda: trainer.forward_backward(*train(picture)).result(),
        "TrainingClient.forward image": lambda: trainer.forward(*train(picture)).result(),
        "SamplingClient.sample target_prompt_logprobs": lambda: sample(target_prompt_logprobs=targets),
        "SamplingClient.sample prompt_alt_tokens_k": lambda: sample(prompt_alt_tokens_k=2),
        "SamplingClient.sample prompt_logprobs_last_n": lambda: sample(
            include_prompt_logprobs=True, prompt_logprobs_last_n=2
        ),
        "SamplingClient.sample image": lambda: sample(given=picture),
    }
    found = {}
    for name, call in calls.items():
        began = time.monotonic()
        found[name] = {**raised(call), "seconds": time.monotonic() - began}
    return found


def left_behind() -> Any:
    """A client with a model that is killed in the middle of its work."""
    trainer = new_trainer()
    ask("kill me", pid=os.getpid(), model_id=trainer.model_id)


if __name__ == "__main__":
    main(refused, arguments, left_behind)
