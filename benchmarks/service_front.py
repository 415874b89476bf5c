"""The front of a trainer service under storms, with an engine behind it that computes nothing.

Nothing may be lost, doubled or swapped: each result says whose it is. Clients run in processes of their own; heartbeats
in yet another one, so that only the front can delay them.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.apart import apart
from benchmarks.report import Figure, Progress, WrongResultError, percentile
from benchmarks.server import environment as clean_environment
from benchmarks.server import resident_mb
from benchmarks.service_client import (
    Connection,
    Door,
    Manners,
    allow_many_connections,
    beats,
    draw,
    model_and_sampler,
    new_session,
)
from trainmaster.engine.types import PassResult, SampledSequence, SampleResult, StopReason
from trainmaster.protocol import environment
from trainmaster.protocol.trainer_requests import PROTOBUF
from trainmaster.trainer_service import channel, schema, wire
from trainmaster.trainer_service.channel import ChannelClosedError, EngineChannel
from trainmaster.trainer_service.messages import EngineReady, Reply, Request

PASSES = 208
PASS_TARGETS = 275_000
"""A body of 3.3 MB."""
SAMPLES = 512
MANY_SAMPLES = 8_000
CLIENTS = 4
"""Each public client has 2,000 samples under way at most."""
SAMPLE_TOKENS = 256
PROMPT_TOKENS = 1_000
UPLOADS_AT_ONCE = 15
"""The public client has 50 MB on their way at a time."""
HEARTBEAT_TARGET_MS = 50.0

PAIRS = 20
PASS_S = 0.1
PIPELINE_TARGET = 1.1
_OWN_TINKER = Path(__file__).parents[1] / ".venvs" / "tinker" / "bin" / "python"
TINKER = _OWN_TINKER if _OWN_TINKER.exists() else Path(sys.executable)
"""The Python that has the public client: on machines without `.venvs`, it may be this one."""
_TINKER_LOOP = f"""
import sys, time, tinker
from tinker import types
client = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-bench").create_lora_training_client("null", rank=8)
datum = types.Datum(
    model_input=types.ModelInput.from_ints([1] * 64),
    loss_fn_inputs={{"target_tokens": [1] * 64, "weights": [1.0] * 64}},
)
adam = types.AdamParams(learning_rate=1e-4)
client.forward_backward([datum], "cross_entropy").result()
client.optim_step(adam).result()
began = time.perf_counter()
futures = [
    future
    for _ in range({PAIRS})
    for future in (client.forward_backward([datum] * 8, "cross_entropy"), client.optim_step(adam))
]
for future in futures:
    future.result()
print(time.perf_counter() - began)
"""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Heartbeats in a storm, many samples at once, and how well pipelined steps keep an engine busy."""
    return [*_storm(directory, progress), *_many_samples(directory, progress), _pipelined(directory, progress)]


def _storm(directory: Path, progress: Progress) -> Sequence[Figure]:
    progress(f"{PASSES} passes of 3.3 MB and {SAMPLES} samples at once")
    with _front(directory, pass_s=0.01, sample_s=0.2) as front:
        session_id = uvloop.run(new_session(front.door))
        quiet = beats(front.door, session_id, lambda: time.sleep(3))
        took_s: list[float] = []
        storm = [(front.door, session_id)]
        loud = beats(front.door, session_id, lambda: took_s.extend(apart(train_and_sample, storm)))
        peak_mb = front.peak_mb()
        done = list(front.done)
    if done != list(range(1, PASSES + 1)):
        raise WrongResultError(f"the engine was given {len(done)} passes of {PASSES}, or not in order")
    return [
        Figure(
            name=f"heartbeat under {PASSES} passes of 3.3 MB and {SAMPLES} samples, p99",
            measured=percentile(loud, 99) * 1000,
            unit="ms",
            target=HEARTBEAT_TARGET_MS,
            note=f"p50 {statistics.median(loud) * 1000:.2f} ms, worst {max(loud) * 1000:.1f} ms of {len(loud)}; without"
            f" load p99 {percentile(quiet, 99) * 1000:.2f} ms; all answered in {took_s[0]:.1f} s, none lost or swapped;"
            f" front {peak_mb:.0f} MB at most",
        )
    ]


