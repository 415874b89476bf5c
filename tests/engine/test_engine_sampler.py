"""Continuing prompts: many at once, and each as if it were alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import KINDS, VOCABULARY, make_checkpoint, random_tokens, reference
from torch import Tensor

from trainmaster.engine.adapters import Adapter, AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import (
    AdamOptions,
    Blame,
    Datum,
    EngineError,
    LoraOptions,
    Pass,
    PassResult,
    SampledSequence,
    SampleRequest,
    SampleResult,
    StopReason,
    Trained,
)

CONTEXT = 512
BLOCK_BYTES = 2 * 3 * 16 * 2 * 16 * 4
"""Of the tiny model: keys and values of 3 layers, 16 tokens, 2 heads of width 16, in float32."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Transformer:
    return Transformer(ModelConfig.read(checkpoint)).load(checkpoint)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    directory = make_checkpoint(tmp_path_factory.mktemp("other"), seed=1)
    return Transformer(ModelConfig.read(directory)).load(directory)


@pytest.fixture
def sampler(base: Transformer, checkpoint: Path) -> Sampler:
    return Sampler(base, checkpoint)


def trained_adapter(model: Transformer, seed: int = 0, rank: int = 4) -> Adapter:
    """One that changes what the model says."""
    adapter = Adapter(model.config, LoraOptions(rank=rank, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factors in adapter.factors.values():
            factors.b.normal_(std=0.05, generator=generator)
    return adapter


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random_tokens(length, seed).tolist())


def request(request_id: str = "it", length: int = 20, **fields: Any) -> SampleRequest:
    """Never stops by itself, unless `fields` say so."""
    given: dict[str, Any] = {"prompt": prompt_of(length), "max_tokens": 12, "seed": 1, "stop_tokens": ()}
    return SampleRequest(request_id=request_id, **(given | fields))


def run(sampler: Sampler, most: int = 2_000) -> dict[str, Any]:
    """What comes of all that is under way, in the order in which it ends."""
    ended: dict[str, Any] = {}
    for _ in range(most):
        if not sampler.pending:
            return ended
        ended.update(sampler.step())
    raise AssertionError(f"{sampler.pending} requests did not end")


def sampled(sampler: Sampler, snapshot: WeightsSnapshot, **fields: Any) -> SampleResult:
    sampler.submit(request(**fields), snapshot)
    (result,) = run(sampler).values()
    assert isinstance(result, SampleResult)
    return result


def one(result: SampleResult) -> SampledSequence:
    (sequence,) = result.sequences
    return sequence


def same(first: SampleResult, second: SampleResult) -> bool:
    """To the last bit."""
    pairs = zip(first.sequences, second.sequences, strict=True)
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs) and a.stop_reason is b.stop_reason
        for a, b in pairs
    )


@torch.no_grad()
def training_logprobs(model: Transformer, adapter: Adapter | None, tokens: list[int]) -> np.ndarray:
    """Of all tokens but the first, as training computes them."""
    given = torch.tensor(tokens)
    rows = AdapterRows([(adapter, len(tokens) - 1)])
    attention = PackedAttention([len(tokens) - 1])
    hidden = model.hidden(given[:-1], torch.arange(len(tokens) - 1), attention, rows)
    return target_logprobs(hidden, given[1:], model.unembedding, rows).numpy()


