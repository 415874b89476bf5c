"""Webhooks of real servers that are killed in the middle of deliveries."""

from __future__ import annotations

from typing import Any

import pytest
from ground import Ground

from real_server import wait_for
from webhook_receiver import Receiver, receiving


def subscribe(server: Any, receiver: Receiver) -> None:
    server.data("POST", "/v1/webhooks", {"url": receiver.url, "secret": receiver.secret, "statuses": ["COMPLETED"]})


def completed(receiver: Receiver) -> list[str]:
    """The jobs that were told of, each at its first time."""
    return list(dict.fromkeys(event["job"]["job_id"] for event in receiver.taken))


def test_server_killed_after_a_delivery_loses_none(ground: Ground) -> None:
    server = ground.server().start(TRAINMASTER_FAILPOINT="webhook:delivered:2")
    with receiving() as receiver:
        subscribe(server, receiver)
        submitted = [server.submit("true") for _ in range(4)]
        for job_id in submitted:
            server.until(job_id, "COMPLETED")
        wait_for(lambda: [server.revive(), len(completed(receiver)) == 4][1], "every job to be told of")
        assert server.deaths == 1
        assert set(completed(receiver)) == set(submitted)
        ids = [int(event["event_id"]) for event in receiver.taken]
        assert ids == sorted(ids)
        assert len(ids) - len(set(ids)) == 1  # told, and killed before that was written down
    ground.leave()


@pytest.mark.long  # the next server of one database goes on alike
def test_webhooks_go_on_with_the_server_that_takes_over(ground: Ground) -> None:
    shared = [
        *("--database", f"sqlite:///{ground.path / 'shared.db'}"),
        *("--runs-root", str(ground.path / "runs")),
        *("--artifacts-root", str(ground.path / "artifacts")),
    ]
    first = ground.server("a", *shared).start()
    second = ground.server("b", *shared).start()
    with receiving() as receiver:
        subscribe(second, receiver)
        before = second.submit("true")
        second.until(before, "COMPLETED")
        wait_for(lambda: completed(receiver) == [before], "the first job to be told of")
        first.kill()
        after = second.submit("true")
        second.until(after, "COMPLETED")
        wait_for(lambda: completed(receiver) == [before, after], "the second job to be told of")
    ground.leave()
