"""Saving while training goes on: what is committed is whole, what fails is told, nothing piles up."""

from __future__ import annotations

import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import assert_no_pickle, same
from forked_ranks import run_ranks

from patience import PATIENCE_S
from trainmaster.jobs import checkpoint_saver, rng, trees
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest
from trainmaster.jobs.checkpoint_reader import InexactResumeError
from trainmaster.jobs.checkpoint_saver import SaveError, Saver
from trainmaster.jobs.process import current_process
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import LocalRoot, open_root
from trainmaster.jobs.trees import TreeError
from trainmaster.protocol import environment

TREE = {"model": {"w": torch.arange(6.0)}, "optimizer": {"m": np.arange(3)}, "step": 3}


class SlowRoot(LocalRoot):
    """A root whose commits wait until they are let through."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.drafts = 0
        self.most_drafts = 0

    @contextmanager
    def draft(self, *args: Any, **kwargs: Any) -> Iterator[Path]:
        with super().draft(*args, **kwargs) as directory:
            self.drafts += 1
            self.most_drafts = max(self.drafts, self.most_drafts)
            try:
                yield directory
            finally:
                self.drafts -= 1

    def commit(self, *args: Any, **kwargs: Any) -> Manifest:
        assert self.gate.wait(PATIENCE_S)
        return super().commit(*args, **kwargs)


class FailingRoot(LocalRoot):
    """A root whose first commit fails."""

    error: Exception | None = OSError("no space left")

    def commit(self, *args: Any, **kwargs: Any) -> Manifest:
        error, self.error = self.error, None
        if error is not None:
            raise error
        return super().commit(*args, **kwargs)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_checkpoint_has_all_that_was_given(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        saver.save(
            TREE,
            rel_path="project/group/name/checkpoint-3",
            step=3,
            epoch=0.5,
            metrics={"loss": 1.5},
            metadata={"position": [1, 2], "best": -math.inf},
            files={"job.json": '{"name": "n"}'},
            kind="test",
        )
        saved = saver.wait()
        assert saved is not None
        assert saved.rel_path == "project/group/name/checkpoint-3"
        tree, metadata, manifest = saver.load(saved.rel_path)
    assert same(tree, TREE)
    assert metadata == {"position": [1, 2], "best": -math.inf}
    assert (manifest.step, manifest.epoch, manifest.metrics, manifest.kind) == (3, 0.5, {"loss": 1.5}, "test")
    assert manifest.framework == "torch"
    assert {file.path for file in manifest.files} == {
        "arrays-00000.safetensors",
        "job.json",
        "metadata.json",
        "rng-0.json",
        "rng-0.safetensors",
        "tree.json",
    }
    assert_no_pickle(tmp_path)


def test_training_goes_on_while_a_save_is_under_way(tmp_path: Path) -> None:
    root = SlowRoot(tmp_path)
    weight = torch.ones(1000)
    with Saver(root) as saver:
        saver.save({"w": weight}, rel_path="c", step=1)
        weight.zero_()
        assert root.manifest("c") is None
        root.gate.set()
        saver.wait()
        assert bool((saver.load("c").tree["w"] == 1).all())


def test_one_save_at_a_time_is_under_way(tmp_path: Path) -> None:
    root = SlowRoot(tmp_path)
    with Saver(root) as saver:
        saver.save(TREE, rel_path="c-1", step=1)
        threading.Timer(0.2, root.gate.set).start()
        saver.save(TREE, rel_path="c-2", step=2)
        assert root.committed() == ["c-1"] or root.committed() == ["c-1", "c-2"]
    assert root.most_drafts == 1
    assert root.committed() == ["c-1", "c-2"]


@pytest.mark.parametrize("error", [OSError("no space left"), NotOwnerError("another attempt"), RuntimeError("odd")])
def test_what_went_wrong_is_raised_by_the_next_call(error: Exception, tmp_path: Path) -> None:
    root = FailingRoot(tmp_path)
    root.error = error
    with Saver(root) as saver:
        saver.save(TREE, rel_path="c-1", step=1)
        with pytest.raises(type(error), match=str(error)):
            saver.save(TREE, rel_path="c-2", step=2)
        assert root.committed() == []
        assert list(tmp_path.iterdir()) == []
        saver.save(TREE, rel_path="c-3", step=3)
        saver.wait()
    assert root.committed() == ["c-3"]


def test_what_went_wrong_is_raised_by_close(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left"), Saver(FailingRoot(tmp_path)) as saver:
        saver.save(TREE, rel_path="c", step=1)


def test_tree_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        with pytest.raises(TreeError, match="a/b: a checkpoint cannot hold"):
            saver.save({"a": {"b": object()}}, rel_path="c", step=1)
        with pytest.raises(TypeError, match="JSON"):
            saver.save(TREE, rel_path="c", step=1, metadata={"x": object()})
        with pytest.raises(ValueError, match=r"'tree\.json' cannot be the name"):
            saver.save(TREE, rel_path="c", step=1, files={"tree.json": ""})
        with pytest.raises(ValueError, match="no path below a root"):
            saver.save(TREE, rel_path="../c", step=1)
        assert saver.wait() is None
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        saver.save({"x": 1}, rel_path="c", step=1)
        for number in (2, 3):
            saver.save({"x": number}, rel_path="c", step=1)
        saver.wait()
        assert [saver.load(name).tree["x"] for name in ("c", "c-attempt-0", "c-attempt-0-2")] == [1, 2, 3]


def test_small_staging_memory_is_enough(tmp_path: Path) -> None:
    tree = {str(index): torch.full((1 << 18,), index) for index in range(8)}
    with Saver(open_root(tmp_path), staging_bytes=0) as saver:
        saver.save(tree, rel_path="c", step=1)
        saver.wait()
        assert same(saver.load("c", tree).tree, tree)


def test_memory_for_copies_comes_back_when_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of files which were never begun: a save would wait for it, for ever."""
    monkeypatch.setattr(trees.writer, "SHARD_BYTES", 1)
    tree = {str(number): np.zeros(4) for number in range(40)}
    plan = trees.plan(tree)
    buffers = trees.Buffers(0)
    plan.start(tmp_path, buffers).result()
    buffers.limit = 1 << 40
    with pytest.raises(OSError, match="Not a directory"):
        plan.start(Path("/dev/null"), buffers).result()
    buffers.limit = 0
    done = threading.Thread(target=lambda: buffers.acquire(1, pinned=False), daemon=True)
    done.start()
    done.join(PATIENCE_S)
    assert not done.is_alive()