# What is sampled.


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_greedy_continuation_is_what_transformers_generates(tmp_path: Path, kind: str) -> None:
    directory = make_checkpoint(tmp_path, kind)
    model = Transformer(ModelConfig.read(directory)).load(directory)
    asked: dict[str, Any] = {"temperature": 0.0, "prompt_logprobs": True, "topk_prompt_logprobs": 3}
    result = sampled(Sampler(model, directory), WeightsSnapshot(transformer=model), length=45, max_tokens=30, **asked)
    tokens = [*prompt_of(45), *one(result).tokens.tolist()]
    with torch.no_grad():
        logits = reference(directory)(torch.tensor([tokens[:-1]])).logits[0]
    # Each is the likeliest after those before it, as transformers sees them.
    assert logits[44:].argmax(-1).tolist() == tokens[45:]
    assert len(tokens) == 75
    truth = logits.log_softmax(-1)
    logprobs = truth[range(74), tokens[1:]].numpy()
    assert one(result).logprobs == pytest.approx(logprobs[44:], abs=1e-4)
    assert result.prompt_logprobs is not None
    assert result.topk_prompt_logprobs is not None
    assert np.isnan(result.prompt_logprobs[0])
    assert result.prompt_logprobs[1:] == pytest.approx(logprobs[:44], abs=1e-4)
    ids, values = result.topk_prompt_logprobs
    assert ids[0].tolist() == [0, 0, 0]
    assert values[0].tolist() == [-99999.0] * 3
    best = truth[:44].topk(3)
    assert ids[1:].tolist() == best.indices.tolist()
    assert values[1:] == pytest.approx(best.values.numpy(), abs=1e-4)


@pytest.mark.parametrize("weights", ["adapter", "all"])
def test_logprobs_of_sampling_and_of_training_agree(
    base: Transformer, other_weights: Transformer, sampler: Sampler, weights: str
) -> None:
    if weights == "adapter":
        snapshot = WeightsSnapshot(transformer=base, adapter=trained_adapter(base).copy())
    else:
        snapshot = WeightsSnapshot(transformer=other_weights)
    lengths = (1, 3, 16, 17, 64, 256, 257, 300)
    for length in lengths:
        asked = request(str(length), length, max_tokens=40, num_samples=2, prompt_logprobs=True, temperature=0.8)
        sampler.submit(asked, snapshot)
    results = run(sampler)
    differences = []
    for length in lengths:
        result = results[str(length)]
        for sequence in result.sequences:
            tokens = [*prompt_of(length), *sequence.tokens.tolist()]
            truth = training_logprobs(snapshot.transformer, snapshot.adapter, tokens)
            differences.append(np.abs(truth - np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])))
    together = np.concatenate(differences)
    assert len(together) == 2 * sum(length + 39 for length in lengths)
    assert together.mean() < 1e-6
    assert together.max() < 1e-4


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "gemma3_text",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("llama", "gemma2", "qwen3_yarn", "qwen2", "gemma")),
    ],
)
def test_every_family_samples_and_trains_with_one_set_of_logprobs(tmp_path: Path, kind: str) -> None:
    """After steps of training, with a prompt of several pieces that is longer than a window."""
    directory = make_checkpoint(
        tmp_path, kind, **({"sliding_window": 100} if kind in ("gemma2", "gemma3_text") else {})
    )
    engine, prompt = Engine(directory), prompt_of(300, seed=7)
    engine.create_model("adapter", Trained.ADAPTER, LoraOptions(rank=4))
    engine.create_model("all", Trained.ALL)
    for seed in range(2):
        for model_id in engine.models:
            passed = engine.run([forward(model_id, random_tokens(330, seed).tolist(), backward=True)])[0]
            assert isinstance(passed, PassResult)
            engine.optim_step(model_id, AdamOptions(learning_rate=3e-3))
    sampler = Sampler(engine.base, directory)
    for model_id in engine.models:
        asked = request(model_id, prompt=prompt, max_tokens=30, num_samples=2, prompt_logprobs=True)
        sampler.submit(asked, engine.snapshot(model_id))
    for model_id, result in run(sampler).items():
        for sequence in result.sequences:
            passed = engine.run([forward(model_id, [*prompt, *sequence.tokens.tolist()])])[0]
            assert isinstance(passed, PassResult)
            sampled_ones = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
            difference = np.abs(passed.outputs[0]["logprobs"] - sampled_ones)
            assert difference.mean() < 1e-7
            assert difference.max() < 1e-5


