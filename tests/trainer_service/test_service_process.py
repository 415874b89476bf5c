"""The engine process with its front: many models, training and sampling side by side, errors that stay small."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_service import BASE_MODEL, FEW_DESCRIPTORS, Client, FailedError, RunningService, data, running

from trainmaster.protocol.reasons import EXIT_STOPPED

PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running(tmp_path_factory.mktemp("service"), tiny, aliases=["other/name"]) as started:
        yield started


def failure(client: Client, ack: dict[str, Any]) -> FailedError:
    with pytest.raises(FailedError) as caught:
        client.result(ack)
    return caught.value


def test_models_of_many_clients_take_the_course_that_each_takes_alone(service: RunningService) -> None:
    ranks = (2, 4, 8)
    alone = [Client(service).create_model(rank=rank, seed=rank).train(range(4)) for rank in ranks]
    assert alone[0][1:] != alone[1][1:]
    together: list[list[float]] = [[] for _ in ranks]

    def train(number: int) -> None:
        together[number] = Client(service).create_model(rank=ranks[number], seed=ranks[number]).train(range(4))

    threads = [threading.Thread(target=train, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


def test_pipelined_steps_give_what_steps_one_by_one_give(service: RunningService) -> None:
    client = Client(service)
    expected = client.create_model(seed=3).train(range(5))
    model = client.create_model(seed=3)
    acks = []
    for seed in range(5):
        acks.append(model.ask_forward_backward(seed))
        model.ask("optim_step", {"adam_params": {"learning_rate": 0.01}})
    assert [client.result(ack)["metrics"]["loss:sum"] for ack in acks] == expected


def test_errors_are_told_through_the_future_and_change_nothing(service: RunningService) -> None:
    client = Client(service)
    expected = client.create_model(seed=4).train(range(3))
    model = client.create_model(seed=4)
    losses = [model.loss(0)]
    model.step()
    broken = data(9)
    broken[1]["model_input"]["chunks"][0]["tokens"][0] = 100_000
    asked = {
        "no_such_loss": {"forward_backward_input": {"data": data(9), "loss_fn": "no_such_loss"}},
        "100000": {"forward_backward_input": {"data": broken, "loss_fn": "cross_entropy"}},
        "context": {"forward_backward_input": {"data": data(9, length=600), "loss_fn": "cross_entropy"}},
        "forward_backward_input": {},
    }
    for said, fields in asked.items():
        error = failure(client, model.ask("forward_backward", fields))
        assert (error.category, said in str(error)) == ("user", True), error
    for fields in (
        {"adam_params": {"learning_rate": -1.0}},
        {"adam_params": {"learning_rate": "fast"}},
        {"adam_params": {"learning_rate": 10**400}},
        {"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}},
        {"grad_accumulation_normalization": "by_feeling"},
        {"adam_params": {"emit_grad_norm_metrics": "loud"}},
    ):
        assert failure(client, model.ask("optim_step", fields)).category == "user"
    losses.append(model.loss(1))
    model.step()
    losses.append(model.loss(2))
    assert losses == expected


def test_step_without_gradients_is_no_error(service: RunningService) -> None:
    """As after a forward_backward that failed: a loop goes on, and its metrics say that nothing was trained."""
    model = Client(service).create_model()
    assert model.do("optim_step", {})["metrics"] == {"skipped_without_gradients": 1.0}


def test_models_that_this_trainer_does_not_make_are_refused(service: RunningService) -> None:
    client = Client(service)
    for said, more in {
        "other-model": {"base_model": "other-model"},
        "lora_rank of 8": {"lora_config": {"rank": 9}},
        "lora_rank 0": {"lora_config": {"rank": 0}},
        r"not \['a', 'list'\]": {"base_model": ["a", "list"]},
        "dimuon": {"optimizer_config": {"type": "dimuon"}},
        r"the optimizer \['adamw'\]": {"optimizer_config": ["adamw"]},
        "projection": {"projection_head_dim": 16},
        "init_method": {"lora_config": {"rank": 4, "init_method": "lucky"}},
        "user_metadata": {"lora_config": {"rank": 4}, "user_metadata": ["no", "object"]},
    }.items():
        with pytest.raises(FailedError, match=said) as caught:
            client.create_model(rank=None, **more)
        assert caught.value.category == "user"
    assert client.create_model(rank=None, base_model="other/name").train([0])  # the rank is the job's


def test_frozen_reference_gives_logprobs_and_refuses_training(service: RunningService) -> None:
    client = Client(service)
    policy, reference = client.create_model(), client.create_model(rank=None, base_only=True)
    base = reference.logprobs()
    assert base == policy.logprobs()  # an adapter begins as nothing
    policy.train(range(3))
    assert reference.logprobs() == base != policy.logprobs()
    assert "base_only" in str(failure(client, reference.ask_forward_backward(0)))
    assert "base_only" in str(failure(client, reference.ask("optim_step", {})))
    assert "base_only" in str(failure(client, reference.ask("save_weights", {"path": "reference"})))


def test_gradient_norms_follow_the_normalization(service: RunningService) -> None:
    client = Client(service)
    norms = {}
    for normalization in (None, "num_sequences", "num_loss_tokens"):
        model = client.create_model(seed=6)
        model.loss(0, sequences=2, length=12)
        said = {"adam_params": {"learning_rate": 0.1, "emit_grad_norm_metrics": True}}
        more = {} if normalization is None else {"grad_accumulation_normalization": normalization}
        norms[normalization] = client.result(model.ask("optim_step", said | more))["metrics"]["grad_norm"]
    assert norms["num_sequences"] == pytest.approx(norms[None] / 2)
    assert norms["num_loss_tokens"] == pytest.approx(norms[None] / 24)


def test_unloaded_models_are_gone_and_so_are_those_of_ended_sessions(service: RunningService) -> None:
    client = Client(service)
    model, other = client.create_model(), client.create_model()
    assert client.result(client.post("unload_model", {"model_id": model.model_id}))["model_id"] == model.model_id
    assert "unloaded" in str(failure(client, model.ask_forward_backward(0)))
    assert other.train([0])
    service.http.post(f"/sessions/{client.session_id}/finish", json={"reason": {"type": "success"}, "detail": ""})
    assert failure(client, other.ask_forward_backward(0))


def test_sampling_sessions_stand_on_the_weights_of_their_moment(service: RunningService) -> None:
    client = Client(service, door="tinker")
    model = client.create_model(seed=8)
    model.train(range(2))
    session = model.do("save_weights_for_sampler", {"sampling_session_seq_id": 70})["sampling_session_id"]
    first = client.result(client.sample(session, 0, PROMPT, max_tokens=12, num_samples=2))
    model.train(range(10))
    assert client.result(client.sample(session, 1, PROMPT, max_tokens=12, num_samples=2)) == first
    later = model.do("save_weights_for_sampler", {"sampling_session_seq_id": 71})["sampling_session_id"]
    assert client.result(client.sample(later, 0, PROMPT, max_tokens=12, num_samples=2)) != first


def test_logprobs_of_sampling_and_of_training_agree(service: RunningService) -> None:
    client = Client(service)
    model = client.create_model(seed=9)
    model.train(range(6))
    session = model.do("save_weights_for_sampler", {"sampling_session_seq_id": 70})["sampling_session_id"]
    differences = []
    for seed in range(4):
        ack = client.sample(session, seed, PROMPT, max_tokens=24, seed=seed, stop=[])
        (sampled,) = client.result(ack)["sequences"]
        tokens = [*PROMPT, *sampled["tokens"]]
        datum = data(0, sequences=1, length=len(tokens) - 1)
        datum[0]["model_input"]["chunks"][0]["tokens"] = tokens[:-1]
        datum[0]["loss_fn_inputs"]["target_tokens"]["data"] = tokens[1:]
        passed = model.do("forward", {"forward_input": {"data": datum, "loss_fn": "cross_entropy"}})
        trained = passed["loss_fn_outputs"][0]["logprobs"]["data"][len(PROMPT) - 1 :]
        differences.append(np.abs(np.array(trained) - np.array(sampled["logprobs"])))
    assert np.concatenate(differences).mean() < 1e-6


def test_cancelled_sample_and_unknown_weights_are_errors_of_their_own(service: RunningService) -> None:
    client = Client(service)
    session = client.sampler(base_model=BASE_MODEL)
    acks = [client.sample(session, number, PROMPT, max_tokens=480, stop=[]) for number in range(3)]
    client.post("cancel_future", {"request_id": acks[1]["request_id"]})
    assert "cancelled" in str(failure(client, acks[1]))
    assert failure(client, client.sample(session, 3, [999_999], max_tokens=4)).category == "user"
    response = service.http.post(
        "/create_sampling_session",
        json={"session_id": client.session_id, "sampling_session_seq_id": 9, "model_path": "no-such-weights"},
    )
    assert (response.status_code, "no-such-weights" in response.text) == (400, True)
    assert client.result(acks[0])["sequences"]


def test_server_is_told_phases_capabilities_and_numbers(service: RunningService) -> None:
    assert service.events("phase")[0]["phase"] == "training"
    assert service.events("capable")[-1]["save"] is True
    assert service.http.get("/get_server_capabilities").json()["supported_models"] == [
        {"model_name": name, "max_context_length": 512, "trainable": True, "sampleable": True}
        for name in (BASE_MODEL, "other/name")
    ]
    Client(service).create_model().train(range(2))
    time.sleep(1.5)
    before = len(service.metrics())
    told = [record["values"] for record in service.metrics()]
    assert {"loss", "tokens_per_s", "samples_per_s", "models_loaded", "queued_requests"} <= {
        name for values in told for name in values
    }
    assert max(record["step"] for record in service.metrics()) >= 2
    time.sleep(2.5)
    assert len(service.metrics()) <= before + 1  # of an idle service there is nothing new to tell


def test_engine_may_have_as_many_descriptors_as_it_can(service: RunningService) -> None:
    """Every large body that it has not done yet is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most > FEW_DESCRIPTORS
    assert resource.prlimit(service.ranks[0].pid, resource.RLIMIT_NOFILE) == (most, most)


