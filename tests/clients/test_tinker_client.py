"""The `tinker` package against a real server: everything that its users do, and what older versions do.

0.24.1 speaks JSON both ways, 0.25.0 is the first that speaks protobuf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from lossy_proxy import LossyProxy
from tinker_calls import ADAM, PASS, Plain

from client_model import CONTEXT, FIREWORKS_NAME, HUB_NAME
from client_programs import Asked, Client, facts, kill_trainer
from patience import PATIENCE_S
from real_server import RealServer

SAME = ("train", "pipelined", "chunked", "sample", "prompt_logprobs")
"""What older versions see the same numbers of."""


@pytest.fixture(scope="module")
def proxy(service_server: RealServer) -> Iterator[LossyProxy]:
    with LossyProxy(service_server.url).serving() as serving:
        yield serving


@pytest.fixture(scope="module")
def results(client: Callable[[str], Client], service_server: RealServer) -> dict[str, Any]:
    """What every scenario has to say; those that do not leave the server alone come last."""

    def kill(_: dict[str, Any]) -> None:
        [job] = [one for one in service_server.data("GET", "/v1/jobs")["jobs"] if one["status"] == "TRAINING"]
        kill_trainer(service_server, job["job_id"])

    names = (
        "capabilities",
        "train",
        "pipelined",
        "accumulated",
        "chunked",
        "policy_losses",
        "two_clients",
        "sample",
        "stop_strings",
        "prompt_logprobs",
        "nucleus",
        "base_sampler",
        "copies",
        "short_after_long",
        "save_and_resume",
        "saved_sampler",
        "rest",
        "mistakes",
        "restarted",
        "trainer_killed",
    )
    asked: dict[str, Asked] = {
        "restart the server": lambda _: restart(service_server),
        "kill the trainer": kill,
    }
    return client("tinker").scenarios("tinker_client.py", *names, asked=asked, timeout_s=2 * PATIENCE_S)


# tests/trainer_service/test_service_clients.py has them, too.
@pytest.fixture(
    scope="module",
    params=[pytest.param(f"tinker-{version}", marks=pytest.mark.long) for version in ("0.24.1", "0.25.0")],
)
def older(request: pytest.FixtureRequest, client: Callable[[str], Client], results: dict[str, Any]) -> dict[str, Any]:
    """What the scenarios of an older version have to say."""
    names = (*SAME, "save_and_resume", "saved_sampler", "mistakes")
    return client(request.param).scenarios("tinker_client.py", *names)


def test_capabilities_name_the_models(results: dict[str, Any]) -> None:
    assert {HUB_NAME, FIREWORKS_NAME} <= set(facts(results, "capabilities"))


def test_training_lowers_the_loss(results: dict[str, Any]) -> None:
    found = facts(results, "train")
    losses = [step["loss"] for step in found["steps"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    for step in found["steps"]:
        assert step["of_rows"] == pytest.approx(step["loss"], rel=1e-5)
    assert found["lengths"] == found["wanted_lengths"]
    assert found["forward_is_the_same"]
    assert all(name.count(":") == 1 for name in found["metrics"])


def test_pipelined_training_is_the_same_as_waiting(results: dict[str, Any]) -> None:
    found = facts(results, "pipelined")
    assert found["sent"] == found["waited"]
    assert found["sent"][-1] < found["sent"][0]


def test_gradients_accumulate_until_a_step(results: dict[str, Any]) -> None:
    one, two = facts(results, "accumulated")
    for row, other in zip(one, two, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_large_batches_travel_in_chunks_and_come_back_in_order(results: dict[str, Any]) -> None:
    found = facts(results, "chunked")
    assert found["rows"] == 2100
    assert found["in_order"]
    assert found["loss"] == pytest.approx(found["of_rows"], rel=1e-5)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_policy_losses_raise_what_was_good_and_lower_what_was_bad(results: dict[str, Any], loss: str) -> None:
    found = facts(results, "policy_losses")[loss]
    assert found["liked"] > 0 > found["disliked"]


def test_importance_sampling_of_the_own_samples_has_ratio_one(results: dict[str, Any]) -> None:
    """Two sequences of advantage 1 and one of -1, eleven tokens each."""
    assert facts(results, "policy_losses")["importance_sampling"]["loss"] == pytest.approx(-11.0, rel=1e-5)


def test_adapters_do_not_see_each_other(results: dict[str, Any]) -> None:
    found = facts(results, "two_clients")
    assert found["together"] == found["alone"]


def test_samples_repeat_with_their_seed(results: dict[str, Any]) -> None:
    found = facts(results, "sample")
    assert found["several"] == found["again"]
    assert found["greedy"] == found["greedy_again"]
    assert len({tuple(one["tokens"]) for one in found["several"]}) > 1
    assert [len(one["tokens"]) == 8 or one["stop_reason"] == "stop" for one in found["several"]] == [True] * 3
    assert found["top_one"]["tokens"] == found["greedy"]["tokens"]


def test_sampling_and_training_agree_on_log_probabilities(results: dict[str, Any]) -> None:
    assert facts(results, "sample")["mean_difference"] < 1e-6


def test_samples_end_with_the_token_that_stops_them(results: dict[str, Any]) -> None:
    found = facts(results, "sample")
    tokens = found["greedy"]["tokens"]
    assert found["until_token"]["tokens"] == tokens[: tokens.index(found["stop"]) + 1]
    assert found["until_token"]["stop_reason"] == "stop"


def test_samples_end_with_the_string_that_stops_them(results: dict[str, Any]) -> None:
    found = facts(results, "stop_strings")
    for word, one in zip(found["tokenizer"], found["stopped"], strict=False):
        first = next(index for index, other in enumerate(found["tokenizer"]) if word in other)
        assert one["tokens"] == found["plain"][: first + 1]
        assert one["stop_reason"] == "stop"
    assert found["across_tokens"]["tokens"] == found["plain"][:4]
    assert found["across_tokens"]["stop_reason"] == "stop"


def kept_by(rule: str, logprobs: list[float]) -> dict[int, float]:
    """The tokens that a rule leaves, each with its share of the draws."""
    temperature = 0.5 if rule == "cold" else 1.0
    weights = {token: math.exp(value / temperature) for token, value in enumerate(logprobs)}
    ordered = sorted(weights, key=lambda token: -weights[token])
    ordered = ordered[: {"top_k": 3, "both": 5}.get(rule)]
    share = {"top_p": 0.6, "tiny_top_p": 1e-6, "both": 0.5}.get(rule, 1.0) * sum(weights[token] for token in ordered)
    before = itertools.accumulate((weights[token] for token in ordered), initial=0.0)
    left = [token for token, sum_before in zip(ordered, before, strict=False) if sum_before < share]
    return {token: weights[token] / sum(weights[each] for each in left) for token in left}


@pytest.mark.parametrize("rule", ["open", "top_p", "tiny_top_p", "top_k", "both", "cold"])
def test_draws_have_the_distribution_of_their_rule(results: dict[str, Any], rule: str) -> None:
    found = facts(results, "nucleus")
    assert sum(map(math.exp, found["logprobs"])) == pytest.approx(1.0, abs=1e-4)
    drawn, expected = found["drawn"][rule]["tokens"], kept_by(rule, found["logprobs"])
    assert len(drawn) == 400
    assert set(drawn) <= set(expected)
    for token, share in expected.items():
        # Five standard deviations: with a seed this passes always or never.
        assert abs(drawn.count(token) / 400 - share) <= 5 * math.sqrt(share * (1 - share) / 400) + 1e-9
    # Whatever was left out: what is told is how likely the model finds it.
    for token, logprob in zip(drawn, found["drawn"][rule]["logprobs"], strict=True):
        assert logprob == pytest.approx(found["logprobs"][token], abs=1e-4)


def test_rules_leave_what_they_are_meant_to(results: dict[str, Any]) -> None:
    """The prompt is such that every rule leaves another number of tokens, few enough to be drawn in 400 draws."""
    found = facts(results, "nucleus")
    drawn = {rule: set(found["drawn"][rule]["tokens"]) for rule in found["drawn"]}
    assert len(drawn["tiny_top_p"]) == 1
    assert len(drawn["top_k"]) == 3
    assert drawn["tiny_top_p"] < drawn["both"] < drawn["top_p"] < drawn["open"]


def test_draws_repeat_with_their_seed_and_differ_with_another(results: dict[str, Any]) -> None:
    found = facts(results, "nucleus")
    assert found["again"] == found["drawn"]["top_p"]["tokens"]
    assert found["other_seed"] != found["again"]


def test_snapshots_do_not_change_with_training(results: dict[str, Any]) -> None:
    found = facts(results, "sample")
    assert found["after_ten_more_steps"] == found["before"]
    assert found["of_the_new_weights"] != found["before"]


def test_prompts_have_log_probabilities(results: dict[str, Any]) -> None:
    found = facts(results, "prompt_logprobs")
    assert found["computed"][0] is None
    assert found["computed"][1:] == pytest.approx(found["trained"], abs=1e-5)
    assert found["included"] == found["computed"]
    for logprob, top in zip(found["computed"][1:], found["top"][1:], strict=True):
        assert len(top) == 3
        assert max(value for _, value in top) >= logprob - 1e-5


def test_base_model_can_be_sampled(results: dict[str, Any]) -> None:
    found = facts(results, "base_sampler")
    assert [one["tokens"] for one in found["base"]] == [one["tokens"] for one in found["untrained"]]


def test_copies_of_a_sampling_client_sample_the_same(results: dict[str, Any]) -> None:
    found = facts(results, "copies")
    assert len({tuple(one["tokens"]) for one in found["own"]}) == 2
    for where in ("here", "there"):
        assert {how: samples for how, samples in found[where].items() if samples != found["own"]} == {}
    assert found["own_afterwards"] == found["own"]
    assert found["base_model"] == HUB_NAME


def test_short_requests_do_not_wait_for_long_ones(results: dict[str, Any]) -> None:
    assert facts(results, "short_after_long") == {"ended": ["short", "long"], "lengths": [256, 4]}


def test_resumed_training_goes_on_as_if_uninterrupted(results: dict[str, Any]) -> None:
    found = facts(results, "save_and_resume")
    assert found["path"].startswith("tinker://")
    assert found["path"].endswith("/weights/half")
    assert found["resumed"] == found["went_on"]
    assert found["loaded"] == found["went_on"]
    assert found["without_optimizer"][0] == found["went_on"][0]
    assert found["without_optimizer"] != found["went_on"]


def test_saved_weights_are_sampled_by_other_sessions(results: dict[str, Any]) -> None:
    found = facts(results, "saved_sampler")
    for index, one in enumerate(found["others"]):
        assert one["path"].endswith(f"/sampler_weights/for-sampling-{index}")
        assert (one["other"], one["base_model"]) == (found["own"], HUB_NAME)


def test_rest_client_lists_and_changes_what_is_saved(results: dict[str, Any]) -> None:
    found = facts(results, "rest")
    run_id = found["run"]["id"]
    assert found["run"] == {"id": run_id, "base_model": HUB_NAME, "rank": 8, "lora": True}
    assert found["listed"] == [
        ["sampler_weights/two", "sampler", f"tinker://{run_id}/sampler_weights/two"],
        ["weights/one", "training", f"tinker://{run_id}/weights/one"],
    ]
    assert found["by_path"] is found["mine"] is found["runs"] is found["published"] is True
    assert found["session_has_run"] is found["sessions"] is True
    assert found["info"] == {"base_model": HUB_NAME, "is_lora": True, "lora_rank": 8}
    assert found["expires"] != "None"
    assert found["left"] == [found["weights"]]
    assert "two" in found["gone"]["message"]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("unknown_model", "nobody/knows-it"),
        ("unknown_loss", "no_such_loss"),
        ("wrong_length", "target_tokens"),
        ("token_outside", "100000"),
        ("too_long", str(CONTEXT)),
        ("missing_input", "logprobs"),
        ("missing_state", "nothing"),
    ],
)
def test_mistakes_are_told_of(results: dict[str, Any], mistake: str, words: str) -> None:
    error = facts(results, "mistakes")["mistakes"][mistake]
    assert error["type"] in ("RequestFailedError", "BadRequestError", "NotFoundError"), error
    assert words in error["message"], error
    if error["type"] == "RequestFailedError":
        assert error["category"].lower().endswith("user"), error


def test_mistakes_leave_the_model_as_it_was(results: dict[str, Any]) -> None:
    losses = facts(results, "mistakes")["losses"]
    assert losses == [step["loss"] for step in facts(results, "train")["steps"]][:3]


def test_wrong_keys_are_refused(results: dict[str, Any]) -> None:
    assert facts(results, "mistakes")["mistakes"]["wrong_key"]["type"] == "AuthenticationError"


# tests/trainer_service/test_service_clients.py loses them, too, and test_fireworks_client.py those of a whole server.
@pytest.mark.long
def test_lost_answers_change_nothing(
    results: dict[str, Any], client: Callable[[str], Client], proxy: LossyProxy
) -> None:
    """What was done and not acknowledged is asked for again, and done once."""
    asked: dict[str, Asked] = {"the way that loses answers": lambda _: proxy.url}
    found = facts(client("tinker").scenarios("tinker_client.py", "lost_answers", asked=asked), "lost_answers")
    assert {"forward_backward", "optim_step", "retrieve_future"} <= set(proxy.lost)
    assert {**found, "path": ""} == {**facts(results, "save_and_resume"), "path": ""}


def restart(server: RealServer) -> None:
    """kill -9, and the next one at the same address."""
    port = server.url.rpartition(":")[2]
    server.kill()
    server.arguments = (*server.arguments, "--port", port)
    server.start()


def test_restart_of_the_server_loses_nothing(results: dict[str, Any]) -> None:
    """Between the acknowledgement of requests and the first look at their results."""
    found = facts(results, "restarted")
    # The three passes see the same weights, as the step comes after them.
    assert len(set(found["during"])) == 1
    assert found["before"][-1] > found["during"][0] > found["after"][-1]


def test_acknowledgement_outlives_a_kill_of_the_server(service_server: RealServer) -> None:
    """The id of a future is all that a client has to keep."""
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
        plain = Plain(server=service_server, http=http)
        plain.model_id = plain.new_model(plain.new_session())
        bodies = [plain.work(forward_backward_input=PASS), plain.work(adam_params=ADAM)]
        bodies += [plain.work(forward_backward_input=PASS)]
        operations = ["forward_backward", "optim_step", "forward_backward"]
        acks = [plain.post(*each).json() for each in zip(operations, bodies, strict=True)]
        restart(service_server)
        first = [plain.result(ack) for ack in acks]
        assert first[0]["metrics"]["loss:sum"] > first[2]["metrics"]["loss:sum"]
        assert [plain.result(ack) for ack in acks] == first
        # A client that heard no acknowledgement sends all of it again: it is the same, and nothing is done twice.
        assert [plain.post(*each).json() for each in zip(operations, bodies, strict=True)] == acks
        assert [plain.result(ack) for ack in acks] == first
        now = plain.done("forward_backward", plain.work(forward_backward_input=PASS))
        assert now["metrics"]["loss:sum"] == first[2]["metrics"]["loss:sum"]


def test_killed_trainer_goes_on_from_what_was_saved(results: dict[str, Any]) -> None:
    found = facts(results, "trainer_killed")
    assert found["later"]["type"] == "RequestFailedError"
    assert found["later"]["category"].lower().endswith("server")
    assert found["path"] in found["later"]["message"]
    assert found["resumed"] == found["went_on"]


# -- older versions --


@pytest.mark.parametrize("scenario", SAME)
def test_older_clients_see_the_same_numbers(older: dict[str, Any], results: dict[str, Any], scenario: str) -> None:
    assert facts(older, scenario) == facts(results, scenario)


def test_older_clients_save_and_resume(older: dict[str, Any]) -> None:
    found = facts(older, "save_and_resume")
    assert found["resumed"] == found["went_on"]
    saved = facts(older, "saved_sampler")
    assert all(one["other"] == saved["own"] for one in saved["others"])


def test_older_clients_are_told_of_mistakes(older: dict[str, Any], results: dict[str, Any]) -> None:
    found, expected = facts(older, "mistakes"), facts(results, "mistakes")
    assert {name: error["type"] for name, error in found["mistakes"].items()} == {
        name: error["type"] for name, error in expected["mistakes"].items()
    }
    assert found["losses"] == expected["losses"]
