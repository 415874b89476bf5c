"""Durable submissions: 32 connections submit jobs that have to wait, as fast as the server answers.

Each answer means that the job is on disk. At the end the server is killed, and every job that it accepted
must be there after the next start, once.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

from benchmarks.load import Load, Round, put_on, request_to
from benchmarks.report import Figure, Progress, WrongResultError
from benchmarks.server import Client, Server, held_job, running_server

CONNECTIONS = 32
ROUNDS = 3
ROUND_S = 5.0
TARGET_PER_S = 1000.0


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Submissions a second: the median of some rounds."""
    rounds: list[Round] = []
    with running_server(directory) as server:
        load = Load(
            requests=[request_to(server, "POST", "/v1/jobs", held_job())],
            connections=CONNECTIONS,
            seconds=ROUND_S,
            status=201,
            keep=True,
        )
        for number in range(1, ROUNDS + 1):
            rounds.append(put_on(server, load))
            progress(f"round {number} of {ROUNDS}: {rounds[-1].per_s:,.0f} a second")
        progress("the server is killed; what it accepted must be there when it is back")
        accepted = [json.loads(body)["data"]["job_id"] for done in rounds for body in done.bodies]
        _check(server, accepted)
    median = sorted(rounds, key=lambda done: done.per_s)[len(rounds) // 2]
    return [
        Figure(
            name="durable submissions",
            measured=median.per_s,
            unit="/s",
            target=TARGET_PER_S,
            at_least=True,
            note=f"median of {ROUNDS} rounds, slowest {min(done.per_s for done in rounds):,.0f} /s;"
            f" {median.in_words()}; all {len(accepted):,} there after kill -9",
        )
    ]


def _check(server: Server, accepted: list[str]) -> None:
    """Every accepted job is there once, also after the server was killed."""
    server.stop(signal.SIGKILL)
    server.start()
    client = Client(server)
    there = client.job_ids()
    if len(set(accepted)) != len(accepted):
        raise WrongResultError("two submissions were given the same job id")
    if len(there) != len(set(there)) or set(there) != set(accepted):
        raise WrongResultError(f"{len(accepted)} jobs were accepted, {len(there)} are there")
    client.close()