def test_settings_of_the_job_hold(tiny: Path, tmp_path: Path) -> None:
    settings = {"learning_rate": 0.05, "gradient_accumulation_steps": 2, "max_adapters": 2, "max_context_length": 64}
    with running(tmp_path, tiny, **settings) as service:
        client = Client(service)
        model, other = client.create_model(seed=1), client.create_model(seed=1)
        with pytest.raises(FailedError, match="max_adapters"):
            client.create_model()
        assert client.create_model(rank=None, base_only=True).logprobs()
        client.result(client.post("unload_model", {"model_id": other.model_id}))
        other = client.create_model(seed=1)
        before = model.logprobs()
        model.loss(0)
        assert model.do("optim_step", {})["metrics"] == {"accumulated_steps": 1.0}
        assert model.logprobs() == before
        model.loss(1)
        model.do("optim_step", {})
        # The same in one: both batches, and the job's rate by name.
        for seed, rate in ((0, 7.0), (1, 0.05)):
            other.loss(seed)
            other.step(rate)
        assert model.logprobs() == other.logprobs() != before
        assert "64" in str(failure(client, model.ask_forward_backward(0, length=65)))


def test_forward_only_trainer_computes_and_trains_nothing(tiny: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny, mode="forward_only", lora_rank=0) as service:
        client = Client(service)
        model = client.create_model(rank=0)
        assert len(model.logprobs()[0]) == 12
        for ack in (
            model.ask_forward_backward(0),
            model.ask("optim_step", {}),
            model.ask("save_weights", {"path": "a"}),
        ):
            error = failure(client, ack)
            assert (error.category, "forward_only" in str(error)) == ("user", True)
        service.ask_to_stop()
        assert service.wait() == [EXIT_STOPPED]
        assert service.events("checkpoint") == []