def _many_samples(directory: Path, progress: Progress) -> Sequence[Figure]:
    progress(f"{MANY_SAMPLES:,} samples at once")
    with _front(directory, pass_s=0.0, sample_s=2.0, session_expires_s=5) as front:
        before_mb = resident_mb(front.pid)
        session_id = uvloop.run(new_session(front.door))
        results: list[tuple[float, int]] = []
        storm = [(front.door, session_id)]
        loud = beats(front.door, session_id, lambda: results.extend(apart(sample_many, storm)))
        peak_mb = front.peak_mb()
    took_s, sent_away = results[0]
    return [
        Figure(
            name=f"{MANY_SAMPLES:,} samples at once, memory of the front",
            measured=peak_mb,
            unit="MB",
            note=f"{before_mb:.0f} MB before; all answered in {took_s:.1f} s, {sent_away:,} sent away at first; a"
            f" session that expires after 5 s lived; heartbeat p99 {percentile(loud, 99) * 1000:.1f} ms, worst"
            f" {max(loud) * 1000:.1f} ms",
        )
    ]


def _pipelined(directory: Path, progress: Progress) -> Figure:
    progress(f"{PAIRS} pipelined steps through the tinker client")
    with _front(directory, pass_s=PASS_S, sample_s=0.0) as front:
        ran = subprocess.run(
            [TINKER, "-c", _TINKER_LOOP, f"http://127.0.0.1:{front.door.port}"],
            check=True,
            capture_output=True,
            text=True,
        )
    took_s = float(ran.stdout.splitlines()[-1])
    return Figure(
        name=f"{PAIRS} pipelined forward_backward and optim_step over the engine's own time",
        measured=took_s / (PAIRS * PASS_S),
        unit="x",
        target=PIPELINE_TARGET,
        note=f"{took_s:.3f} s, of which the engine works {PAIRS * PASS_S:.1f} s",
    )


class _NullEngine:
    """Answers at once, or when the time has come, with what tells requests apart."""

    def __init__(self, end: EngineChannel, pass_s: float, sample_s: float) -> None:
        self._channel = end
        self._pass_s = pass_s
        self._sample_s = sample_s
        self.done: list[int] = []
        self._due: list[tuple[float, int, Request]] = []
        self._count = itertools.count()
        end.send(EngineReady(capabilities={"supported_models": []}))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(ChannelClosedError):
            while True:
                message = self._channel.receive(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                if isinstance(message, Request):
                    self._take(message)
                while self._due and self._due[0][0] <= time.monotonic():
                    self._channel.send(_sampled(heapq.heappop(self._due)[2]))

    def _take(self, request: Request) -> None:
        if request.op == "asample":
            heapq.heappush(self._due, (time.monotonic() + self._sample_s, next(self._count), request))
        elif request.op == "forward_backward":
            time.sleep(self._pass_s)
            self.done.append(request.seq_id)
            result = PassResult(
                outputs=({"logprobs": np.zeros(8, np.float32)},) * 8, metrics={"loss:sum": float(request.seq_id)}
            )
            self._channel.send(Reply(request_id=request.request_id, body=wire.encode_pass_result(result)))
        elif request.op != "end_session":
            fields = {"model_id": request.model_id, "metrics": {}}
            self._channel.send(Reply(request_id=request.request_id, fields=fields))


def _sampled(request: Request) -> Reply:
    assert request.body is not None
    first = json.loads(bytes(request.body))["prompt"]["chunks"][0]["tokens"][0]
    sequence = SampledSequence(
        tokens=np.full(SAMPLE_TOKENS, first, np.int32),
        logprobs=np.zeros(SAMPLE_TOKENS, np.float32),
        stop_reason=StopReason.LENGTH,
    )
    return Reply(request_id=request.request_id, body=wire.encode_sample_result(SampleResult(sequences=(sequence,))))


class _RunningFront:
    """A front process, and the engine behind it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, engine: _NullEngine) -> None:
        self.pid = process.pid
        self.door = Door(port=port)
        self.done = engine.done

    def peak_mb(self) -> float:
        """The most memory that it ever had."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
        raise WrongResultError("the front is gone")


@contextlib.contextmanager
def _front(directory: Path, *, pass_s: float, sample_s: float, **settings: float) -> Iterator[_RunningFront]:
    near, far = channel.pair()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [f"--channel={far.fileno()}", f"--port={port}"]
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    with open(directory / "front.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainmaster.trainer_service.front", *flags],
            pass_fds=[far.fileno()],
            stderr=log,
            env={**clean_environment(), environment.JOB_ID: "bench", environment.ATTEMPT: "1"},
        )
    far.close()
    end = EngineChannel(near)
    try:
        engine = _NullEngine(end, pass_s, sample_s)
        uvloop.run(_until_ready(Door(port=port)))
        yield _RunningFront(process, port, engine)
    finally:
        end.close()
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


