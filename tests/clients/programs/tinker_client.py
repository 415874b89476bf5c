"""What a user of `tinker` does, from the first step to the last, in the words of every version that is tested."""

import os
from typing import Any

import tinker
from batches import batch, datum, logprobs, losses, sequence
from scenarios import ask, main, raised
from tinker_sampling import base_sampler, copies, nucleus, prompt_logprobs, sample, short_after_long, stop_strings
from tinker_session import ADAM, MODEL, new_trainer, prompt, sampled

# -- training --


def capabilities() -> Any:
    found = tinker.ServiceClient().get_server_capabilities()
    return [model.model_name for model in found.supported_models]


def train() -> Any:
    """Five steps, each waited for."""
    trainer = new_trainer()
    data = batch(tinker)
    first = trainer.forward(data, "cross_entropy").result()
    found = []
    for _ in range(5):
        passed = trainer.forward_backward(data, "cross_entropy").result()
        stepped = trainer.optim_step(ADAM).result()
        of_rows = sum(
            -lp * float(weight)
            for row, one in zip(logprobs(passed), data, strict=True)
            for lp, weight in zip(row, one.loss_fn_inputs["weights"].data, strict=True)
        )
        found.append({"loss": passed.metrics["loss:sum"], "of_rows": of_rows})
    return {
        "steps": found,
        "lengths": [len(row) for row in logprobs(passed)],
        "wanted_lengths": [one.model_input.length for one in data],
        "metrics": sorted(passed.metrics),
        "optim_metrics": sorted(stepped.metrics or ()),
        "forward_is_the_same": logprobs(first) == logprobs(new_trainer().forward(data, "cross_entropy").result()),
    }


def pipelined() -> Any:
    """Twelve pairs sent at once, and the same twelve one after the other."""
    waited = losses(new_trainer(), ADAM, batch(tinker), 12)
    trainer = new_trainer()
    pairs = [(trainer.forward_backward(batch(tinker), "cross_entropy"), trainer.optim_step(ADAM)) for _ in range(12)]
    sent = []
    for passed, stepped in reversed(pairs):  # in whichever order they are asked for
        stepped.result()
        sent.append(passed.result().metrics["loss:sum"])
    return {"waited": waited, "sent": sent[::-1]}


def accumulated() -> Any:
    """Two passes before a step are one pass over both batches."""
    one, two = new_trainer(), new_trainer()
    first, second = batch(tinker), batch(tinker, start=4)
    for data in (first, second):
        one.forward_backward(data, "cross_entropy").result()
    one.optim_step(ADAM).result()
    two.forward_backward(first + second, "cross_entropy").result()
    two.optim_step(ADAM).result()
    return [logprobs(trainer.forward(first, "cross_entropy").result()) for trainer in (one, two)]


def chunked() -> Any:
    """More rows than the client sends in one request."""
    trainer = new_trainer()
    data = [datum(tinker, sequence(index % 7, 4)) for index in range(2100)]
    passed = trainer.forward_backward(data, "cross_entropy").result()
    rows = logprobs(passed)
    trainer.optim_step(ADAM).result()
    return {
        "rows": len(rows),
        "in_order": all(rows[index] == rows[index % 7] for index in range(len(rows))),
        "loss": passed.metrics["loss:sum"],
        "of_rows": -sum(sum(row[1:]) for row in rows),
    }


def policy_losses() -> Any:
    """Losses of the client's own list with advantages; the same log-probabilities make the ratio 1."""
    found = {}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        trainer = new_trainer()
        tokens = [sequence(index) for index in range(3)]
        plain = logprobs(trainer.forward([datum(tinker, row) for row in tokens], "cross_entropy").result())
        data = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": row[1:],
                    "logprobs": said,
                    "advantages": [1.0 if index else -1.0] * len(said),
                },
            )
            for index, (row, said) in enumerate(zip(tokens, plain, strict=True))
        ]
        config = {"beta": 0.1} if name == "dro" else None
        passed = trainer.forward_backward(data, name, loss_fn_config=config).result()
        trainer.optim_step(ADAM).result()
        after = logprobs(trainer.forward([datum(tinker, row) for row in tokens], "cross_entropy").result())
        found[name] = {
            "loss": passed.metrics["loss:sum"],
            "liked": sum(map(sum, after[1:])) - sum(map(sum, plain[1:])),
            "disliked": sum(after[0]) - sum(plain[0]),
        }
    return found


