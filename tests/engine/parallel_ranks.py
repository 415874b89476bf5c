"""One rank of the tests of several: run as a program, it follows rank 0, or drives the others and writes what it saw.

`python parallel_ranks.py CHECKPOINT OUTPUT SCENARIO`, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainmaster.engine import engine as engine_module
from trainmaster.engine import trained_model
from trainmaster.engine.engine import Engine
from trainmaster.engine.parallel import join
from trainmaster.engine.types import (
    AdamOptions,
    Datum,
    EngineError,
    LoraOptions,
    Normalization,
    Pass,
    PassResult,
    Trained,
)
from trainmaster.jobs import trees

STEP = AdamOptions(
    learning_rate=1e-2,
    eps=1e-3,
    grad_clip_norm=50.0,
    normalization=Normalization.NUM_SEQUENCES,
    grad_norm_metrics="basic",
)


def a_pass(model_id: str, lengths: list[int], seed: int, loss: str = "cross_entropy") -> Pass:
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        inputs: dict[str, np.ndarray] = {"target_tokens": random.integers(0, 256, length)}
        if loss != "cross_entropy":
            inputs["logprobs"] = -random.uniform(4, 7, length).astype(np.float32)
            inputs["advantages"] = random.normal(0, 1, length).astype(np.float32)
        data.append(Datum(tokens=random.integers(0, 256, length), inputs=inputs))
    return Pass(model_id=model_id, data=tuple(data), loss=loss)


def described(results: list[PassResult | EngineError]) -> list[Any]:
    found: list[Any] = []
    for each in results:
        if isinstance(each, EngineError):
            found.append(str(each))
        else:
            logprobs = [output["logprobs"].tolist() for output in each.outputs]
            found.append({"logprobs": logprobs, "metrics": dict(each.metrics)})
    return found


def train(engine: Engine, output: Path) -> list[Any]:
    """Two models, one pass with less data than ranks, a save between, and accumulated gradients in it."""
    engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    engine.create_model("full", Trained.ALL)
    found: list[Any] = []
    for step in range(3):
        passes = [
            a_pass("lora", [30, 5, 17, 40, 8], step),
            a_pass("full", [12], step),
            a_pass("nobody", [3], step),
            a_pass("lora", [9, 9], 50 + step, "ppo"),
        ]
        found.append(described(engine.run(passes)))
        found += [engine.optim_step(model_id, STEP) for model_id in ("lora", "full")]
    engine.run([a_pass("lora", [22, 7, 31], 90)])
    for model_id in ("lora", "full"):
        (output / model_id).mkdir()
        trees.write(engine.state(model_id), output / model_id)
    engine.create_model("again", Trained.ADAPTER, LoraOptions(rank=4, seed=7))
    engine.load_state("again", trees.read(output / "lora"), optimizer=True)
    engine.create_model("full again", Trained.ALL)
    engine.load_state("full again", trees.read(output / "full"), optimizer=True)
    # Tensors of 16 bits that do not lie in memory row by row; then a model's own.
    state = engine.state("full again")
    halved = {name: each.to(torch.bfloat16).t().contiguous().t() for name, each in state["weights"].items()}
    engine.load_state("full again", {**state, "weights": halved}, optimizer=False)
    engine.load_state("full again", engine.state("full"), optimizer=True)
    passes = [a_pass(model_id, [21, 40], 92) for model_id in ("full", "full again")]
    found.append(described(engine.run(passes)))
    found += [engine.optim_step(model_id, STEP) for model_id in ("full", "full again", "again", "lora")]
    found.append(described(engine.run([a_pass("again", [8, 8], 91), a_pass("lora", [8, 8], 91)])))
    return found


def fail_in_one_rank(engine: Engine, output: Path) -> list[Any]:
    """What goes wrong in rank 1 alone goes wrong in all, and then they go on."""
    engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    found: list[Any] = [described(engine.run([a_pass("lora", [13, 31], 666), a_pass("lora", [13, 31], 1)]))]
    found.append(engine.optim_step("lora", STEP))
    for call in (
        lambda: engine.create_model("breaks", Trained.ADAPTER, LoraOptions(rank=3)),
        lambda: engine.create_model("lora", Trained.NOTHING),
        lambda: engine.optim_step("lora", STEP),
        lambda: engine.load_state("lora", engine.state("lora") | {"breaks": True}, optimizer=True),
        lambda: engine.state("lora"),
    ):
        try:
            found.append(call())
        except EngineError as error:
            found.append(str(error))
    engine.create_model("new", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    found.append(sorted(engine.models))
    found.append(len(described(engine.run([a_pass("new", [5, 6], 1)]))))
    return found


def die(engine: Engine, output: Path) -> list[Any]:
    """Rank 1 ends in the midst of a command."""
    engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    return described(engine.run([a_pass("lora", [5, 6], 1)]))


def leave_without_a_word(engine: Engine, output: Path) -> list[Any]:
    """Rank 0 ends while the others wait for a command."""
    engine.create_model("lora", Trained.ADAPTER, LoraOptions(rank=4, seed=1))
    os._exit(7)


SCENARIOS: dict[str, Callable[[Engine, Path], list[Any]]] = {
    "train": train,
    "fail_in_one_rank": fail_in_one_rank,
    "die": die,
    "leave_without_a_word": leave_without_a_word,
}


def break_this_rank() -> None:
    """Make it fail at what the scenario does with it."""
    compute, model = engine_module.compute, trained_model.TrainedModel

    def compute_or_fail(chunks: Any, **options: Any) -> Any:
        tokens = chunks[0].of.request.data[0].tokens
        if np.array_equal(tokens, a_pass("", [13, 31], 666).data[1].tokens):
            raise RuntimeError("this rank broke")
        return compute(chunks, **options)

    class Broken(model):  # type: ignore[misc,valid-type]
        def __init__(self, model_id: str, *others: Any) -> None:
            if model_id == "breaks":
                raise RuntimeError("this rank has no room")
            super().__init__(model_id, *others)

        def load_state(self, state: Any, *others: Any, **options: Any) -> None:
            if "breaks" in state:
                raise RuntimeError("this rank cannot load")
            super().load_state(state, *others, **options)

    engine_module.compute = compute_or_fail  # type: ignore[assignment]
    engine_module.TrainedModel = Broken  # type: ignore[misc]


def main() -> None:
    checkpoint, output, scenario = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    ranks = join(torch.device("cpu"))
    engine = Engine(checkpoint, process=ranks)
    if ranks is not None and ranks.rank == 1 and scenario == "fail_in_one_rank":
        break_this_rank()
    if ranks is not None and ranks.rank == 1 and scenario == "die":
        engine_module.compute = lambda *_, **__: os._exit(7)  # type: ignore[assignment]
    if ranks is not None and ranks.rank:
        ranks.follow(engine)
        return
    (output / "found.json").write_text(json.dumps(SCENARIOS[scenario](engine, output)))
    if ranks is not None:
        ranks.leave()


if __name__ == "__main__":
    main()
