"""Heartbeats through a whole server, at both of its doors, while a real trainer of a tiny model is stormed.

Each result is as long as only its own request makes it: none may be lost or swapped. The server, the trainer's front
and its engine, the clients and the heartbeats are processes of their own, on one machine. What a process that does
nothing else answers meanwhile is told beside it: that much is the machine's, and not the server's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.apart import apart
from benchmarks.report import Figure, Progress, WrongResultError, percentile
from benchmarks.server import Client, cpu_s
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
from benchmarks.service_front import HEARTBEAT_TARGET_MS, PASSES, SAMPLES, UPLOADS_AT_ONCE
from benchmarks.service_steps import ALIAS, make_tiny_model, null_server, serving
from trainmaster.protocol.trainer_requests import PROTOBUF
from trainmaster.trainer_service import schema

BODY_BYTES = 3_300_000
FILLER = bytes([0xFA, 0x3E])
"""The tag of a field that nobody reads: a tiny model's pass becomes as large as that of a real one."""
SHORTEST = 8
PROMPT_TOKENS = 100
QUIET_S = 3.0


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """The 99th percentile of heartbeats at the root door, and at the route of the trainer's job."""
    with serving(directory, make_tiny_model(directory)) as server:
        root = Door(port=server.port, key=server.key)
        progress("a trainer starts")
        uvloop.run(_start(root))
        client = Client(server)
        [job] = client.call("GET", "/v1/jobs")["jobs"]
        account_id = client.call("GET", "/v1/accounts")["accounts"][0]["account_id"]
        client.close()
        prefix = f"/training/v1/rlorTrainerJobs/{account_id}/{job['job_id']}/api/v1"
        doors = {"the root door": root, "the job's route": Door(port=server.port, prefix=prefix, key=server.key)}
        return [_storm(name, door, server.pid, progress) for name, door in doors.items()]


def _storm(name: str, door: Door, server_pid: int, progress: Progress) -> Figure:
    progress(f"{PASSES} passes of 3.3 MB and {SAMPLES} samples at once through {name}")
    session_id = uvloop.run(new_session(door))
    quiet = beats(door, session_id, lambda: time.sleep(QUIET_S))
    took_s: list[float] = []
    loud: list[float] = []

    def storm() -> None:
        took_s.extend(apart(train_and_sample, [(door, session_id)]))

    before_s = cpu_s(server_pid)
    with null_server() as port:
        idle = beats(Door(port=port), session_id, lambda: loud.extend(beats(door, session_id, storm)))
    used_s = cpu_s(server_pid) - before_s
    return Figure(
        name=f"heartbeat through {name} under {PASSES} passes of 3.3 MB and {SAMPLES} samples, p99",
        measured=percentile(loud, 99) * 1000,
        unit="ms",
        target=HEARTBEAT_TARGET_MS,
        note=f"p50 {statistics.median(loud) * 1000:.2f} ms, worst {max(loud) * 1000:.1f} ms of {len(loud)}; without"
        f" load p99 {percentile(quiet, 99) * 1000:.2f} ms; a process that does nothing else answers meanwhile in p99"
        f" {percentile(idle, 99) * 1000:.1f} ms; all done in {took_s[0]:.1f} s, none lost or swapped; the server took"
        f" {used_s:.1f} s of a core",
    )


async def _start(door: Door) -> None:
    await model_and_sampler(door, await new_session(door), ALIAS)


def train_and_sample(door: Door, session_id: str) -> float:
    """Send everything at once and see that it comes back; how long that took."""
    allow_many_connections()
    return uvloop.run(_train_and_sample(door, session_id))


async def _train_and_sample(door: Door, session_id: str) -> float:
    model_id, sampler = await model_and_sampler(door, session_id, ALIAS)
    places, manners = asyncio.Semaphore(UPLOADS_AT_ONCE), Manners()
    # Chunks come out of order: the first of each group of four comes last.
    order = [group + place for group in range(1, PASSES + 1, 4) for place in (1, 2, 3, 0)]
    began = time.perf_counter()
    async with asyncio.timeout(300):
        await asyncio.gather(
            *(_train(door, places, model_id, seq_id) for seq_id in order),
            *(_sample(door, manners, sampler, number) for number in range(SAMPLES)),
        )
    return time.perf_counter() - began


async def _train(door: Door, places: asyncio.Semaphore, model_id: str, seq_id: int) -> None:
    length = SHORTEST + seq_id
    async with Connection.to(door) as connection:
        async with places:
            status, ack = await connection.ask("POST", "forward_backward", _pass(model_id, seq_id, length), PROTOBUF)
        if status != 200:
            raise WrongResultError(f"a pass was answered with {status} {ack[:200]!r}")
        result = schema.ForwardBackwardOutput.FromString(await connection.result(json.loads(ack)["request_id"]))
    got = len(result.loss_fn_outputs[0].fields["logprobs"].data) // 4
    if got != length:
        raise WrongResultError(f"pass {seq_id} of {length} tokens has the result of one of {got}")


def _pass(model_id: str, seq_id: int, length: int) -> bytes:
    message = schema.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = (np.arange(length) % 256).astype("<i4").tobytes()
    targets, weights = datum.loss_fn_inputs["target_tokens"], datum.loss_fn_inputs["weights"]
    targets.dense, targets.dtype = (np.arange(1, length + 1) % 256).astype("<i8").tobytes(), 2
    weights.dense, weights.dtype = np.ones(length, "<f4").tobytes(), 1
    head: bytes = message.SerializeToString()
    left = BODY_BYTES - len(head)
    size = bytes([left & 0x7F | 0x80, left >> 7 & 0x7F | 0x80, left >> 14 & 0x7F | 0x80, left >> 21])
    return head + FILLER + size + bytes(left)


async def _sample(door: Door, manners: Manners, sampler: str, number: int) -> None:
    length = SHORTEST + number % 32
    fields = {
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [number % 256] * PROMPT_TOKENS}]},
        "sampling_params": {"max_tokens": length, "stop": []},
        "sampling_session_id": sampler,
        "seq_id": number,
    }
    body, _ = await draw(door, manners, fields)
    got = len(schema.SampleResponse.FromString(body).sequences[0].tokens) // 4
    if got != length:
        raise WrongResultError(f"sample {number} of {length} tokens has the result of one of {got}")
