"""The engine on each device that is there: on a GPU it computes what transformers and the CPU compute.

On the CPU, in `make test-long`, these tests compare it with itself, in part; there they show that they work. Nothing
here is to the last bit: a GPU chooses kernels, and so the order of sums, by how many rows there are.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_runs import logits_of
from tiny_models import make_checkpoint, random_tokens, reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.packs import compute
from trainmaster.engine.passes import CheckedPass, Chunk, check_pass
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import AdamW, WeightsSnapshot
from trainmaster.engine.types import (
    AdamOptions,
    Datum,
    EngineError,
    LoraOptions,
    Pass,
    PassResult,
    SampledSequence,
    SampleRequest,
    Trained,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = (5, 130, 64, 1, 150)
"""350 tokens in all; a pack with a sequence of one, and none of a round number of rows."""
STEP = AdamOptions(learning_rate=3e-3)
LORA = LoraOptions(rank=8, seed=3)
VOCABULARY = 151_936
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-64": ("qwen3", {"head_dim": 64}),
    "qwen3-128": ("qwen3", {"head_dim": 128}),
    "llama-64": ("llama", {"head_dim": 64}),
    "llama-128": ("llama", {"head_dim": 128}),
    "gemma-64": ("gemma", {"head_dim": 64}),
    "gemma-128": ("gemma", {"head_dim": 128}),
    "gemma3-128": ("gemma3_text", {"head_dim": 128, "sliding_window": 16}),
    "gemma2-64": ("gemma2", {"head_dim": 64, "sliding_window": 16}),
    "vocabulary": ("qwen3", {"hidden_size": 64, "vocab_size": VOCABULARY, "num_hidden_layers": 1}),
    "deep": ("qwen3", {"head_dim": 64, "num_hidden_layers": 8, "intermediate_size": 1024}),
}
SIZES = {"hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.06, "max_position_embeddings": 2048}
Checkpoints = Callable[[str], Path]


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.long), *DEVICES[1:]])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    root = tmp_path_factory.mktemp("cuda")

    def made(name: str) -> Path:
        kind, changes = KINDS[name]
        return root / name if (root / name).exists() else make_checkpoint(root / name, kind, **(SIZES | changes))

    return made


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def a_datum(length: int, seed: int) -> Datum:
    random = np.random.default_rng(seed)
    weights = random.uniform(0.2, 1, length).astype(np.float32)
    return Datum(
        tokens=random.integers(0, 256, length),
        inputs={"target_tokens": random.integers(0, 256, length), "weights": weights},
    )


def a_pass(model_id: str, lengths: Sequence[int] = LENGTHS, seed: int = 0, *, backward: bool = True) -> Pass:
    data = tuple(a_datum(length, 100 * seed + index) for index, length in enumerate(lengths))
    return Pass(model_id=model_id, data=data, loss="cross_entropy", backward=backward)


def run(engine: Engine, *passes: Pass) -> list[PassResult]:
    results = engine.run(passes)
    for result in results:
        if isinstance(result, EngineError):
            raise result
    return results  # type: ignore[return-value]


def gradients(engine: Engine, model_id: str) -> dict[str, Tensor]:
    found = engine.state(model_id)["gradients"]["tensors"]
    return {name: each.detach().cpu().clone() for name, each in found.items()}


def logprobs(result: PassResult) -> Tensor:
    return torch.from_numpy(np.concatenate([output["logprobs"] for output in result.outputs]))


def apart(ours: Tensor, theirs: Tensor) -> float:
    """How far they lie apart, of their length."""
    ours, theirs = ours.detach().double().cpu(), theirs.detach().double().cpu()
    assert ours.shape == theirs.shape
    assert ours.isfinite().all()
    return float((ours - theirs).norm() / theirs.norm())


def all_apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The same of gradients, or weights, as a whole."""
    assert ours.keys() == theirs.keys()
    names = sorted(ours)
    joined = [torch.cat([each[name].detach().double().cpu().flatten() for name in names]) for each in (ours, theirs)]
    return apart(*joined)


