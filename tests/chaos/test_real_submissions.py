"""Submissions that are sent more than once: because the server died, because the client did not wait, by mistake."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import httpx
from aftermath import check
from ground import Ground, MortalServer, lease_in

from patience import PATIENCE_S
from real_server import RealServer, wait_for


def test_server_killed_while_clients_submit_has_each_job_once(ground: Ground) -> None:
    server = ground.server().start()
    body = ground.quick_job()
    numbers = itertools.count(1)
    job_ids: list[str] = []

    def submit(number: int) -> str:
        while True:
            try:
                # Not the server's own way of asking: it is the main thread's to start it again.
                answer = RealServer.ask(server, "POST", "/v1/jobs", body, headers={"Idempotency-Key": f"job {number}"})
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            assert answer.status_code in (201, 503), answer.text
            if answer.status_code == 201:
                return str(answer.json()["data"]["job_id"])

    def keep_submitting() -> None:
        while (number := next(numbers)) <= 50:
            job_ids.append(submit(number))

    def until_submitted(number: int) -> None:
        wait_for(lambda: len(job_ids) >= number, f"{number} submissions")

    clients = [threading.Thread(target=keep_submitting, daemon=True) for _ in range(4)]
    for client in clients:
        client.start()
    for submitted in (5, 25):
        until_submitted(submitted)
        server.kill()
        server.start()
    for client in clients:
        client.join()
    assert len(set(job_ids)) == 50
    for job_id in job_ids:
        server.until(job_id)
    assert len([entry for entry in ground.ledger() if entry.what == "start"]) == 50
    lease = lease_in(f"sqlite:///{server.directory / 'trainmaster.db'}")
    assert lease is not None
    assert lease.epoch == 1, "it had to wait for its own lease to run out"
    check(ground, server, dict.fromkeys(job_ids, "COMPLETED"))


def test_submission_sent_again_with_its_key_makes_one_job(ground: Ground) -> None:
    server = ground.server().start()
    body = ground.quick_job()
    once = {"headers": {"Idempotency-Key": "once"}}
    first, second = (server.ask("POST", "/v1/jobs", body, **once) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    job_id = first.json()["data"]["job_id"]
    assert second.json()["data"]["job_id"] == job_id
    assert (first.headers.get("Idempotent-Replayed"), second.headers.get("Idempotent-Replayed")) == (None, "true")
    other = server.ask("POST", "/v1/jobs", {**body, "name": "another"}, **once)
    assert other.status_code == 422
    assert other.json()["error"]["code"] == "IDEMPOTENCY_KEY_REUSED"

    crowd = asyncio.run(submit_at_once(server, body, 100))
    assert {answer.status_code for answer in crowd} == {201}
    (crowd_id,) = {answer.json()["data"]["job_id"] for answer in crowd}
    assert [answer.headers.get("Idempotent-Replayed") for answer in crowd].count(None) == 1
    for submitted in (job_id, crowd_id):
        server.until(submitted)
    check(ground, server, {job_id: "COMPLETED", crowd_id: "COMPLETED"})


async def submit_at_once(server: MortalServer, body: dict[str, Any], times: int) -> list[httpx.Response]:
    headers = {"Authorization": f"Bearer {server.key}", "Idempotency-Key": "crowd"}
    async with httpx.AsyncClient(
        headers=headers, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)
    ) as client:
        return await asyncio.gather(*(client.post(f"{server.url}/v1/jobs", json=body) for _ in range(times)))