def test_two_ranks_train_as_one_does(service: RunningService, tiny: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny, ranks=2) as pair:
        model = Client(pair).create_model(seed=2)
        losses = [model.loss(seed, sequences=5) if not seed else model.train([seed])[0] for seed in range(4)]
        model.save("both")
        pair.ask_to_stop()
        assert pair.wait() == [EXIT_STOPPED] * 2, pair.log()
    alone = Client(service).create_model(seed=2)
    expected = [alone.loss(seed, sequences=5) if not seed else alone.train([seed])[0] for seed in range(4)]
    assert losses == pytest.approx(expected, rel=1e-5)
    resumed = Client(service).create_model()
    resumed.load("both", source=str(tmp_path / "checkpoints" / "weights" / "both" / "1"))
    assert resumed.train([4]) == pytest.approx(alone.train([4]), rel=1e-5)


def test_service_with_fp8_trains_and_samples_about_as_one_without(
    service: RunningService, tiny: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny, precision="fp8") as narrow:
        model = Client(narrow).create_model(seed=5)
        losses, expected = (each.train(range(4)) for each in (model, Client(service).create_model(seed=5)))
        assert losses != expected
        assert losses == pytest.approx(expected, rel=0.05)
        live = model.do("save_weights_for_sampler", {"sampling_session_seq_id": 1})["sampling_session_id"]
        client = Client(narrow)
        (sequence,) = client.result(client.sample(live, 0, PROMPT, max_tokens=4))["sequences"]
        assert len(sequence["logprobs"]) == len(sequence["tokens"]) == 4


def test_configuration_that_cannot_be_served_fails_with_the_reason(tiny: Path, tmp_path: Path) -> None:
    for number, (said, settings) in enumerate(
        {"precision": {"precision": "float7"}, "made for": {"max_context_length": 10_000}}.items()
    ):
        service = RunningService(tmp_path / str(number), tiny, **settings)
        try:
            assert service.wait() != [0]
            (event,) = service.events("failed")
            assert (event["reason"], said in event["message"]) == ("BAD_INPUT", True)
        finally:
            service.close()