class Attentions(TorchDispatchMode):
    """Counts calls of kernels for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += "attention" in name or "attn" in name
        return func(*args, **(kwargs or {}))


# A forward pass


FAMILIES = [name for name in KINDS if name not in ("vocabulary", "deep")]


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_transformers(checkpoint: Checkpoints, kind: str, device: str, dtype: torch.dtype) -> None:
    directory = checkpoint(kind)
    texts = [random_tokens(length, seed=length).to(device) for length in LENGTHS]
    model = Transformer(ModelConfig.read(directory)).load(directory, device, dtype)
    with torch.no_grad(), torch.device(device):
        ours = torch.cat(logits_of(model, texts))
    exact = their_logits(directory, texts, torch.float32)
    assert ours.dtype == torch.float32
    if dtype is torch.float32:
        assert apart(ours, exact) < 1e-4
    else:
        # As near to what is exact as transformers itself is in 16 bits.
        theirs = apart(their_logits(directory, texts, dtype), exact)
        assert apart(ours, exact) < 1.5 * theirs < 0.15


def their_logits(directory: Path, texts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    model = reference(directory, dtype=dtype).to(texts[0].device)
    with torch.no_grad():
        return torch.cat([model(text[None]).logits[0].float() for text in texts])


@pytest.mark.parametrize("kind", FAMILIES)
def test_gpu_takes_all_sequences_of_a_pack_at_once(checkpoint: Checkpoints, kind: str, device: str) -> None:
    directory = checkpoint(kind)
    model = Transformer(ModelConfig.read(directory)).load(directory, device, torch.bfloat16)
    texts = [random_tokens(length, seed=length).to(device) for length in LENGTHS]
    with torch.no_grad(), torch.device(device), Attentions() as attentions:
        logits_of(model, texts)
    softcap = model.config.attention_softcap is not None
    if device == "cuda" and not softcap:
        assert attentions.count == model.config.num_layers
    elif not softcap:
        assert attentions.count == model.config.num_layers * len(LENGTHS)


def test_large_vocabulary_is_computed_in_parts(checkpoint: Checkpoints, device: str, dtype: torch.dtype) -> None:
    directory = checkpoint("vocabulary")
    head = Transformer(ModelConfig.read(directory)).load(directory, device, dtype).unembedding
    assert len(head.weight) == VOCABULARY
    count, generator = 512 if device == "cuda" else 48, torch.Generator().manual_seed(5)
    rows = torch.randn(count, 64, generator=generator).to(device, dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (count,), generator=generator).to(device)
    weights = torch.randn(count, generator=generator).to(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ours = target_logprobs(rows, targets, head, chunk=count // 8)
    (ours * weights).sum().backward()
    if device == "cuda":
        # Never all logits, let alone their gradients too.
        assert torch.cuda.max_memory_allocated() - before < 0.7 * count * VOCABULARY * 4
    ours_gradient, rows.grad = rows.grad, None
    logits = rows.float() @ head.weight.float().t()
    theirs = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    (theirs * weights).sum().backward()
    exact = dtype is torch.float32
    # The CPU has no product of 16 bits that gives 32: its logits are rounded.
    assert apart(ours, theirs) < (1e-5 if exact else 1e-4 if device == "cuda" else 1e-2)
    assert apart(ours_gradient, rows.grad) < (1e-4 if exact else 2e-2)


# Training


TRAINED = {"adapter": (Trained.ADAPTER, LORA), "all": (Trained.ALL, None)}


def an_engine(directory: Path, device: str, dtype: torch.dtype, trained: str, **options: Any) -> Engine:
    """With a model `m`."""
    engine = Engine(directory, device=device, dtype=dtype, **options)
    engine.create_model("m", *TRAINED[trained])
    return engine


def moved(engine: Engine, model_id: str = "m", steps: int = 2) -> Engine:
    """Some steps away from where it began: of a fresh adapter, one factor is zero."""
    for seed in range(steps):
        run(engine, a_pass(model_id, (40, 30), seed=50 + seed))
        engine.optim_step(model_id, STEP)
    return engine


@pytest.mark.parametrize("trained", TRAINED)
def test_step_is_that_of_the_cpu(checkpoint: Checkpoints, trained: str, device: str, dtype: torch.dtype) -> None:
    exact = dtype is torch.float32
    cpu = moved(an_engine(checkpoint("qwen3-64"), "cpu", torch.float32, trained))
    state = copied(cpu.state("m"))
    engine = an_engine(checkpoint("qwen3-64"), device, dtype, trained)
    engine.load_state("m", state, optimizer=True)
    [theirs], [ours] = run(cpu, a_pass("m")), run(engine, a_pass("m"))
    assert ours.metrics["loss:sum"] == pytest.approx(theirs.metrics["loss:sum"], rel=1e-5 if exact else 1e-2)
    assert apart(logprobs(ours), logprobs(theirs)) < (1e-4 if exact else 2e-2)
    assert all_apart(gradients(engine, "m"), gradients(cpu, "m")) < (1e-3 if exact else 0.1)
    for each in (cpu, engine):
        each.optim_step("m", STEP)
    before, after, ours_after = (each["weights"] for each in (state, cpu.state("m"), engine.state("m")))
    steps = ({name: each[name].cpu() - before[name] for name in before} for each in (ours_after, after))
    assert all_apart(*steps) < (1e-2 if exact else 0.3)


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """As a checkpoint has it: in the host's memory."""
    return {
        name: each.detach().cpu().clone()
        if isinstance(each, Tensor)
        else copied(each)
        if isinstance(each, Mapping)
        else copy.deepcopy(each)
        for name, each in state.items()
    }


