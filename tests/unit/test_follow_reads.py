"""Followers: each change is read once for all of them, and sent once to each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainmaster.server.http import followers as follow
from trainmaster.server.http.followers import Followers, StreamPiece
from trainmaster.server.store.database import Database

FOLLOWERS = 20
LINES = 10


@dataclass(eq=False)
class Growing:
    """A source of numbered lines."""

    job_id: str | None = None
    lines: int = 0
    reads: list[str] = field(default_factory=list)

    def take_snapshot(self, connection: Any, before: Any, *, changed: bool) -> int:
        return self.lines

    def read(self, snapshot: int, cursor: str) -> StreamPiece:
        self.reads.append(cursor)
        data = b"".join(b"%d\n" % number for number in range(int(cursor), snapshot))
        return StreamPiece(data=data, cursor=str(snapshot), end=snapshot == LINES, at_end=True)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    yield database
    database.close()


def test_change_is_read_once_and_reaches_every_follower_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SNAPSHOT_EVERY_S", 0.001)
    monkeypatch.setattr(follow, "WAKE_S", 0.0)
    monkeypatch.setattr(follow, "HEARTBEAT_S", 1000.0)
    source = Growing()

    async def main() -> list[bytes]:
        followers = Followers(database)
        received = [b""] * FOLLOWERS

        async def one(number: int) -> None:
            async for piece in followers.follow(source, "0"):
                received[number] += piece

        tasks = [asyncio.ensure_future(one(number)) for number in range(FOLLOWERS)]
        for line in range(1, LINES + 1):
            source.lines = line
            while not all(task.done() or each.count(b"\n") >= line for task, each in zip(tasks, received, strict=True)):
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        return received

    received = asyncio.run(asyncio.wait_for(main(), 60))
    assert received == [b"".join(b"%d\n" % number for number in range(LINES))] * FOLLOWERS
    # Nobody reads again what is known to be at its end: one reading for each cursor.
    assert len(source.reads) == len(set(source.reads))