def test_likeliest_tokens_of_the_sample_are_those_of_its_distribution(base: Transformer, sampler: Sampler) -> None:
    sequence = one(sampled(sampler, WeightsSnapshot(transformer=base), temperature=0.0, topk_sample_logprobs=5))
    assert sequence.topk is not None
    ids, values = sequence.topk
    assert ids.shape == values.shape == (12, 5)
    assert ids.dtype == np.int32
    assert ids[:, 0].tolist() == sequence.tokens.tolist()
    assert values[:, 0] == pytest.approx(sequence.logprobs, abs=1e-6)
    assert (np.diff(values, axis=1) <= 0).all()


def test_tempered_sampler_draws_the_same_and_tells_how_likely_that_was(base: Transformer, checkpoint: Path) -> None:
    rule = {"temperature": 0.5, "top_k": 20, "seed": 3}
    snapshot = WeightsSnapshot(transformer=base)
    raw = one(sampled(Sampler(base, checkpoint), snapshot, **rule))
    tempered = one(sampled(Sampler(base, checkpoint, tempered_logprobs=True), snapshot, **rule))
    assert tempered.tokens.tolist() == raw.tokens.tolist()
    assert tempered.logprobs.tolist() != raw.logprobs.tolist()
    plain = {"temperature": 1.0, "seed": 3}
    raw = one(sampled(Sampler(base, checkpoint), snapshot, **plain))
    tempered = one(sampled(Sampler(base, checkpoint, tempered_logprobs=True), snapshot, **plain))
    assert tempered.logprobs == pytest.approx(raw.logprobs, abs=1e-5)


def test_sampling_in_16_bits_gives_logprobs_near_those_of_training(checkpoint: Path) -> None:
    model = Transformer(ModelConfig.read(checkpoint)).load(checkpoint, dtype=torch.bfloat16)
    sequence = one(sampled(Sampler(model, checkpoint), WeightsSnapshot(transformer=model), max_tokens=40))
    truth = training_logprobs(model, None, [*prompt_of(20), *sequence.tokens.tolist()])[19:]
    assert np.abs(truth - sequence.logprobs).mean() < 0.1


# Chance.


@pytest.mark.parametrize(
    ("kind", "threads", "key_heads"),
    [("qwen3", 1, 2), pytest.param("qwen3", 3, 4, marks=pytest.mark.long), ("gemma2", 3, 2)],
)
def test_same_seed_gives_the_same_whatever_else_runs(tmp_path: Path, kind: str, threads: int, key_heads: int) -> None:
    torch.set_num_threads(threads)
    checkpoint, other = (
        make_checkpoint(tmp_path / str(seed), kind, seed=seed, num_key_value_heads=key_heads) for seed in (0, 1)
    )
    base, other_weights = (Transformer(ModelConfig.read(each)).load(each) for each in (checkpoint, other))
    adapters = [trained_adapter(base, seed, rank) for seed, rank in ((0, 4), (1, 2), (2, 8))]
    watched = {
        "base": (WeightsSnapshot(transformer=base), {"length": 30}),
        "adapter": (WeightsSnapshot(transformer=base, adapter=adapters[0].copy()), {"length": 7, "num_samples": 3}),
        "long": (WeightsSnapshot(transformer=base, adapter=adapters[1].copy()), {"length": 400, "top_p": 0.9}),
        "one": (WeightsSnapshot(transformer=base), {"length": 1, "top_k": 20, "temperature": 1.5}),
        "weights": (WeightsSnapshot(transformer=other_weights), {"length": 50}),
    }
    alone = {}
    for name, (snapshot, fields) in watched.items():
        alone[name] = sampled(Sampler(base, checkpoint), snapshot, request_id=name, max_tokens=24, **fields)
    crowded = Sampler(base, checkpoint)
    chance = np.random.default_rng(0)
    results: dict[str, Any] = {}
    for number, (name, (snapshot, fields)) in enumerate(watched.items()):
        for other in range(4):
            length, samples = int(chance.integers(1, 300)), int(chance.integers(1, 4))
            company = WeightsSnapshot(transformer=base, adapter=adapters[other % 3].copy() if other % 2 else None)
            fields_of_it = {"max_tokens": int(chance.integers(1, 30)), "num_samples": samples, "seed": other}
            crowded.submit(request(f"{number}/{other}", length, **fields_of_it), company)
        crowded.submit(request(name, max_tokens=24, **fields), snapshot)
        for _ in range(int(chance.integers(1, 9))):
            results.update(crowded.step())
    results.update(run(crowded))
    for name, result in alone.items():
        assert same(result, results[name]), name