@pytest.mark.parametrize("trained", TRAINED)
def test_loss_falls_in_16_bits(checkpoint: Checkpoints, trained: str, device: str) -> None:
    engine = an_engine(checkpoint("qwen3-64"), device, torch.bfloat16, trained)
    losses = []
    for _ in range(10):
        [result] = run(engine, a_pass("m", (40, 30, 20)))
        losses.append(result.metrics["loss:sum"])
        engine.optim_step("m", STEP)
    assert losses[-1] < 0.7 * losses[0]
    assert max(losses) == losses[0]


def test_two_adapters_in_a_pack_are_as_alone(checkpoint: Checkpoints, device: str, dtype: torch.dtype) -> None:
    engine = an_engine(checkpoint("qwen3-128"), device, dtype, "adapter")
    engine.create_model("n", Trained.ADAPTER, LoraOptions(rank=4, seed=8, train_unembed=False))
    moved(moved(engine, "m"), "n", steps=3)
    passes = a_pass("m", (130, 5), seed=1), a_pass("n", (64, 150), seed=2)
    alone, alone_gradients = [], {}
    for each in passes:
        alone += run(engine, each)
        alone_gradients[each.model_id] = gradients(engine, each.model_id)
        engine.load_state(each.model_id, {**engine.state(each.model_id), "gradients": NO_GRADIENTS}, optimizer=True)
    together = run(engine, *passes)
    exact = dtype is torch.float32
    for each, ours, theirs in zip(passes, together, alone, strict=True):
        assert apart(logprobs(ours), logprobs(theirs)) < (1e-5 if exact else 1e-2)
        found = gradients(engine, each.model_id)
        assert all_apart(found, alone_gradients[each.model_id]) < (1e-4 if exact else 3e-2)
    # And they are two: each would see the other's rows otherwise.
    assert apart(logprobs(alone[0]), logprobs(run(engine, a_pass("n", (130, 5), seed=1, backward=False))[0])) > 1e-2


NO_GRADIENTS: Mapping[str, Any] = {"tensors": {}, "loss_tokens": 0, "sequences": 0, "waiting": 0}