async def _until_ready(door: Door) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):
                async with Connection.to(door) as connection:
                    if (await connection.ask("GET", "healthz"))[0] == 200:
                        return
            await asyncio.sleep(0.05)


def train_and_sample(door: Door, session_id: str) -> float:
    """Send everything at once and see that it comes back; how long that took."""
    allow_many_connections()
    return uvloop.run(_train_and_sample(door, session_id))


def sample_many(door: Door, session_id: str) -> tuple[float, int]:
    """Likewise, samples alone; and how many were sent away at first."""
    allow_many_connections()
    return uvloop.run(_sample_many(door, session_id))


async def _train_and_sample(door: Door, session_id: str) -> float:
    model_id, sampler = await model_and_sampler(door, session_id, "null")
    message = schema.ForwardBackwardRequest(loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(4 * PASS_TARGETS)
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.dense, tensor.dtype = bytes(8 * PASS_TARGETS), 2
    data = message.SerializeToString()
    places = asyncio.Semaphore(UPLOADS_AT_ONCE)

    async def train(seq_id: int) -> None:
        async with Connection.to(door) as connection:
            async with places:
                head = schema.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id).SerializeToString()
                _, ack = await connection.ask("POST", "forward_backward", head + data, PROTOBUF)
            result = schema.ForwardBackwardOutput.FromString(await connection.result(json.loads(ack)["request_id"]))
            if result.metrics["loss:sum"] != seq_id:
                raise WrongResultError(f"pass {seq_id} has the result of pass {result.metrics['loss:sum']}")

    began = time.perf_counter()
    # Chunks come out of order: the first of each group of four comes last.
    order = [group + place for group in range(1, PASSES + 1, 4) for place in (1, 2, 3, 0)]
    manners = Manners()
    async with asyncio.timeout(300):
        await asyncio.gather(
            *(train(seq_id) for seq_id in order), *(_draw(door, sampler, number, manners) for number in range(SAMPLES))
        )
    return time.perf_counter() - began


async def _sample_many(door: Door, session_id: str) -> tuple[float, int]:
    _, sampler = await model_and_sampler(door, session_id, "null")
    clients = [Manners() for _ in range(CLIENTS)]
    began = time.perf_counter()
    async with asyncio.timeout(300):
        sent_away = await asyncio.gather(
            *(_draw(door, sampler, number, clients[number % CLIENTS]) for number in range(MANY_SAMPLES))
        )
    return time.perf_counter() - began, sum(sent_away)


async def _draw(door: Door, sampler: str, number: int, manners: Manners) -> int:
    """One sample; how often it was sent away."""
    fields = {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [number] * PROMPT_TOKENS}]},
        "sampling_params": {"max_tokens": SAMPLE_TOKENS},
        "sampling_session_id": sampler,
        "seq_id": number,
    }
    body, sent_away = await draw(door, manners, fields)
    result = schema.SampleResponse.FromString(body)
    if np.frombuffer(result.sequences[0].tokens, "<i4").tolist() != [number] * SAMPLE_TOKENS:
        raise WrongResultError(f"sample {number} has the result of another one")
    return sent_away
