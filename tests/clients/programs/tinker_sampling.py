"""What a user of `tinker` does with a sampling client."""

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import tinker
from batches import WORDS, batch, datum, logprobs, losses, sequence
from tinker_session import ADAM, MODEL, new_trainer, prompt, sampled
from tokenizers import Tokenizer


def sample() -> Any:
    """A trained model, asked in every way."""
    trainer = new_trainer()
    losses(trainer, ADAM, batch(tinker), 5)
    sampler = trainer.save_weights_and_get_sampling_client()
    several = sampled(sampler, 3, seed=7)
    greedy = sampled(sampler, 1, temperature=0.0, max_tokens=12)[0]
    # How likely training finds what was sampled.
    differences = []
    for one in [*several, *sampled(sampler, 2, seed=8, max_tokens=32)]:
        tokens = prompt().to_ints() + one["tokens"]
        data = [datum(tinker, tokens)]
        trained = logprobs(trainer.forward(data, "cross_entropy").result())[0][-len(one["tokens"]) :]
        differences += [abs(a - b) for a, b in zip(trained, one["logprobs"], strict=True)]
    stop = greedy["tokens"][4]
    until_token = sampled(sampler, 1, temperature=0.0, max_tokens=12, stop=[stop])[0]
    before = sampled(sampler, 2, seed=11)
    losses(trainer, ADAM, batch(tinker, start=16), 10)
    return {
        "several": several,
        "again": sampled(sampler, 3, seed=7),
        "greedy": greedy,
        "greedy_again": sampled(sampler, 1, temperature=0.0, max_tokens=12)[0],
        "mean_difference": sum(differences) / len(differences),
        "stop": stop,
        "until_token": until_token,
        "before": before,
        "after_ten_more_steps": sampled(sampler, 2, seed=11),
        "of_the_new_weights": sampled(trainer.save_weights_and_get_sampling_client(), 2, seed=11),
        "top_one": sampled(sampler, 1, seed=5, top_k=1, max_tokens=12)[0],
    }


def stop_strings() -> Any:
    """Where the text of what was sampled says so."""
    trainer = new_trainer()
    sampler = trainer.save_weights_and_get_sampling_client()
    # What `sampler.get_tokenizer()` reads, too, with transformers, which takes long to import.
    tokenizer = Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    plain = sampled(sampler, 1, temperature=0.0, max_tokens=16)[0]["tokens"]
    return {
        "plain": plain,
        "tokenizer": [tokenizer.decode([token], skip_special_tokens=False) for token in plain],
        "stopped": [
            sampled(
                sampler, 1, temperature=0.0, max_tokens=16, stop=[tokenizer.decode([token], skip_special_tokens=False)]
            )[0]
            for token in plain[:3]
        ],
        "across_tokens": sampled(
            sampler,
            1,
            temperature=0.0,
            max_tokens=16,
            stop=["no such text", tokenizer.decode(plain[2:4], skip_special_tokens=False)],
        )[0],
    }


def prompt_logprobs() -> Any:
    """How likely a prompt is, and what else would have been."""
    trainer = new_trainer()
    sampler = trainer.save_weights_and_get_sampling_client()
    trained = logprobs(trainer.forward([datum(tinker, sequence(0, 6))], "cross_entropy").result())[0]
    answer = sampler.sample(
        prompt(),
        num_samples=1,
        sampling_params=tinker.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    return {
        "trained": trained,
        "computed": [None if value is None else float(value) for value in sampler.compute_logprobs(prompt()).result()],
        "included": [None if value is None else float(value) for value in answer.prompt_logprobs],
        "top": [None if row is None else [[int(k), float(v)] for k, v in row] for row in answer.topk_prompt_logprobs],
    }


def nucleus() -> Any:
    """One token after a prompt, drawn often under each rule, and how likely each token is there."""
    trainer = new_trainer()
    losses(trainer, ADAM, batch(tinker), 2)
    sampler = trainer.save_weights_and_get_sampling_client()
    asked = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints([*prompt().to_ints(), token])) for token in range(WORDS)
    ]
    whole = [float(one.result()[-1]) for one in asked]
    rules: dict[str, dict[str, Any]] = {
        "open": {},
        "top_p": {"top_p": 0.6},
        "tiny_top_p": {"top_p": 1e-6},
        "top_k": {"top_k": 3},
        "both": {"top_k": 5, "top_p": 0.5},
        "cold": {"temperature": 0.5},
    }
    drawn = {name: _drawn(sampler, seed=5, **rule) for name, rule in rules.items()}
    return {
        "logprobs": whole,
        "drawn": drawn,
        "again": _drawn(sampler, seed=5, **rules["top_p"])["tokens"],
        "other_seed": _drawn(sampler, seed=6, **rules["top_p"])["tokens"],
    }


def _drawn(sampler: Any, **params: Any) -> dict[str, list[Any]]:
    found = sampled(sampler, 400, max_tokens=1, stop=[], **params)
    return {"tokens": [one["tokens"][0] for one in found], "logprobs": [one["logprobs"][0] for one in found]}


def base_sampler() -> Any:
    """The model as it is, without any training."""
    sampler = tinker.ServiceClient().create_sampling_client(base_model=MODEL)
    untrained = new_trainer().save_weights_and_get_sampling_client()
    return {
        "base": sampled(sampler, 2, seed=3),
        "untrained": sampled(untrained, 2, seed=3),
    }


def copies() -> Any:
    """A sampling client and its copies, pickled and by its handle, in this process and in another one."""
    trainer = new_trainer()
    losses(trainer, ADAM, batch(tinker), 2)
    sampler = trainer.save_weights_and_get_sampling_client()
    handle = sampler.get_sampler_handle()
    pickled = pickle.dumps({"client": sampler, "handle": handle})
    # Where the server says so, clients ask which of their samples have ended, in the place of each for its own.
    said = json.loads(base64.urlsafe_b64decode(handle))
    said["holder"]["client_config"]["sample_use_retrieve_futures"] = True
    polling = base64.urlsafe_b64encode(json.dumps(said).encode()).decode()
    own = sampled(sampler, 2, seed=7)
    copy = pickle.loads(pickled)["client"]
    here = {
        "pickled": sampled(copy, 2, seed=7),
        "again": sampled(copy, 2, seed=7),
        "copy_of_the_copy": sampled(pickle.loads(pickle.dumps(copy)), 2, seed=7),
        "by_handle": sampled(tinker.SamplingClient.from_sampler_handle(handle), 2, seed=7),
        "polling": sampled(tinker.SamplingClient.from_sampler_handle(polling), 2, seed=7),
    }
    program = Path(__file__).with_name("tinker_copy.py")
    there = subprocess.run([sys.executable, program], input=pickled, stdout=subprocess.PIPE, check=True, timeout=300)
    return {
        "own": own,
        "here": here,
        "there": json.loads(there.stdout),
        "base_model": copy.get_base_model(),
        "own_afterwards": sampled(sampler, 2, seed=7),
    }


def short_after_long() -> Any:
    """A short request that is sent after a long one ends before it."""
    sampler = new_trainer().save_weights_and_get_sampling_client()
    ended: list[str] = []
    futures = []
    for name, count in (("long", 256), ("short", 4)):
        params = tinker.SamplingParams(max_tokens=count, temperature=1.0, seed=1, stop=[])
        future = sampler.sample(prompt(), num_samples=1, sampling_params=params)
        future.add_done_callback(lambda _, name=name: ended.append(name))
        futures.append(future)
    answers = [future.result() for future in futures]
    return {"ended": ended, "lengths": [len(answer.sequences[0].tokens) for answer in answers]}
