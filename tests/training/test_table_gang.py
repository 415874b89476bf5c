"""A gang that makes a table's shards together: a head and writers, each a process that somebody else starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from iceberg_tables import ROWS, table_at, table_on

from patience import PATIENCE_S
from real_server import wait_for
from seaweed_server import ASKER, ASKER_SECRET, ROLE, SeaweedServer
from trainmaster.jobs import data_cache
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.tables.shard_writer import KIND
from trainmaster.training.tables.table_reader import Source

MEMBER = subprocess.Popen[str]


class Meeting:
    """Where the members of one gang meet, and what they are given."""

    def __init__(self, home: Path, name: str, spec: dict[str, Any], **variables: str) -> None:
        self.home = home
        self.directory = home / name
        inputs = self.directory / "inputs"
        inputs.mkdir(parents=True)
        (inputs / "initializers.json").write_text(json.dumps({"dataset": spec, "endpoints_of_the_job": []}))
        own = {
            "CACHE_DIR": home / "cache",
            "DATA_ROOTS": home,
            "EVENTS_FILE": self.directory / "events",
            "GANG_DIR": "gang",
            "INPUTS_DIR": inputs,
            "PREPARED_DIR": self.directory / "prepared",
        }
        ours = {f"TRAINMASTER_{name}": str(value) for name, value in own.items()}
        self.environment = {**os.environ, **ours, **variables}
        self.members: list[MEMBER] = []

    def head(self) -> MEMBER:
        return self._start("trainmaster.training.initializer", "dataset")

    def writer(self, index: int) -> MEMBER:
        return self._start("trainmaster.training.tables.shard_writer", str(index))

    def held_writer(self, index: int) -> MEMBER:
        """A writer that waits for work, and will not notice that there is some."""
        member = self.writer(index)
        wait_for(lambda: (self.directory / "prepared" / "gang" / f"writer-{index}").exists(), "the writer")
        member.send_signal(signal.SIGSTOP)
        return member

    def work(self) -> dict[str, Any] | None:
        """What the head has asked for."""
        path = self.directory / "prepared" / "gang" / "gang.json"
        return json.loads(path.read_text()) if path.exists() else None

    def shards(self) -> dict[str, int]:
        """The shards that are there, whether all of them are or not, and when they were written."""
        return {path.name: path.stat().st_mtime_ns for path in (self.home / "cache").rglob("shard-*.arrow")}

    def rows(self) -> list[int]:
        """The rows that the ranks of a job would have, in order."""
        batches = data_cache.record_batches(0, 1, path=self.directory / "prepared" / "dataset")
        return sorted(row for batch in batches for row in batch["id"].to_pylist())

    def failure(self) -> tuple[str, str]:
        """Why the head failed, as it says."""
        lines = map(json.loads, (self.directory / "events").read_text().splitlines())
        (said,) = (line for line in lines if line["type"] == "failed")
        return said["reason"], said["message"]

    def _start(self, module: str, argument: str) -> MEMBER:
        self.members.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", module, argument],
                env=self.environment,
                cwd=self.home,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.members[-1]


@pytest.fixture
def meetings(tmp_path: Path) -> Iterator[list[Meeting]]:
    """Those of a test; what is left of them is ended."""
    met: list[Meeting] = []
    yield met
    for member in (member for meeting in met for member in meeting.members):
        member.kill()
        member.communicate()


def spec(location: str, count: int = 2, **options: Any) -> dict[str, Any]:
    sizes = {"head_cpu": "1", "head_mem": "4Gi", "worker_cpu": "1", "worker_mem": "4Gi", "iam_role": None}
    named = {"type": "cache", "storage_uri": "cache://made/rows", "metadata_loc": location, "num_data_nodes": count}
    return {**named, **sizes, **options}


def end_of(member: MEMBER) -> tuple[int, str]:
    output, _ = member.communicate(timeout=PATIENCE_S)
    return member.returncode, output


def test_gang_makes_shards_once_and_each_member_takes_on_the_role(
    seaweed: SeaweedServer, tmp_path: Path, meetings: list[Meeting]
) -> None:
    table = spec(table_on(seaweed, tmp_path), iam_role=ROLE)
    # The keys that they are given may do nothing but take on the role.
    keys = {**seaweed.environment, "AWS_ACCESS_KEY_ID": ASKER, "AWS_SECRET_ACCESS_KEY": ASKER_SECRET}
    first = Meeting(tmp_path, "first", table, **keys)
    meetings.append(first)
    members = [first.head(), first.writer(0), first.writer(1)]
    ends = [end_of(member) for member in members]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert "shard-00001-of-00002.arrow: 495 rows" in ends[0][1]
    assert first.rows() == list(ROWS)
    assert (first.work() or {})["shards"] == [0, 1]
    left = [path for path in first.directory.rglob("*") if path.is_file() and "inputs" not in path.parts]
    assert not [path for path in left if ASKER_SECRET.encode() in path.read_bytes()]
    # The next one finds them, and its writers have nothing to do.
    written = first.shards()
    second = Meeting(tmp_path, "second", table, **keys)
    meetings.append(second)
    waiting = second.writer(1)
    ends = [end_of(second.head()), end_of(waiting)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert (second.rows(), second.shards()) == (list(ROWS), written)


@pytest.mark.long
def test_gang_of_which_one_was_killed_goes_on_with_what_is_missing(tmp_path: Path, meetings: list[Meeting]) -> None:
    table = spec(table_at(f"file://{tmp_path}/warehouse", tmp_path))
    first = Meeting(tmp_path, "first", table)
    meetings.append(first)
    held = first.held_writer(1)
    head, other = first.head(), first.writer(0)
    assert end_of(other)[0] == 0
    written = first.shards()
    assert list(written) == ["shard-00000-of-00002.arrow"]
    held.kill()
    code, said = end_of(head)
    assert code == 1
    assert "RuntimeError: the writer of shard-00001-of-00002.arrow was killed; if memory is short, give" in said
    second = Meeting(tmp_path, "second", table)
    meetings.append(second)
    ends = [end_of(member) for member in [second.head(), second.writer(1)]]
    assert [code for code, _ in ends] == [0, 0], ends
    assert (second.work() or {})["shards"] == [1]
    assert second.rows() == list(ROWS)
    assert second.shards()["shard-00000-of-00002.arrow"] == written["shard-00000-of-00002.arrow"]


def test_writer_that_fails_is_the_head_s_failure(tmp_path: Path, meetings: list[Meeting]) -> None:
    meeting = Meeting(tmp_path, "first", spec(table_at(f"file://{tmp_path}/warehouse", tmp_path)))
    meetings.append(meeting)
    for file in (tmp_path / "warehouse").rglob("*.parquet"):
        file.unlink()
    head, writer = meeting.head(), meeting.writer(1)
    assert end_of(writer)[0] == 1
    assert end_of(head)[0] == 1
    reason, message = meeting.failure()
    assert reason == "BAD_INPUT"
    assert message.startswith("dataset-initializer: ")
    assert "there is no such file" in message


@pytest.mark.long
def test_writers_end_with_their_head(tmp_path: Path, meetings: list[Meeting]) -> None:
    location = table_at(f"file://{tmp_path}/warehouse", tmp_path)
    meeting = Meeting(tmp_path, "first", spec(location, 3))
    meetings.append(meeting)
    cache = Cache(tmp_path / "cache")
    access = Access(cache=cache.root, working_directory=tmp_path, data_roots=(tmp_path,))
    source = Source.reached(location, access)
    with cache.lock(KIND, source.key(source.table(), 3)):  # another job makes the same, for long
        head, early = meeting.head(), meeting.writer(0)
        assert head.stdout is not None
        assert any("waiting for another job" in line for line in iter(head.stdout.readline, ""))
        assert (meeting.work(), early.poll()) == (None, None)
        head.kill()
        assert end_of(early) == (0, "")
    # One that comes to work which a head has left does not begin it.
    again = Meeting(tmp_path, "again", spec(location, 3))
    meetings.append(again)
    head = again.head()
    wait_for(lambda: again.work(), "the work")
    head.kill()
    head.wait()
    assert end_of(again.writer(2)) == (0, "")
    assert again.shards() == {}