def custom_loss() -> Any:
    """A loss of one's own, which needs torch: the same as cross-entropy gives the same as cross-entropy."""
    data = batch(tinker)

    def cross_entropy(data: list[Any], said: list[Any]) -> Any:
        rows = zip(data, said, strict=True)
        loss = sum(-(lp * one.loss_fn_inputs["weights"].to_torch()).sum() for one, lp in rows)
        return loss, {"mine": 1.0}

    plain, custom = new_trainer(), new_trainer()
    found: dict[str, list[float]] = {"plain": [], "custom": []}
    for _ in range(3):
        found["plain"].append(plain.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])
        plain.optim_step(ADAM).result()
        passed = custom.forward_backward_custom(data, cross_entropy).result()
        found["custom"].append(passed.metrics["loss:sum"])
        custom.optim_step(ADAM).result()
    return {**found, "metrics": sorted(passed.metrics), "by_handle": _loss_by_handle(data)}


def _loss_by_handle(data: list[Any]) -> float:
    """The same, declared first: where the server takes no losses, the client computes it all the same."""

    def cross_entropy(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/own:sum": loss}

    service = tinker.ServiceClient()
    handle = service.create_custom_loss(cross_entropy, input_ranks={"logprobs": 1, "weights": 1}).result()
    passed = new_trainer(service).forward_backward_custom(data, handle).result()
    return float(passed.metrics["custom/own:sum"])


def two_clients() -> Any:
    """Two adapters, of different ranks, trained at the same time by two sessions, and each alone."""
    first, second = batch(tinker), batch(tinker, start=8)
    alone = [losses(new_trainer(seed=1), ADAM, first, 4), losses(new_trainer(seed=2, rank=4), ADAM, second, 4)]
    trainers = [new_trainer(seed=1), new_trainer(seed=2, rank=4)]
    sent: list[list[Any]] = [[], []]
    for _ in range(4):
        for trainer, data, futures in zip(trainers, (first, second), sent, strict=True):
            futures.append(trainer.forward_backward(data, "cross_entropy"))
            trainer.optim_step(ADAM)
    together = [[passed.result().metrics["loss:sum"] for passed in futures] for futures in sent]
    return {"alone": alone, "together": together}


# -- saving --


def save_and_resume() -> Any:
    """From a saved state everything goes on as if nothing had been."""
    service = tinker.ServiceClient()
    trainer = new_trainer(service)
    losses(trainer, ADAM, batch(tinker), 3)
    path = trainer.save_state("half").result().path
    went_on = losses(trainer, ADAM, batch(tinker), 4)
    other = tinker.ServiceClient()
    resumed = losses(other.create_training_client_from_state_with_optimizer(path), ADAM, batch(tinker), 4)
    fresh = losses(other.create_training_client_from_state(path), ADAM, batch(tinker), 4)
    loaded = new_trainer(other, seed=5)
    loaded.load_state_with_optimizer(path).result()
    return {
        "path": path,
        "went_on": went_on,
        "resumed": resumed,
        "without_optimizer": fresh,
        "loaded": losses(loaded, ADAM, batch(tinker), 4),
    }


def lost_answers() -> Any:
    """The same, by a way on which answers get lost."""
    direct = os.environ["TINKER_BASE_URL"]
    os.environ["TINKER_BASE_URL"] = ask("the way that loses answers")
    try:
        return save_and_resume()
    finally:
        os.environ["TINKER_BASE_URL"] = direct


def saved_sampler() -> Any:
    """Weights for sampling under a name, opened by another session; each at once when it is saved."""
    trainer = new_trainer()
    stranger = tinker.ServiceClient()
    losses(trainer, ADAM, batch(tinker), 3)
    found = []
    for index in range(5):
        path = trainer.save_weights_for_sampler(f"for-sampling-{index}").result().path
        other = stranger.create_sampling_client(model_path=path)
        found.append({"path": path, "other": sampled(other, 2, seed=4), "base_model": other.get_base_model()})
    return {"own": sampled(trainer.create_sampling_client(path), 2, seed=4), "others": found}


def rest() -> Any:
    """Runs, checkpoints and sessions, as the REST client lists and changes them."""
    service = tinker.ServiceClient(user_metadata={"purpose": "a test"})
    trainer = new_trainer(service)
    losses(trainer, ADAM, batch(tinker), 1)
    weights = trainer.save_state("one").result().path
    sampler = trainer.save_weights_for_sampler("two").result().path
    client = tinker.RestClient()
    run_id = weights.removeprefix("tinker://").partition("/")[0]
    run = client.get_training_run(run_id).result()
    listed = client.list_checkpoints(run_id).result().checkpoints
    client.publish_checkpoint_from_tinker_path(weights).result()
    published = {one.tinker_path: one.public for one in client.list_checkpoints(run_id).result().checkpoints}
    client.unpublish_checkpoint_from_tinker_path(weights).result()
    client.set_checkpoint_ttl_from_tinker_path(weights, 3600).result()
    expiring = {one.tinker_path: str(one.expires_at) for one in client.list_checkpoints(run_id).result().checkpoints}
    info = client.get_weights_info_by_tinker_path(weights).result()
    session_id = service.holder.get_session_id()
    session = client.get_session(session_id).result()
    client.delete_checkpoint_from_tinker_path(sampler).result()
    left = [one.tinker_path for one in client.list_checkpoints(run_id).result().checkpoints]
    gone = raised(
        lambda: (
            service.create_sampling_client(model_path=sampler)
            .sample(prompt(), num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=1))
            .result()
        )
    )
    return {
        "run": {"id": run.training_run_id, "base_model": run.base_model, "rank": run.lora_rank, "lora": run.is_lora},
        "by_path": client.get_training_run_by_tinker_path(weights).result().training_run_id == run_id,
        "listed": sorted((one.checkpoint_id, one.checkpoint_type, one.tinker_path) for one in listed),
        "mine": weights in [one.tinker_path for one in client.list_user_checkpoints().result().checkpoints],
        "runs": run_id in [one.training_run_id for one in client.list_training_runs().result().training_runs],
        "published": published[weights],
        "expires": expiring[weights],
        "info": {"base_model": info.base_model, "is_lora": info.is_lora, "lora_rank": info.lora_rank},
        "session_has_run": run_id in session.training_run_ids,
        "sessions": session_id in client.list_sessions().result().sessions,
        "weights": weights,
        "left": left,
        "gone": gone,
    }


