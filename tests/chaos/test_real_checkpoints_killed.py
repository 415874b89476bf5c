"""SIGKILL at every point of a save, on both kinds of roots: only whole checkpoints are ever seen."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import killed_saver
import pytest

from trainmaster.jobs import objects
from trainmaster.jobs.roots import Root, open_root

PROTOCOL = ("manifest.json", ".latest", ".latest.new", ".lock")


class Saver:
    """Saves in children of a process of its own, which has no threads."""

    def __init__(self, root: str, owner: Path, process: subprocess.Popen[str], strides: tuple[int, int]) -> None:
        self.root = root
        self.strides = strides
        """From one line at which a save, or a removal, is killed to the next."""
        self.owner = owner
        self._process = process
        self._attempt = 0
        self.step = 0

    def __call__(self, **how: Any) -> dict[str, Any]:
        """Save the next step as the next attempt."""
        self.step += 1
        self._attempt += 1
        self.owner.write_text(str(self._attempt))
        return self.order(step=self.step, attempt=self._attempt, **how)

    def order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"root": self.root, "owner": str(self.owner), **order}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(
    params=[
        ("directory", (3, 3)),
        ("s3", (36, 12)),
        pytest.param(("directory", (1, 1)), marks=pytest.mark.long),
        pytest.param(("s3", (12, 4)), marks=pytest.mark.long),
    ],
    ids=["directory", "s3", "every-line", "s3-more-lines"],
)
def saver(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saver]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    kind, strides = request.param
    where = str(tmp_path / "root") if kind == "directory" else request.getfixturevalue("s3_root")
    command = [sys.executable, killed_saver.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Saver(where, tmp_path / "owner", process, strides)
        assert process.stdin is not None
        process.stdin.close()


def check(root: Root, before: list[str], new: str, *, all_of_them: bool) -> list[str]:
    """What is listed is whole; returns it."""
    listed = root.committed()
    assert listed in (before, [*before, new])
    for rel_path in listed if all_of_them else listed[-1:]:
        step = root.verify(rel_path).step
        with root.fetch(rel_path) as directory:
            found = {name: (directory / name).read_bytes() for name in killed_saver.SIZES}
        assert found == {name: killed_saver.content(name, step) for name in killed_saver.SIZES}
    pointer = root.pointer("run", "latest")
    assert pointer in (None, *listed), "a pointer never comes before what it points to"
    return listed


def strays(root: Root) -> list[str]:
    """Files below a root that are no part of a checkpoint that is listed."""
    if root.uri.startswith("s3://"):
        place = objects.open_place(root.uri)
        there = [meta["path"].removeprefix(f"{place.key}/") for meta in objects.listing(place, place.key)]
    else:
        home = Path(root.uri)
        there = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    known = set()
    for rel_path in root.committed():
        manifest = root.manifest(rel_path)
        assert manifest is not None
        known |= {str(Path(rel_path, manifest.data, file.path)) for file in manifest.files}
    return [path for path in there if path not in known and Path(path).name not in PROTOCOL]


def test_save_killed_at_any_line_leaves_whole_checkpoints_only(saver: Saver) -> None:
    root = open_root(saver.root)
    assert not saver()["killed"]
    before = check(root, [], "run/1", all_of_them=True)
    assert before == ["run/1"]

    outcomes = set()
    # Until one lives. On S3 each save takes long, so that most points are left to the test below.
    for line in itertools.count(1, saver.strides[0]):
        killed = saver(line=line)["killed"]
        before = check(root, before, f"run/{saver.step}", all_of_them=False)
        if not killed:
            break
        outcomes.add(before[-1] == f"run/{saver.step}")
        if len(before) > 6:
            for rel_path in before[:-2]:
                root.remove(rel_path)
            before = before[-2:]
    assert outcomes == {True, False}, "it died before the commit, and after it"

    assert not saver()["killed"]
    listed = check(root, before, f"run/{saver.step}", all_of_them=True)
    assert listed[-1] == root.pointer("run", "latest") == f"run/{saver.step}"
    assert strays(root) == []


def test_save_killed_at_any_time_leaves_whole_checkpoints_only(saver: Saver) -> None:
    root = open_root(saver.root)
    saver()
    before = check(root, [], "run/1", all_of_them=True)
    chance = random.Random(7)
    for _ in range(30):
        saver(after_s=chance.uniform(0.0005, 0.05))
        before = check(root, before, f"run/{saver.step}", all_of_them=False)
    assert not saver()["killed"]
    check(root, before, f"run/{saver.step}", all_of_them=True)
    assert strays(root) == []


def test_removal_killed_at_any_line_leaves_whole_checkpoints_only(saver: Saver) -> None:
    root = open_root(saver.root)
    saver()
    alone = saver()["lines"]
    together = saver(remove=1)["lines"]
    assert root.committed() == ["run/2", "run/3"]
    for line in range(alone + 1, together + 1, saver.strides[1]):
        (*_, oldest, _last) = root.committed()
        saver(line=line, remove=int(oldest.removeprefix("run/")))
        for rel_path in root.committed()[-3:]:
            root.verify(rel_path)
    assert not saver()["killed"]
    for rel_path in root.committed():
        root.verify(rel_path)
    assert [path for path in strays(root) if ".removed-" in path or ".draft-" in path] == []


def test_save_of_a_stale_attempt_is_refused_and_leaves_nothing(saver: Saver) -> None:
    root = open_root(saver.root)
    saver()
    saver.owner.write_text("99")
    answer = saver.order(step=50, attempt=1)
    assert (answer["killed"], answer["failed"]) == (False, 1)
    assert root.committed() == ["run/1"]
    assert root.pointer("run", "latest") == "run/1"
    assert strays(root) == []