@pytest.mark.parametrize("trained", TRAINED)
def test_resumed_training_goes_on_as_an_uninterrupted_one(checkpoint: Checkpoints, trained: str, device: str) -> None:
    def passes_and_steps(engine: Engine, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            [result] = run(engine, a_pass("m", (40, 30), seed=seed))
            losses.append(result.metrics["loss:sum"])
            if seed % 2:
                engine.optim_step("m", STEP)
        return losses

    uninterrupted = an_engine(checkpoint("llama-64"), device, torch.float32, trained)
    first = an_engine(checkpoint("llama-64"), device, torch.float32, trained)
    expected = passes_and_steps(uninterrupted, range(8))
    losses = passes_and_steps(first, range(3))
    state = copied(first.state("m"))  # with the gradients of a pass that no step has used
    second = an_engine(checkpoint("llama-64"), device, torch.float32, trained)
    second.load_state("m", state, optimizer=True)
    losses += passes_and_steps(second, range(3, 8))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    assert all_apart(second.state("m")["weights"], uninterrupted.state("m")["weights"]) < 1e-3


def test_optimizer_is_plain_adamw(device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    begun = {f"w{n}": torch.randn(33, 7, generator=generator) for n in range(3)}
    ours = {name: each.clone().to(device).requires_grad_() for name, each in begun.items()}
    narrow = {name: each.clone().to(device, torch.bfloat16).requires_grad_() for name, each in begun.items()}
    theirs = {name: each.clone().double().requires_grad_() for name, each in begun.items()}
    optimizer, of_narrow = AdamW(ours), AdamW(narrow)
    plain = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1, foreach=False)
    options = AdamOptions(learning_rate=1e-2, weight_decay=0.1)
    for _ in range(5):
        made = {name: torch.randn(each.shape, generator=generator) for name, each in begun.items()}
        for name, each in theirs.items():
            each.grad = made[name].double()
        plain.step()
        optimizer.step({name: each.to(device) for name, each in made.items()}, options)
        of_narrow.step({name: each.to(device) for name, each in made.items()}, options)
    assert all_apart(ours, theirs) < 1e-6
    # Weights of 16 bits follow an original of 32; here it began with what 16 bits had left of it.
    assert all_apart(of_narrow.weights(), theirs) < 5e-3
    assert all(torch.equal(each, of_narrow.weights()[name].bfloat16()) for name, each in narrow.items())


def test_frozen_model_computes_and_stays_as_it_was(checkpoint: Checkpoints, device: str, dtype: torch.dtype) -> None:
    engine = an_engine(checkpoint("llama-64"), device, dtype, "adapter")
    engine.create_model("frozen", Trained.NOTHING)
    engine.create_model("full", *TRAINED["all"])
    request = a_pass("frozen", backward=False)
    [before] = run(engine, request)
    [as_begun] = run(engine, a_pass("m", backward=False))
    assert apart(logprobs(as_begun), logprobs(before)) < 1e-6
    [refused] = engine.run([a_pass("frozen")])
    assert isinstance(refused, EngineError)
    assert not gradients(engine, "m")
    moved(moved(engine, "full"), "m")
    [after] = run(engine, request)
    [trained] = run(engine, a_pass("m", backward=False))
    assert apart(logprobs(after), logprobs(before)) < 1e-6
    assert apart(logprobs(trained), logprobs(before)) > 1e-3
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in engine.base.parameters())


@pytest.mark.skipif("cuda" not in DEVICES, reason="the host's memory cannot be bounded like this")
def test_pack_without_room_on_the_gpu_is_computed_all_the_same(checkpoint: Checkpoints) -> None:
    engine = moved(an_engine(checkpoint("deep"), "cuda", torch.float32, "adapter"))
    request = a_pass("m", (1900, 1900, 200))

    def peak(*, recompute: bool) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        compute(chunks(engine, request), recompute=recompute).parts()
        for parameter in engine.models["m"].parameters.values():
            parameter.grad = None
        return torch.cuda.max_memory_reserved()

    roomy, narrow = peak(recompute=False), peak(recompute=True)
    assert narrow < 0.6 * roomy
    [expected] = run(engine, request)
    theirs = gradients(engine, "m")
    engine.load_state("m", {**engine.state("m"), "gradients": NO_GRADIENTS}, optimizer=True)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((roomy + narrow) / 2 / total)
    try:
        failed = torch.cuda.memory_stats()["num_ooms"]
        [result] = run(engine, request)
        assert torch.cuda.memory_stats()["num_ooms"] > failed
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert apart(logprobs(result), logprobs(expected)) < 1e-5
    assert all_apart(gradients(engine, "m"), theirs) < 1e-4


def chunks(engine: Engine, request: Pass) -> list[Chunk]:
    """All of a request in one pack."""
    checked: CheckedPass = check_pass(
        request, engine.models[request.model_id], vocabulary=engine.config.vocab_size, context=engine.max_context_length
    )
    return [Chunk(number=0, of=checked, data=range(len(request.data)))]


# Sampling