def restarted() -> Any:
    """The server is restarted between an acknowledgement and the first look at the result."""
    trainer = new_trainer()
    data = batch(tinker)
    before = losses(trainer, ADAM, data, 2)
    passed = [trainer.forward_backward(data, "cross_entropy") for _ in range(3)]
    stepped = trainer.optim_step(ADAM)
    ask("restart the server")
    found = [one.result().metrics["loss:sum"] for one in passed]
    stepped.result()
    return {"before": before, "during": found, "after": losses(trainer, ADAM, data, 2)}


def trainer_killed() -> Any:
    """The trainer dies under a client; only what was saved goes on, and it is said so."""
    service = tinker.ServiceClient()
    trainer = new_trainer(service)
    data = batch(tinker)
    losses(trainer, ADAM, data, 2)
    path = trainer.save_state("before-the-end").result().path
    went_on = losses(trainer, ADAM, data, 3)
    ask("kill the trainer")
    later = raised(lambda: trainer.forward_backward(data, "cross_entropy").result())
    new = tinker.ServiceClient().create_training_client_from_state_with_optimizer(path)
    return {"path": path, "went_on": went_on, "later": later, "resumed": losses(new, ADAM, data, 3)}


# -- what goes wrong --


def mistakes() -> Any:
    """Every mistake is told of, and the next request works as if it had not been made."""
    trainer = new_trainer()
    good = batch(tinker)
    bad = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([4, 5, 6]),
        loss_fn_inputs={"target_tokens": [5, 6], "weights": [1.0, 1.0]},
    )
    outside = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([4, 100_000]),
        loss_fn_inputs={"target_tokens": [5, 6], "weights": [1.0, 1.0]},
    )
    long = datum(tinker, sequence(0, 1100))
    missing = tinker.Datum(model_input=tinker.ModelInput.from_ints([4, 5]), loss_fn_inputs={"target_tokens": [5, 6]})
    service = tinker.ServiceClient()
    found = {
        "unknown_model": raised(lambda: service.create_lora_training_client(base_model="nobody/knows-it")),
        "unknown_loss": raised(lambda: trainer.forward_backward(good, "no_such_loss").result()),
        "wrong_length": raised(lambda: trainer.forward_backward([bad], "cross_entropy").result()),
        "token_outside": raised(lambda: trainer.forward_backward([outside], "cross_entropy").result()),
        "too_long": raised(lambda: trainer.forward_backward([long], "cross_entropy").result()),
        "missing_input": raised(lambda: trainer.forward_backward([missing], "importance_sampling").result()),
        "missing_state": raised(lambda: trainer.load_state("tinker://nobody:train:0/weights/nothing").result()),
        "wrong_key": raised(
            lambda: tinker.ServiceClient(api_key="tml-nobody").create_lora_training_client(base_model=MODEL)
        ),
    }
    return {"mistakes": found, "losses": losses(trainer, ADAM, good, 3)}


if __name__ == "__main__":
    main(
        capabilities,
        train,
        pipelined,
        accumulated,
        chunked,
        policy_losses,
        custom_loss,
        two_clients,
        sample,
        stop_strings,
        prompt_logprobs,
        nucleus,
        base_sampler,
        copies,
        short_after_long,
        save_and_resume,
        lost_answers,
        saved_sampler,
        rest,
        mistakes,
        restarted,
        trainer_killed,
    )