def test_samples_differ_from_each_other_and_not_by_how_many_there_are(base: Transformer, sampler: Sampler) -> None:
    many = sampled(sampler, WeightsSnapshot(transformer=base), num_samples=4)
    few = sampled(sampler, WeightsSnapshot(transformer=base), num_samples=2)
    assert len({tuple(sequence.tokens) for sequence in many.sequences}) == 4
    assert [each.tokens.tolist() for each in few.sequences] == [each.tokens.tolist() for each in many.sequences[:2]]


def test_without_a_seed_nothing_is_repeated(base: Transformer, sampler: Sampler) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    tokens = {tuple(one(sampled(sampler, snapshot, seed=None)).tokens) for _ in range(3)}
    tokens |= {tuple(one(sampled(sampler, snapshot, seed=seed)).tokens) for seed in (1, 2)}
    assert len(tokens) == 5


@pytest.mark.parametrize("trained", [Trained.ADAPTER, Trained.ALL])
def test_snapshot_gives_the_same_after_steps_of_training(checkpoint: Path, trained: Trained) -> None:
    engine = Engine(checkpoint)
    engine.create_model("it", trained, LoraOptions(rank=4) if trained is Trained.ADAPTER else None)
    sampler = Sampler(engine.base, checkpoint)
    train(engine, "it")
    snapshot = engine.snapshot("it")
    before = sampled(sampler, snapshot, max_tokens=40)
    sampler.submit(request("meanwhile", max_tokens=40), snapshot)
    losses = []
    for _ in range(10):
        sampler.step()
        losses.append(train(engine, "it"))
    assert losses[-1] < losses[0] - 5
    assert same(run(sampler)["meanwhile"], before)
    assert same(sampled(sampler, snapshot, max_tokens=40), before)
    after = sampled(sampler, engine.snapshot("it"), max_tokens=40)
    assert not same(after, before)
    tokens = [*prompt_of(20), *one(after).tokens.tolist()]
    passed = engine.run([forward("it", tokens)])[0]
    assert isinstance(passed, PassResult)
    difference = np.abs(passed.outputs[0]["logprobs"][19:] - one(after).logprobs)
    assert difference.mean() < 1e-6


def forward(model_id: str, tokens: list[int], *, backward: bool = False) -> Pass:
    given = np.array(tokens, dtype=np.int64)
    inputs = {"target_tokens": given[1:], "weights": np.ones(len(tokens) - 1, dtype=np.float32)}
    return Pass(
        model_id=model_id,
        data=(Datum(tokens=given[:-1], inputs=inputs),),
        loss="cross_entropy",
        backward=backward,
    )


def train(engine: Engine, model_id: str) -> float:
    """One step; the loss before it."""
    passed = engine.run([forward(model_id, random_tokens(33, 5).tolist(), backward=True)])[0]
    assert isinstance(passed, PassResult)
    engine.optim_step(model_id, AdamOptions(learning_rate=0.005))
    return passed.metrics["loss:sum"]


# Ends.


def test_token_to_stop_at_ends_a_continuation_and_is_its_last(base: Transformer, sampler: Sampler) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    free = one(sampled(sampler, snapshot, max_tokens=30))
    assert free.stop_reason is StopReason.LENGTH
    assert len(free.tokens) == 30
    stop = int(free.tokens[7])
    first = free.tokens.tolist().index(stop)
    stopped = one(sampled(sampler, snapshot, max_tokens=30, stop_tokens=(stop, 271)))
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert np.array_equal(stopped.logprobs, free.logprobs[: first + 1])