def sampled(sampler: Sampler, snapshot: WeightsSnapshot, *requests: SampleRequest) -> dict[str, SampledSequence]:
    """All of them at once."""
    for request in requests:
        sampler.submit(request, snapshot)
    found: dict[str, SampledSequence] = {}
    while sampler.pending:
        for name, result in sampler.step():
            if isinstance(result, EngineError):
                raise result
            (found[name],) = result.sequences
    return found


def requests(**options: Any) -> list[SampleRequest]:
    """Eight, of prompts and continuations of all lengths; one prompt is longer than what is read at once."""
    lengths = (3, 17, 64, 1, 300, 40, 33, 128)
    return [
        SampleRequest(
            request_id=str(number),
            prompt=tuple(random_tokens(length, seed=number).tolist()),
            max_tokens=36 - 4 * number,
            seed=number,
            stop_tokens=(),
            **options,
        )
        for number, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", ["qwen3-128", "gemma2-64"])
def test_sampled_logprobs_are_those_of_training(
    checkpoint: Checkpoints, kind: str, device: str, dtype: torch.dtype
) -> None:
    engine = moved(an_engine(checkpoint(kind), device, dtype, "adapter"))
    asked = requests()
    found = sampled(Sampler(engine.base, engine.model_dir), engine.snapshot("m"), *asked)
    data = []
    for request in asked:
        text = np.array([*request.prompt, *found[request.request_id].tokens])
        data.append(Datum(tokens=text[:-1], inputs={"target_tokens": text[1:]}))
    [scored] = run(engine, Pass(model_id="m", data=tuple(data), loss="cross_entropy", backward=False))
    ours, theirs = [], []
    for request, output in zip(asked, scored.outputs, strict=True):
        assert len(found[request.request_id].tokens) == request.max_tokens
        ours.append(found[request.request_id].logprobs)
        theirs.append(output["logprobs"][len(request.prompt) - 1 :])
    difference = np.abs(np.concatenate(ours) - np.concatenate(theirs))
    assert difference.mean() < (1e-5 if dtype is torch.float32 else 1e-2)
    assert difference.max() < (1e-3 if dtype is torch.float32 else 0.2)


@pytest.mark.parametrize("kind", ["qwen3-128", "gemma3-128"])
def test_requests_in_company_get_the_tokens_that_they_get_alone(
    checkpoint: Checkpoints, kind: str, device: str
) -> None:
    engine = moved(an_engine(checkpoint(kind), device, torch.float32, "adapter"))
    sampler, snapshot = Sampler(engine.base, engine.model_dir), engine.snapshot("m")
    asked = requests(temperature=0.0)
    together = sampled(sampler, snapshot, *asked)
    for request in asked:
        (alone,) = sampled(sampler, snapshot, request).values()
        assert alone.tokens.tolist() == together[request.request_id].tokens.tolist()
        np.testing.assert_allclose(together[request.request_id].logprobs, alone.logprobs, atol=1e-3)
    assert len({tuple(each.tokens[:5].tolist()) for each in together.values()}) > 4


# Exports


def test_exports_are_what_was_trained(checkpoint: Checkpoints, tmp_path: Path, device: str, dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    directory = checkpoint("llama-64")
    engine = moved(an_engine(directory, device, dtype, "adapter"))
    snapshot = engine.snapshot("m")
    engine.export(snapshot, tmp_path / "adapter", merged=False)
    engine.export(snapshot, tmp_path / "merged", merged=True)
    text = random_tokens(60, seed=4)
    targets = np.tile(np.arange(engine.config.vocab_size), (len(text), 1))
    datum = Datum(tokens=text.numpy(), inputs={"target_tokens": targets})
    [result] = run(engine, Pass(model_id="m", data=(datum,), loss="cross_entropy", backward=False))
    for theirs in (
        peft.PeftModel.from_pretrained(reference(directory, dtype=dtype), tmp_path / "adapter"),
        reference(tmp_path / "merged", dtype=dtype),
    ):
        with torch.no_grad():
            logits = theirs.to(device)(text[None].to(device)).logits[0].float()
        assert apart(logprobs(result), torch.log_softmax(logits, dim=-1)) < (1e-4 if dtype is torch.float32 else 2e-2)
    # The type of the base model's checkpoint, whatever it was trained in.
    assert reference(tmp_path / "merged", dtype="auto").dtype is torch.float32
