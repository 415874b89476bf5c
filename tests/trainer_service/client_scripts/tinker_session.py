"""What a user of the public `tinker` package does, told as JSON: run by the tests in an environment of its own."""

from __future__ import annotations

import inspect
import json
import logging
import os
import sys
from typing import Any

import tinker
from tinker import types

BASE_MODEL = "stub/model"
ADAM = types.AdamParams(learning_rate=1e-3)


def service_at(url: str) -> Any:
    """A client that comes in by the Tinker door, which the server would say."""
    headers = {"X-Trainmaster-Door": "tinker"}
    modern = "default_headers_overrides" in inspect.signature(tinker.ServiceClient.__init__).parameters
    return tinker.ServiceClient(
        base_url=url, api_key="tml-test", **{"default_headers_overrides" if modern else "default_headers": headers}
    )


def datum(tokens: int, target: int = 3) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1] * tokens),
        loss_fn_inputs={"target_tokens": [target] * tokens, "weights": [1.0] * tokens},
    )


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def training(url: str) -> dict[str, Any]:
    service = service_at(url)
    models = [model.model_name for model in service.get_server_capabilities().supported_models]
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    futures = [(client.forward_backward([datum(4)], "cross_entropy"), client.optim_step(ADAM)) for _ in range(3)]
    losses = [forward_backward.result().metrics["loss:sum"] for forward_backward, _ in futures]
    futures[-1][1].result()
    forward = client.forward([datum(2), datum(3)], "cross_entropy").result()
    path = client.save_state("three").result().path
    client.optim_step(ADAM).result()
    client.load_state(path).result()
    after = client.forward_backward([datum(4)], "cross_entropy").result().metrics
    info = client.get_info()
    resumed = service.create_training_client_from_state_with_optimizer(path)
    resumed_loss = resumed.forward_backward([datum(4)], "cross_entropy").result().metrics["loss:sum"]
    return {
        "models": models,
        "losses": losses,
        "forward": [output["logprobs"].tolist() for output in forward.loss_fn_outputs],
        "path": path,
        "after": after["steps_before:max"],
        "model_name": info.model_data.model_name,
        "resumed_loss": resumed_loss,
    }


def slow(url: str) -> dict[str, Any]:
    """One thing after the other, each waited for; with what the client warned of meanwhile."""
    warnings: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(listener)
    client = service_at(url).create_lora_training_client(base_model=BASE_MODEL, rank=8)
    found = []
    for _ in range(2):
        passed = client.forward_backward([datum(4)], "cross_entropy").result()
        found.append([passed.metrics["loss:sum"], client.optim_step(ADAM).result().metrics["steps"]])
    return {"found": found, "warnings": warnings}


def chunks(url: str) -> dict[str, Any]:
    client = service_at(url).create_lora_training_client(base_model=BASE_MODEL, rank=8)
    data = [datum(1, target=number % 7) for number in range(2500)]
    forward_backward, step = client.forward_backward(data, "cross_entropy"), client.optim_step(ADAM)
    result = forward_backward.result()
    return {
        "logprobs": [output["logprobs"].tolist()[0] for output in result.loss_fn_outputs],
        "loss": result.metrics["loss:sum"],
        "step": step.result().metrics,
    }


def sampling(url: str) -> dict[str, Any]:
    service = service_at(url)
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    client.optim_step(ADAM).result()
    params = types.SamplingParams(max_tokens=3, temperature=1.0)
    kept = client.save_weights_and_get_sampling_client()
    client.optim_step(ADAM).result()
    named = service.create_sampling_client(model_path=client.save_weights_for_sampler("s").result().path)
    base = service.create_sampling_client(base_model=BASE_MODEL)
    drawn = {}
    for name, sampler in {"kept": kept, "named": named, "base": base}.items():
        futures = [sampler.sample(prompt=prompt(10, n), num_samples=2, sampling_params=params) for n in range(20)]
        drawn[name] = [[list(one.tokens) for one in future.result().sequences] for future in futures]
    logprobs = base.compute_logprobs(prompt(1, 2, 3)).result()
    return {**drawn, "logprobs": logprobs}


def errors(url: str) -> dict[str, Any]:
    service = service_at(url)
    client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8)
    told = {}
    try:
        client.load_state(f"tinker://{client.model_id}/weights/none").result()
    except tinker.RequestFailedError as error:
        told["load"] = [str(error), error.category.value]
    told["after"] = client.optim_step(ADAM).result().metrics
    try:
        service.create_lora_training_client(base_model="other", rank=8)
    except tinker.RequestFailedError as error:
        told["create"] = [str(error), error.category.value]
    try:
        service.create_sampling_client(model_path="tinker://none/sampler_weights/none")
    except tinker.BadRequestError as error:
        told["sampler"] = str(error)
    return told


def death(url: str) -> dict[str, Any]:
    client = service_at(url).create_lora_training_client(base_model=BASE_MODEL, rank=8)
    path = client.save_state("last").result().path
    waiting = client.optim_step(ADAM)
    print(json.dumps({"waiting": True}), flush=True)
    try:
        waiting.result()
    except tinker.RequestFailedError as error:
        return {"path": path, "error": str(error), "category": error.category.value}
    return {}


if __name__ == "__main__":
    # One case after the other, each at a URL of its own.
    for case, url in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print(json.dumps(globals()[case](url)), flush=True)
    # Clients leave threads behind, which may abort an interpreter that ends under them.
    os._exit(0)
