"""A training step through the public tinker client: against the same step in one process, and against a server that
computes nothing, which is what the client itself costs.

The three take turns, a few steps each, so that whatever else the machine does meanwhile slows all of them alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.models import Shape, make_model
from benchmarks.report import Figure, Progress, WrongResultError
from benchmarks.server import Client, Server, environment, running_server
from benchmarks.service_front import TINKER
from trainmaster.trainer_service.__main__ import share_cores

ALIAS = "Qwen/Qwen3-8B"
SEQUENCES, LENGTH = 8, 64
WARM_UP, ROUNDS, STEPS = 5, 20, 10
"""So many steps before anything counts; then rounds of so many steps."""
ALLOWED_MS = 5.0
"""Above the step itself and the client's own cost."""
_TINY = Shape(
    name="tiny",
    layers=2,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=512,
    batch={},
    steps={},
    checkpointing=frozenset(),
    dtype="float32",
)
_LOOP = f"""
import json, sys, time, tinker
from tinker import types
client = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2]).create_lora_training_client("{ALIAS}", rank=8)
data = [
    types.Datum(
        model_input=types.ModelInput.from_ints([(i * 7 + j) % 256 for j in range({LENGTH})]),
        loss_fn_inputs={{
            "target_tokens": [(i * 7 + j + 1) % 256 for j in range({LENGTH})], "weights": [1.0] * {LENGTH}
        }},
    )
    for i in range({SEQUENCES})
]
adam = types.AdamParams(learning_rate=1e-4)
for wanted in sys.stdin:
    times = []
    for _ in range(int(wanted)):
        began = time.perf_counter()
        passed, stepped = client.forward_backward(data, "cross_entropy"), client.optim_step(adam)
        passed.result(), stepped.result()
        times.append(time.perf_counter() - began)
    print(json.dumps(times), flush=True)
"""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Milliseconds of a forward_backward and an optim_step."""
    model = make_tiny_model(directory)
    with contextlib.ExitStack() as scope:
        port = scope.enter_context(null_server())
        server = scope.enter_context(serving(directory, model))
        alone = scope.enter_context(_stepping(sys.executable, "-m", "benchmarks.service_steps", str(model)))
        null = scope.enter_context(_stepping(str(TINKER), "-c", _LOOP, f"http://127.0.0.1:{port}", "tml-bench"))
        url = f"http://{server.host}:{server.port}"
        ours = scope.enter_context(_stepping(str(TINKER), "-c", _LOOP, url, server.key))
        contenders = (alone, null, ours)
        for contender in contenders:
            contender.steps(WARM_UP)
        rounds = []
        for number in range(ROUNDS):
            rounds.append([contender.steps(STEPS) for contender in contenders])
            told = ", ".join(f"{statistics.median(times) * 1000:.1f}" for times in rounds[-1])
            progress(f"round {number + 1} of {ROUNDS}: in one process, the client alone, through the server: {told} ms")
    alone_ms, null_ms, ours_ms = (
        statistics.median(time_s for times in every for time_s in times) * 1000 for every in zip(*rounds, strict=True)
    )
    slowest_ms = max(statistics.median(times) * 1000 for times, _, _ in rounds)
    return [
        Figure(
            name=f"a step of {SEQUENCES} x {LENGTH} tokens through the tinker client",
            measured=ours_ms,
            unit="ms",
            target=alone_ms + null_ms + ALLOWED_MS,
            note=f"in one process {alone_ms:.1f} ms ({slowest_ms:.1f} ms in its slowest round), the client against"
            f" nothing {null_ms:.1f} ms; medians of {ROUNDS} rounds of {STEPS}, in turn",
        )
    ]


def make_tiny_model(directory: Path) -> Path:
    """A model whose steps cost next to nothing; it may be there already."""
    place = directory / "tiny"
    return place if place.exists() else make_model(place, _TINY)


@contextlib.contextmanager
def serving(directory: Path, model: Path) -> Iterator[Server]:
    """A server that knows a model by its alias; the trainers that it was asked for end before it does."""
    with running_server(directory, "--model-alias", f"{ALIAS}={model}", "--data-root", str(directory)) as server:
        try:
            yield server
        finally:
            client = Client(server)
            for job_id in client.job_ids():
                client.call("POST", f"/v1/jobs/{job_id}/cancel")
                client.wait(job_id)
            client.close()


class _Stepping:
    """A process that makes steps when it is told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def steps(self, count: int) -> list[float]:
        """How long each of so many steps took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        if not told:
            raise WrongResultError(f"steps are not made any more: exit code {self._process.wait(60)}")
        times: list[float] = json.loads(told)
        return times


@contextlib.contextmanager
def _stepping(*argv: str) -> Iterator[_Stepping]:
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment() | {"PYTHONUNBUFFERED": "1"}
    )
    try:
        yield _Stepping(process)
    finally:
        process.kill()
        process.communicate()


def steps_alone(model: str) -> None:
    """The same steps, by the engine alone, in a process that computes as a trainer does."""
    share_cores()
    import torch

    from trainmaster.engine.engine import Engine
    from trainmaster.engine.types import AdamOptions, Datum, LoraOptions, Pass, Trained

    engine = Engine(Path(model), device="cpu", dtype=torch.float32, max_context_length=LENGTH)
    engine.create_model("m", Trained.ADAPTER, LoraOptions(rank=8))
    rows = [np.arange(number * 7, number * 7 + LENGTH + 1) % 256 for number in range(SEQUENCES)]
    data = tuple(
        Datum(tokens=row[:-1], inputs={"target_tokens": row[1:], "weights": np.ones(LENGTH, np.float32)})
        for row in rows
    )
    for wanted in sys.stdin:
        times = []
        for _ in range(int(wanted)):
            began = time.perf_counter()
            engine.run([Pass(model_id="m", data=data, loss="cross_entropy")])
            engine.optim_step("m", AdamOptions(learning_rate=1e-4))
            times.append(time.perf_counter() - began)
        print(json.dumps(times), flush=True)


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def null_server() -> Iterator[int]:
    """Answers whatever the client asks with what was made before."""
    from trainmaster.engine.types import PassResult
    from trainmaster.protocol.trainer_requests import PROTOBUF
    from trainmaster.trainer_service.wire import encode_pass_result

    outputs = ({"logprobs": np.zeros(LENGTH, np.float32)},) * SEQUENCES
    passed = encode_pass_result(PassResult(outputs=outputs, metrics={"loss:sum": 1.0}))
    named = {
        "create_session": {"session_id": "null"},
        "create_model": {"request_id": "model", "model_id": "null:train:0"},
        "forward_backward": {"request_id": "pass"},
        "optim_step": {"request_id": "step"},
        "telemetry": {"status": "accepted"},
    }
    futures = {
        b"model": {"model_id": "null:train:0", "type": "create_model"},
        b"step": {"metrics": {}},
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                size = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length")), 0)
                body = await reader.readexactly(size)
                operation = head.split(b" ")[1].rpartition(b"/")[2].decode()
                kind, content = "application/json", json.dumps(named.get(operation, {})).encode()
                if operation == "retrieve_future":
                    wanted = next((each for each in futures if b'"' + each + b'"' in body), None)
                    kind, content = (
                        (PROTOBUF, passed) if wanted is None else (kind, json.dumps(futures[wanted]).encode())
                    )
                writer.write(
                    f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n\r\n".encode()
                    + content
                )
                await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        asyncio.run_coroutine_threadsafe(_end_others(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


if __name__ == "__main__":
    steps_alone(sys.argv[1])