def test_end_of_text_stops_unless_the_request_says_otherwise(
    base: Transformer, checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    free = one(sampled(Sampler(base, checkpoint), snapshot, max_tokens=30))
    ends = [int(free.tokens[9]), 271]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    sampler = Sampler(base, tmp_path)
    ended = one(sampled(sampler, snapshot, max_tokens=30, stop_tokens=None))
    assert ended.stop_reason is StopReason.STOP
    assert ended.tokens.tolist() == free.tokens[: free.tokens.tolist().index(ends[0]) + 1].tolist()
    assert same(sampled(sampler, snapshot, max_tokens=30, stop_tokens=()), sampled(sampler, snapshot, max_tokens=30))
    assert len(one(sampled(sampler, snapshot, max_tokens=30, stop_tokens=())).tokens) == 30


def test_string_to_stop_at_ends_a_continuation_with_the_token_that_completes_it(
    base: Transformer, sampler: Sampler
) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    written = "".join(map(chr, range(33, 127)))
    # Tokens 0 to 93 of the test tokenizer are these characters.
    for seed in range(20):
        free = one(sampled(sampler, snapshot, seed=seed, max_tokens=40))
        places = [at for at in range(3, 36) if all(token < 94 for token in free.tokens[at : at + 3])]
        if places:
            break
    at = places[0]
    string = "".join(written[token] for token in free.tokens[at : at + 3])
    stopped = one(sampled(sampler, snapshot, seed=seed, max_tokens=40, stop_strings=("\n\nUser:", string)))
    assert stopped.stop_reason is StopReason.STOP
    assert stopped.tokens.tolist() == free.tokens[: at + 3].tolist()


def test_lengths_end_a_continuation(base: Transformer, sampler: Sampler) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    filling = one(sampled(sampler, snapshot, length=CONTEXT - 5, max_tokens=None))
    assert len(filling.tokens) == 5
    assert filling.stop_reason is StopReason.LENGTH
    assert len(one(sampled(sampler, snapshot, length=CONTEXT - 5, max_tokens=100)).tokens) == 5
    for fields in ({"length": CONTEXT, "max_tokens": 1}, {"length": 9, "max_tokens": 0}):
        result = sampled(sampler, snapshot, prompt_logprobs=True, num_samples=2, **fields)
        assert [len(sequence.tokens) for sequence in result.sequences] == [0, 0]
        assert result.sequences[0].stop_reason is StopReason.LENGTH
        assert result.prompt_logprobs is not None
        assert np.isfinite(result.prompt_logprobs[1:]).all()
    assert sampler.load == 0


# Many at once.


def test_short_request_sent_after_a_long_one_ends_first(base: Transformer, sampler: Sampler) -> None:
    sampler.submit(request("long", 10, max_tokens=60), WeightsSnapshot(transformer=base))
    sampler.step()
    sampler.submit(request("short", 10, max_tokens=4), WeightsSnapshot(transformer=base))
    ended = [[name for name, _ in sampler.step()] for _ in range(4)]
    assert ended == [[], [], [], ["short"]]
    assert len(one(run(sampler)["long"]).tokens) == 60


def test_step_computes_all_adapters_of_a_base_at_once_and_full_weights_each_by_themselves(
    base: Transformer, other_weights: Transformer, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Transformer] = []
    compute = Transformer.hidden

    def counted(self: Transformer, *args: Any, **others: Any) -> Tensor:
        calls.append(self)
        return compute(self, *args, **others)

    monkeypatch.setattr(Transformer, "hidden", counted)
    for seed in range(5):
        adapter = trained_adapter(base, seed).copy() if seed else None
        sampler.submit(request(f"adapter {seed}", 10 + seed), WeightsSnapshot(transformer=base, adapter=adapter))
    for seed in range(3):
        sampler.submit(request(f"weights {seed}"), WeightsSnapshot(transformer=other_weights))
    sampler.step()
    assert sorted(calls, key=id) == sorted([base, other_weights], key=id)
    run(sampler)
    assert len(calls) == 2 * 12


def test_long_prompts_are_read_in_pieces_while_others_go_on(
    base: Transformer, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    compute = Transformer.hidden

    def counted(self: Transformer, tokens: Tensor, *args: Any, **others: Any) -> Tensor:
        rows.append(len(tokens))
        return compute(self, tokens, *args, **others)

    monkeypatch.setattr(Transformer, "hidden", counted)
    snapshot = WeightsSnapshot(transformer=base)
    sampler.submit(request("running", 5, max_tokens=20), snapshot)
    for number in range(12):
        sampler.submit(request(str(number), 500, max_tokens=2), snapshot)
    ended = list(run(sampler))
    assert ended[-1] == "running"
    assert len(rows) == 20
    assert max(rows) <= 1024 + 16


def test_full_cache_lets_requests_wait_and_changes_nothing_of_what_they_give(
    base: Transformer, checkpoint: Path
) -> None:
    snapshot = WeightsSnapshot(transformer=base)

    def submit_all(sampler: Sampler) -> None:
        for number in range(12):
            fields = {"num_samples": 1 + number % 3, "max_tokens": 10 + number}
            sampler.submit(request(str(number), 20 + 7 * number, **fields), snapshot)

    wide, narrow = Sampler(base, checkpoint), Sampler(base, checkpoint, cache_bytes=16 * BLOCK_BYTES)
    submit_all(wide)
    submit_all(narrow)
    assert 0 < wide.load < 1 < narrow.load
    expected = run(wide)
    assert narrow.pending == 12
    got: dict[str, Any] = {}
    steps = 0
    while narrow.pending:
        got.update(narrow.step())
        steps += 1
    assert steps > 60
    assert list(got) == sorted(got, key=int)
    assert all(same(expected[name], got[name]) for name in expected)
    assert (narrow.pending, narrow.load) == (0, 0.0)


def test_samples_share_the_room_of_their_prompt(base: Transformer, checkpoint: Path) -> None:
    # 20 blocks of prompt, and one for each sample: two prompts would not fit.
    sampler = Sampler(base, checkpoint, cache_bytes=28 * BLOCK_BYTES)
    sampler.submit(request("it", 320, num_samples=8, max_tokens=17), WeightsSnapshot(transformer=base))
    # Two steps read the prompt, and the second one chooses the first token of each.
    assert [sampler.step() for _ in range(17)] == [[]] * 17
    ((_, result),) = sampler.step()
    assert isinstance(result, SampleResult)
    assert len(result.sequences) == 8


def test_samples_that_do_not_fit_at_once_run_one_after_the_other(base: Transformer, checkpoint: Path) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    expected = sampled(Sampler(base, checkpoint), snapshot, length=50, num_samples=7, max_tokens=20)
    for limits in ({"cache_bytes": 9 * BLOCK_BYTES}, {"max_sequences": 2}):
        narrow = Sampler(base, checkpoint, **limits)
        assert same(sampled(narrow, snapshot, length=50, num_samples=7, max_tokens=20), expected)


def test_request_that_can_never_fit_is_refused(base: Transformer, checkpoint: Path) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    sampler = Sampler(base, checkpoint, cache_bytes=8 * BLOCK_BYTES)
    with pytest.raises(EngineError, match=r"memory holds 128.*lower max_tokens"):
        sampler.submit(request(length=40, max_tokens=100), snapshot)
    with pytest.raises(EngineError, match=r"memory holds 128.*shorten the prompt"):
        sampler.submit(request(length=150, max_tokens=1), snapshot)
    assert sampler.pending == 0
    # Nobody asked for more than there is room for.
    assert len(one(sampled(sampler, snapshot, length=40, max_tokens=None)).tokens) == 73
    assert len(one(sampled(sampler, snapshot, length=128, max_tokens=1)).tokens) == 1


# What goes wrong.


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": ()}, "the prompt has no tokens"),
        ({"prompt": (1, VOCABULARY)}, "token 272; the model's vocabulary has 272"),
        ({"prompt": (1, -1)}, "token -1"),
        ({"prompt": (1, 2.5)}, "the prompt: its tokens are not a sequence of whole numbers"),
        ({"length": CONTEXT + 1}, "the prompt has 513 tokens; the context length is 512"),
        ({"num_samples": 0}, "num_samples"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop_strings": ("a", "")}, "stop string is empty"),
        ({"topk_prompt_logprobs": 273}, "topk_prompt_logprobs is 273; it has to be between 0 and 272"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
    ],
)
def test_request_that_makes_no_sense_is_refused_and_nothing_else_ends(
    base: Transformer, sampler: Sampler, fields: dict[str, Any], says: str
) -> None:
    sampler.submit(request("good"), WeightsSnapshot(transformer=base))
    with pytest.raises(EngineError, match=says) as caught:
        sampler.submit(request("bad", **fields), WeightsSnapshot(transformer=base))
    assert caught.value.blame is Blame.USER
    assert len(one(run(sampler)["good"]).tokens) == 12


def test_second_request_of_an_id_is_refused_while_the_first_is_under_way(base: Transformer, sampler: Sampler) -> None:
    sampler.submit(request("it"), WeightsSnapshot(transformer=base))
    with pytest.raises(EngineError, match="it is under way"):
        sampler.submit(request("it"), WeightsSnapshot(transformer=base))
    run(sampler)
    sampler.submit(request("it"), WeightsSnapshot(transformer=base))
    assert list(run(sampler)) == ["it"]


def test_stop_strings_without_a_tokenizer_are_refused(base: Transformer, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        Sampler(base, tmp_path).submit(request(stop_strings=("x",)), WeightsSnapshot(transformer=base))


def test_cancelled_request_gives_nothing_and_leaves_its_room(base: Transformer, checkpoint: Path) -> None:
    snapshot = WeightsSnapshot(transformer=base)
    sampler = Sampler(base, checkpoint, cache_bytes=8 * BLOCK_BYTES)
    for name in ("running", "waiting", "next"):
        sampler.submit(request(name, 40, max_tokens=50), snapshot)
    sampler.step()
    assert sampler.cancel("running")
    assert sampler.cancel("waiting")
    assert not sampler.cancel("waiting")
    assert not sampler.cancel("unknown")
    assert same(run(sampler)["next"], sampled(Sampler(base, checkpoint), snapshot, length=40, max_tokens=50))
    assert sampler.load == 0


def test_diverged_weights_fail_their_own_requests_alone(base: Transformer, checkpoint: Path) -> None:
    broken = trained_adapter(base)
    with torch.no_grad():
        broken.factors["model.layers.1.self_attn.v_proj"].b[0, 0] = float("nan")
    good = WeightsSnapshot(transformer=base, adapter=trained_adapter(base, 1).copy())
    expected = sampled(Sampler(base, checkpoint), good, length=40, max_tokens=20)
    # So small that the blocks of those that fail are used again.
    sampler = Sampler(base, checkpoint, cache_bytes=16 * BLOCK_BYTES)
    for round_ in range(3):
        for number in range(2):
            bad = request(f"bad {round_} {number}", 48, num_samples=2, max_tokens=20)
            sampler.submit(bad, WeightsSnapshot(transformer=base, adapter=broken))
            sampler.submit(request(f"good {round_} {number}", 40, max_tokens=20), good)
    results = run(sampler)
    assert len(results) == 12
    for name, result in results.items():
        if name.startswith("bad"):
            assert isinstance(result, EngineError)
            assert "diverged" in str(result)
        else:
            assert same(result, expected)
    assert sampler.load == 0


def test_step_that_fails_ends_the_requests_of_its_weights_and_no_others(
    base: Transformer, sampler: Sampler, checkpoint: Path
) -> None:
    without_weights = Transformer(ModelConfig.read(checkpoint))
    sampler.submit(request("good"), WeightsSnapshot(transformer=base))
    sampler.submit(request("bad"), WeightsSnapshot(transformer=without_weights))
    results = run(sampler)
    assert isinstance(results["bad"], EngineError)
    assert results["bad"].blame is Blame.SERVER
    assert same(results["good"], sampled(sampler, WeightsSnapshot(transformer=base)))