def test_prepared_memory_is_what_a_save_uses(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        saver.prepare(TREE)
        saver.save(TREE, rel_path="c", step=1)
        saver.wait()
        assert same(saver.load("c").tree, TREE)


def test_exact_load_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        saver.save(TREE, rel_path="c", step=1)
        expected = (random.random(), np.random.rand(), torch.rand(2).tolist())
        saver.load("c")
        assert (random.random(), np.random.rand(), torch.rand(2).tolist()) != expected
        saver.load("c", exact=True)
        assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected
        rng.restore(saver.load_rng("c"))
        assert (random.random(), np.random.rand(), torch.rand(2).tolist()) == expected


@pytest.mark.parametrize(
    ("needs", "missing"),
    [(["model", "optimizer", "position"], None), (["scheduler"], "scheduler"), (["data", "scaler"], "data, scaler")],
)
def test_load_names_what_an_exact_resume_lacks(needs: list[str], missing: str | None, tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        saver.save(TREE, rel_path="c", step=1, metadata={"position": 5})
        if missing is None:
            saver.load("c", exact=True, needs=needs)
            return
        with pytest.raises(InexactResumeError, match=f"c lacks {missing}:"):
            saver.load("c", exact=True, needs=needs)


def test_exact_load_without_the_state_of_random_numbers_is_refused(tmp_path: Path) -> None:
    """Such as a checkpoint that something else wrote."""
    root = LocalRoot(tmp_path)
    with Saver(root) as saver:
        saver.save(TREE, rel_path="c", step=1)
        saver.wait()
        for name in ("rng-0.json", "rng-0.safetensors"):
            (tmp_path / "c" / name).unlink()
        document = json.loads((tmp_path / "c" / "manifest.json").read_text())
        document["files"] = [file for file in document["files"] if not file["path"].startswith("rng-")]
        (tmp_path / "c" / "manifest.json").write_text(json.dumps(document))
        assert same(saver.load("c").tree, TREE)
        with pytest.raises(InexactResumeError, match="lacks the state of rank 0's random-number generators"):
            saver.load("c", exact=True)
        with pytest.raises(InexactResumeError, match="lacks the state of rank 0"):
            saver.load_rng("c")


@pytest.mark.parametrize(
    "name", ["arrays-00000.safetensors", "tree.json", "metadata.json", "job.json", "rng-0.safetensors", "rng-0.json"]
)
@pytest.mark.parametrize("damage", [_flip, Path.unlink], ids=["flipped", "gone"])
def test_damage_to_any_file_is_found(name: str, damage: Any, tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        saver.save(TREE, rel_path="c", step=1, files={"job.json": "{}"})
        saver.wait()
        damage(tmp_path / "c" / name)
        with pytest.raises(CorruptCheckpointError, match=name):
            saver.load("c")


def test_corrupt_checkpoint_is_passed_over_with_a_note(tmp_path: Path) -> None:
    events = tmp_path / "events"
    reporter = Reporter({environment.EVENTS_FILE: str(events)})
    with Saver(open_root(tmp_path / "root"), reporter=reporter) as saver:
        for step in (1, 2, 3):
            saver.save({"step": step, "w": torch.ones(3)}, rel_path=f"checkpoint-{step}", step=step)
        saver.wait()
        _flip(tmp_path / "root" / "checkpoint-3" / "arrays-00000.safetensors")
        found, loaded = saver.load_latest_good()
        assert (found, loaded.tree["step"]) == ("checkpoint-2", 2)
        notes = [event["message"] for event in _events(events) if event["type"] == "note"]
        assert len(notes) == 1
        assert "checkpoint-3 is corrupt, the one before it is used" in notes[0]
        assert saver.load_latest_good(start="checkpoint-1")[0] == "checkpoint-1"
        _flip(tmp_path / "root" / "checkpoint-2" / "tree.json")
        _flip(tmp_path / "root" / "checkpoint-1" / "tree.json")
        with pytest.raises(CorruptCheckpointError, match="checkpoint-3"):
            saver.load_latest_good()


def test_nothing_to_load_is_said(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path)) as saver:
        with pytest.raises(FileNotFoundError, match="no checkpoint is committed"):
            saver.load("c")
        with pytest.raises(FileNotFoundError, match="no checkpoint is committed"):
            saver.load_latest_good()
        with pytest.raises(FileNotFoundError, match="no checkpoint is committed"):
            saver.load_latest_good(start="c")


def test_pointers_follow_the_commit(tmp_path: Path) -> None:
    root = SlowRoot(tmp_path)
    with Saver(root, home="project/group/name") as saver:
        saver.save(TREE, rel_path="project/group/name/steps/1", step=1, point=["latest", "best"])
        assert root.pointer("project/group/name", "latest") is None
        root.gate.set()
        saver.save(TREE, rel_path="project/group/name/steps/2", step=2, point=["latest"])
    assert root.pointer("project/group/name", "latest") == "steps/2"
    assert root.pointer("project/group/name", "best") == "steps/1"


def test_old_checkpoints_go_but_those_in_use(tmp_path: Path) -> None:
    root = open_root(tmp_path)
    with Saver(root, home="a/job", keep=2) as saver, Saver(root, home="another") as other:
        other.save(TREE, rel_path="another/1", step=1)
        for step in range(1, 6):
            point = ["best"] if step == 2 else ["latest"]
            saver.save(TREE, rel_path=f"a/job/steps/{step}", step=step, point=point)
    assert root.committed() == ["another/1", "a/job/steps/2", "a/job/steps/4", "a/job/steps/5"]


def test_inside_a_job_the_server_prunes(tmp_path: Path) -> None:
    reporter = Reporter({environment.JOB_ID: "job-1"})
    root = open_root(tmp_path)
    with Saver(root, keep=1, reporter=reporter) as saver:
        for step in range(3):
            saver.save(TREE, rel_path=f"c-{step}", step=step)
    assert len(root.committed()) == 3


def test_server_is_told_of_a_commit_and_of_nothing_else(tmp_path: Path) -> None:
    events = tmp_path / "events"
    reporter = Reporter({environment.EVENTS_FILE: str(events), environment.JOB_ID: "job-1", environment.ATTEMPT: "2"})
    root = FailingRoot(tmp_path / "root")
    with Saver(root, reporter=reporter) as saver:
        saver.save(TREE, rel_path="c-1", step=1)
        with pytest.raises(OSError, match="no space"):
            saver.wait()
        saver.save(TREE, rel_path="c-2", step=2, metrics={"loss": 0.5})
    told = [event for event in _events(events) if event["type"] == "checkpoint"]
    assert [(event["path"], event["step"], event["metrics"]) for event in told] == [
        (str(tmp_path / "root" / "c-2"), 2, {"loss": 0.5})
    ]
    phases = [event["phase"] for event in _events(events) if event["type"] == "phase"]
    assert phases == ["checkpointing", "training"] * 2


def test_stale_attempt_cannot_commit(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("mine")
    (tmp_path / "owner.json").write_text(json.dumps({"token": "another's"}))
    reporter = Reporter(
        {environment.OWNER_FILE: str(tmp_path / "owner.json"), environment.TOKEN_FILE: str(tmp_path / "token")}
    )
    root = open_root(tmp_path / "root")
    saver = Saver(root, reporter=reporter)
    saver.save(TREE, rel_path="c", step=1)
    with pytest.raises(NotOwnerError):
        saver.close()
    assert root.committed() == []


# Several ranks.


def test_ranks_save_together(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        random.seed(rank)
        with Saver(open_root(tmp_path / "root"), current_process()) as saver:
            saver.save({"w": torch.full((3,), rank)}, rel_path="c", step=1, metadata={"rank": rank})
            saved = saver.wait()
            assert saved is not None
            drawn = random.random()
            tree, metadata, manifest = saver.load("c", exact=True)
            assert random.random() == drawn
            return [saved.rel_path, tree["w"].tolist(), metadata, manifest.world_size]

    assert run_ranks(2, work, tmp_path / "ranks") == [["c", [0, 0, 0], {"rank": 0}, 2]] * 2
    files = {path.name for path in (tmp_path / "root" / "c").iterdir()}
    assert {"rng-0.json", "rng-1.json", "rng-0.safetensors", "rng-1.safetensors"} < files
    assert not any(name.startswith(".") for name in files)
    with Saver(open_root(tmp_path / "root")) as saver:
        with pytest.raises(InexactResumeError, match="saved by 2 processes and cannot be resumed exactly by 1"):
            saver.load("c", exact=True)
        assert saver.load("c").tree["w"].tolist() == [0, 0, 0]


def test_failure_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    root = tmp_path / "root"

    def work(rank: int) -> list[str]:
        said = []
        with Saver(open_root(root), current_process()) as saver:
            if rank == 1:
                checkpoint_saver.rng.write = _raise  # type: ignore[assignment]
            saver.save(TREE, rel_path="c-1", step=1)
            try:
                saver.wait()
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            assert open_root(root).committed() == []
            if rank == 1:
                checkpoint_saver.rng.write = write
            saver.save(TREE, rel_path="c-2", step=2)
        return said

    def _raise(*_: Any) -> None:
        raise OSError("rank 1's disk is full")

    write = rng.write
    first, second = run_ranks(2, work, tmp_path / "ranks")
    assert "rank 1 could not write its part of c-1: OSError: rank 1's disk is full" in first[0]
    assert "rank 1's disk is full" in second[0]
    assert open_root(root).committed() == ["c-2"]
    assert [path.name for path in root.iterdir()] == ["c-2"]


def test_rank_that_cannot_begin_is_told_to_all(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        said = []
        with Saver(open_root(tmp_path / "root"), current_process()) as saver:
            start = trees.TreePlan.start
            if rank == failing:
                trees.TreePlan.start = _raise  # type: ignore[assignment,method-assign]
            try:
                saver.save(TREE, rel_path="c-1", step=1)
            except MemoryError as error:
                said.append(f"now: {error}")
            trees.TreePlan.start = start  # type: ignore[method-assign]
            try:
                saver.save(TREE, rel_path="c-2", step=2)
            except Exception as error:
                said.append(f"then: {error}")
            saver.save(TREE, rel_path="c-3", step=3)
        return said

    def _raise(*_: Any) -> None:
        raise MemoryError("no memory")

    for failing in (0, 1):
        said = run_ranks(2, work, tmp_path / f"ranks-{failing}")
        assert said[failing][0] == "now: no memory"
        assert len(said[failing]) == 2
        assert all("no memory" in words[-1] and words[-1].startswith("then: ") for words in said)
        assert open_root(tmp_path / "root").committed() == ["c-3"]
        open_root(tmp_path / "root").remove("c-3")


def test_ranks_that_share_no_directory_are_told(tmp_path: Path) -> None:
    class Elsewhere(LocalRoot):
        """A draft that only rank 0 sees, as on another machine."""

        @contextmanager
        def draft(self, *args: Any, **kwargs: Any) -> Iterator[Path]:
            yield tmp_path / "not" / "there"

    def work(rank: int) -> str:
        saver = Saver(Elsewhere(tmp_path / "root"), current_process())
        try:
            saver.save(TREE, rel_path="c", step=1)
        except SaveError as error:
            return str(error)
        return ""

    said = run_ranks(2, work, tmp_path / "ranks")
    assert all("need a directory that they share" in words for words in said)


def test_failure_of_rank_0_is_told_to_all(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        said = []
        with Saver(FailingRoot(tmp_path / "root"), current_process()) as saver:
            saver.save(TREE, rel_path="c", step=1)
            try:
                saver.save(TREE, rel_path="d", step=1)
            except (OSError, SaveError) as error:
                said.append(f"{type(error).__name__}: {error}")
            saver.save(TREE, rel_path="e", step=1)
            saver.wait()
            try:
                saver.save(TREE, rel_path="e/below", step=1)
            except (FileExistsError, SaveError) as error:
                said.append(type(error).__name__)
        return said

    first, second = run_ranks(2, work, tmp_path / "ranks")
    assert first == ["OSError: no space left", "FileExistsError"]
    assert second == ["SaveError: process 0 failed to save a checkpoint: OSError: no space left", "SaveError"]


def test_rank_that_does_not_come_is_named_and_only_a_draft_is_left_of_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    over = tmp_path / "over"

    def work(rank: int) -> str:
        saver = Saver(open_root(root), current_process(), timeout_s=1.0)
        if rank == 1:
            hang = threading.Event()
            checkpoint_saver.rng.write = lambda *_: hang.wait() and {}  # type: ignore[assignment,return-value,func-returns-value]
        saver.save(TREE, rel_path="c", step=1)
        if rank == 1:
            while not over.exists():
                time.sleep(0.02)
            return ""
        assert saver._thread is not None
        saver._thread.join()
        over.touch()
        return str(saver._problem)

    assert run_ranks(2, work, tmp_path / "ranks")[0] == "rank 1 did not write its part of c within 1 s"
    assert open_root(root).committed() == []


def test_killed_rank_leaves_only_a_draft(tmp_path: Path) -> None:
    root = SlowRoot(tmp_path / "root")

    def work(rank: int) -> None:
        saver = Saver(root)
        saver.save(TREE, rel_path="c-1", step=1)
        os._exit(0)

    with pytest.raises(AssertionError, match="died"):
        run_ranks(1, work, tmp_path / "ranks", connect=False)
    assert open_root(tmp_path / "root").committed() == []
    with Saver(open_root(tmp_path / "root")) as saver:
        saver.save(TREE, rel_path="c-2", step=2)
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["c-2"]


# Last: the client of the object store has threads, and ranks are forked.


def test_object_store_is_a_root_like_any_other(s3_root: str) -> None:
    """It prunes itself there, also inside a job: the server does not see it."""
    root = open_root(s3_root)
    with Saver(root, keep=2, reporter=Reporter({environment.JOB_ID: "job-1"})) as saver:
        for step in (1, 2, 3):
            saver.save({**TREE, "step": step}, rel_path=f"checkpoint-{step}", step=step, point=["latest"])
        saver.wait()
        assert root.committed() == ["checkpoint-2", "checkpoint-3"]
        assert root.pointer("", "latest") == "checkpoint-3"
        assert same(saver.load("checkpoint-3", exact=True).tree, {**TREE, "step": 3})
        found, loaded = saver.load_latest_good()
        assert (found, loaded.tree["step"]) == ("checkpoint-3", 3)
