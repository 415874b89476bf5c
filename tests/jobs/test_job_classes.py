"""Job classes: what the public methods promise, with NumPy arrays."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from walking import Walk, WalkConfig, flip_a_byte, walk

from patience import PATIENCE_S
from trainmaster.jobs import (
    BasicJob,
    CheckpointedJob,
    CorruptCheckpointError,
    ExecutionSpec,
    RestoreableJob,
    basic_job,
    report,
)
from trainmaster.jobs.basic_job import UnknownJobClassError
from trainmaster.jobs.config_document import ConfigurationError
from trainmaster.jobs.trees import TreeError
from trainmaster.protocol.reasons import EXIT_STOPPED


class Silent(BasicJob[WalkConfig]):
    def run(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Needy:
    steps: int


class NeedyJob(BasicJob[Needy]):
    def run(self) -> None: ...


class OtherWalk(Walk):
    """Not registered under a name of its own."""


def checkpoint(root: Path, suffix: str, name: str = "walk") -> Path:
    return root / "checkpoints" / "general" / "default" / name / suffix


# -- the whole of it --


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (BasicJob, "run", []),
        (CheckpointedJob, "_get_checkpoint_path", ["spec", "suffix"]),
        (CheckpointedJob, "get_tree_and_metadata_from_path", ["rel_path", "template_tree", "partial"]),
        (CheckpointedJob, "get_tree_and_metadata", ["suffix", "template_tree"]),
        (CheckpointedJob, "save_tree_and_metadata_from_path", ["rel_path", "tree", "metadata"]),
        (CheckpointedJob, "save_tree_and_metadata", ["suffix", "tree", "metadata"]),
        (CheckpointedJob, "get_metadata_from_path", ["rel_path"]),
        (CheckpointedJob, "get_metadata", ["suffix"]),
        (RestoreableJob, "restore_from_path", ["rel_path"]),
        (RestoreableJob, "restore", ["suffix"]),
        (RestoreableJob, "register", ["suffix"]),
        (RestoreableJob, "latest", ["spec"]),
        (RestoreableJob, "from_checkpoint_path", ["rel_path", "spec", "runtime_cfg", "resume"]),
        (RestoreableJob, "from_checkpoint", ["suffix", "spec", "runtime_cfg", "resume"]),
        (RestoreableJob, "checkpoints", ["spec"]),
    ],
)
def test_published_interface_takes_its_arguments_by_position_and_by_name(
    owner: type, name: str, parameters: list[str]
) -> None:
    taken = [
        parameter.name
        for parameter in inspect.signature(getattr(owner, name)).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and parameter.name != "self"
    ]
    assert taken[: len(parameters)] == parameters
    assert issubclass(RestoreableJob, owner)


# -- making one --


def test_job_without_a_configuration_has_the_defaults(tmp_path: Path) -> None:
    assert Silent(ExecutionSpec.local(tmp_path, "x")).config == WalkConfig()


def test_job_without_a_configuration_that_it_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="steps: required"):
        NeedyJob.local(tmp_path, "x")


def test_configuration_may_be_typed_or_plain(tmp_path: Path) -> None:
    assert Silent.local(tmp_path, "x", config=WalkConfig(steps=3)).config.steps == 3
    assert Silent.local(tmp_path, "x", config={"steps": "3"}).config.steps == 3
    with pytest.raises(ConfigurationError, match="did you mean 'steps'"):
        Silent.local(tmp_path, "x", config={"step": 3})


# -- running --


def test_run_ends_with_everything_saved(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job()
    assert job.finished
    assert Walk.checkpoints(job.spec) == ["steps/2", "steps/4", "steps/6"]
    assert Walk.latest(job.spec) == "steps/6"


def test_done_job_is_not_run_again(tmp_path: Path) -> None:
    job = walk(tmp_path, steps=0)
    job()
    assert not job.finished
    assert Walk.latest(job.spec) is None


def test_work_that_fails_still_commits_the_save_that_is_under_way(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job.after_step = lambda: job.step == 3 and 1 / 0  # type: ignore[assignment,func-returns-value,return-value]
    with pytest.raises(ZeroDivisionError):
        job()
    assert Walk.latest(job.spec) == "steps/2"
    assert not job.finished


# -- saving and loading --


def test_checkpoint_holds_tree_metadata_configuration_and_identity(tmp_path: Path) -> None:
    job = walk(tmp_path, stride=0.5)
    job()
    directory = checkpoint(tmp_path, "steps/4")
    assert Walk._get_checkpoint_path(job.spec, "steps/4") == directory
    assert json.loads((directory / "metadata.json").read_text()) == {"step": 4}
    assert yaml.safe_load((directory / "config.yaml").read_text()) == {"steps": 6, "stride": 0.5, "save_every": 2}
    saved = json.loads((directory / "job.json").read_text())
    assert {name: saved[name] for name in ("name", "id", "project", "group")} == {
        "name": "walk",
        "id": None,
        "project": "general",
        "group": "default",
    }
    assert saved["job_class"] == "test/walk"
    assert saved["hardware"]["hosts"][0]["cluster"]["root"] == str(tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert (manifest["step"], manifest["kind"]) == (4, "job_class")
    assert not [path for path in directory.rglob("*") if path.suffix in {".pkl", ".pt", ".npy", ".bin"}]


def test_tree_and_metadata_come_back(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job()
    again = walk(tmp_path)
    tree, metadata = again.get_tree_and_metadata("steps/6", again.state)
    np.testing.assert_array_equal(tree["position"], job.state["position"])
    np.testing.assert_array_equal(tree["velocity"]["m"], job.state["velocity"]["m"])
    assert metadata == again.get_metadata("steps/6") == {"step": 6}


def test_partial_load_takes_what_the_template_has_and_leaves_the_rest(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job()
    template = {"position": np.ones(3), "head": np.full(2, 5.0)}
    tree, _ = walk(tmp_path, "other").get_tree_and_metadata_from_path(
        "general/default/walk/steps/6", template, partial=True
    )
    np.testing.assert_array_equal(tree["position"], job.state["position"])
    np.testing.assert_array_equal(tree["head"], template["head"])
    with pytest.raises(Exception, match="head"):
        job.get_tree_and_metadata("steps/6", template)


def test_load_of_an_own_checkpoint_restores_the_generators_and_a_partial_one_does_not(tmp_path: Path) -> None:
    job = walk(tmp_path, steps=2)
    job()
    expected = np.random.normal(size=4)
    np.random.seed(1)
    job.get_tree_and_metadata("steps/2", job.state, partial=True)
    other = walk(tmp_path, "other")
    other.get_tree_and_metadata_from_path("general/default/walk/steps/2", other.state)
    assert not np.array_equal(np.random.normal(size=4), expected)
    job.get_tree_and_metadata("steps/2", job.state)
    np.testing.assert_array_equal(np.random.normal(size=4), expected)


def test_checkpoints_of_another_job_can_be_written_and_read(tmp_path: Path) -> None:
    job = walk(tmp_path, "mine")
    place = "general/default/theirs/handed-over"
    job.save_tree_and_metadata_from_path(place, {"a": np.arange(3)}, {"note": "é"}, step=9, metrics={"loss": 0.5})
    tree, metadata = job.get_tree_and_metadata_from_path(place, {"a": np.zeros(3, dtype=int)})
    assert (tree["a"].tolist(), metadata, job.get_metadata_from_path(place)) == ([0, 1, 2], {"note": "é"}, metadata)
    assert Walk.checkpoints(ExecutionSpec.local(tmp_path, "theirs")) == ["handed-over"]
    assert Walk.checkpoints(job.spec) == []
    manifest = job.root.manifest(place)
    assert manifest is not None
    assert (manifest.step, manifest.metrics) == (9, {"loss": 0.5})


@pytest.mark.parametrize("suffix", ["latest", "latest/1", "../x", "/x", "", ".x", "a/../../b"])
def test_suffix_that_is_a_pointer_or_leads_elsewhere_is_refused(tmp_path: Path, suffix: str) -> None:
    job = walk(tmp_path)
    with pytest.raises(ValueError, match=r"points to a checkpoint|no path"):
        job.save_tree_and_metadata(suffix, job.state, {})
    assert Walk.checkpoints(job.spec) == []


@pytest.mark.parametrize("metadata", [{"when": object()}, {"array": np.zeros(2)}])
def test_metadata_that_is_no_json_is_refused_at_once(tmp_path: Path, metadata: dict[str, Any]) -> None:
    job = walk(tmp_path)
    with pytest.raises(TypeError):
        job.save_tree_and_metadata("a", job.state, metadata)


def test_newest_save_to_a_suffix_wins_for_every_reader_and_the_others_stay(tmp_path: Path) -> None:
    job = walk(tmp_path)
    for number in range(5):
        job.save_tree_and_metadata("final", {"x": np.full(1, float(number))}, {"number": number})
    place = "general/default/walk/final"
    for reader in (job, walk(tmp_path), walk(tmp_path, "other")):
        tree, metadata = reader.get_tree_and_metadata_from_path(place, {"x": np.zeros(1)})
        assert (tree["x"].tolist(), metadata) == ([4.0], {"number": 4})
        assert reader.get_metadata_from_path(place) == {"number": 4}
    assert walk(tmp_path).get_metadata("final") == {"number": 4}
    assert Walk.checkpoints(job.spec) == ["final"]
    assert len(job.root.committed("general/default/walk")) == 5


def test_newest_save_to_a_suffix_wins_in_a_new_process(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np; from walking import walk; from pathlib import Path\n"
        "job = walk(Path(sys.argv[1]))\n"
        "if sys.argv[2] != 'read':\n"
        "    job.save_tree_and_metadata('best', {'x': np.zeros(1)}, {'number': int(sys.argv[2])})\n"
        "    job.register('best')\n"
        "print(job.get_metadata('best')['number'], type(job).latest(job.spec), type(job).best(job.spec))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    said = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), argument],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for argument in ("1", "2", "read")
    ]
    assert said == [["1", "best", "best"], ["2", "best", "best"], ["2", "best", "best"]]


def test_suffix_that_looks_like_a_later_save_is_a_path_of_its_own(tmp_path: Path) -> None:
    job = walk(tmp_path)
    for suffix in ("final", "final-attempt-0", "final", "final-attempt-0"):
        job.save_tree_and_metadata(suffix, job.state, {"suffix": suffix})
    assert job.get_metadata("final") == {"suffix": "final"}
    assert job.get_metadata("final-attempt-0") == {"suffix": "final-attempt-0"}
    assert Walk.checkpoints(job.spec) == ["final", "final-attempt-0"]


def test_path_means_the_save_before_when_the_newest_is_removed(tmp_path: Path) -> None:
    job = walk(tmp_path)
    for number in range(3):
        job.save_tree_and_metadata("final", job.state, {"number": number})
    job._settle()
    job.root.remove(job.root.committed("general/default/walk")[-1])
    assert walk(tmp_path).get_metadata("final") == {"number": 1}


def test_latest_stays_what_was_registered_when_its_path_is_saved_again(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job.save_tree_and_metadata("final", {"x": np.zeros(1)}, {"number": 0})
    job.register("final")
    job.save_tree_and_metadata("final", {"x": np.ones(1)}, {"number": 1})
    assert job.get_metadata("final") == {"number": 1}
    assert walk(tmp_path).get_metadata("latest") == {"number": 0}
    job.register("final")
    assert walk(tmp_path).get_metadata("latest") == {"number": 1}


def test_clock_that_goes_back_does_not_bring_an_older_save_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = walk(tmp_path)
    for number, now in enumerate((2_000_000_000.0, 1_000_000_000.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        job.save_tree_and_metadata("final", job.state, {"number": number})
        job._settle()
    assert walk(tmp_path).get_metadata("final") == {"number": 1}


READERS = {
    "get_metadata_from_path": lambda job: job.get_metadata_from_path("general/default/walk/a") == {"step": 1},
    "get_metadata": lambda job: job.get_metadata("a") == {"step": 1},
    "get_tree_and_metadata": lambda job: job.get_tree_and_metadata("a", job.state)[1] == {"step": 1},
    "latest": lambda job: Walk.latest(job.spec) == "a",
    "best": lambda job: Walk.best(job.spec) == "a",
    "checkpoints": lambda job: Walk.checkpoints(job.spec) == ["a"],
    "from_checkpoint": lambda job: Walk.from_checkpoint("a", job.spec)[0].restored_from == "general/default/walk/a",
    "_get_checkpoint_path": lambda job: (Walk._get_checkpoint_path(job.spec, "a") / "metadata.json").is_file(),
}


@pytest.mark.parametrize("reader", READERS)
def test_reader_right_after_a_save_waits_for_it(tmp_path: Path, reader: str) -> None:
    job = walk(tmp_path)
    held = threading.Event()

    class Slow:
        def require(self) -> None:
            assert held.wait(PATIENCE_S)

    job.hold(Slow())
    job.save_tree_and_metadata("a", job.state, {"step": 1})
    job.register("a", best=True)
    assert not (checkpoint(tmp_path, "a")).exists()
    threading.Timer(0.1, held.set).start()
    assert READERS[reader](job)


def test_save_to_the_suffix_best_is_the_best_checkpoint(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job()
    job.save_tree_and_metadata(Path("best"), job.state, {"step": 6, "score": float("-inf")})
    job._settle()
    assert (Walk.best(job.spec), Walk.latest(job.spec)) == ("best", "steps/6")
    job.register(Path("best"))
    assert Walk.latest(job.spec) == "best"
    found, _ = Walk.from_checkpoint("best", job.spec, resume=True)
    assert found.step == 6
    job.register("steps/4", best=True)
    assert Walk.best(job.spec) == "steps/4"


def test_missing_checkpoint_is_told(tmp_path: Path) -> None:
    job = walk(tmp_path)
    with pytest.raises(FileNotFoundError, match="general/default/walk/nothing"):
        job.get_tree_and_metadata("nothing", job.state)
    with pytest.raises(FileNotFoundError, match="has no latest checkpoint"):
        job.restore("latest")


# -- pointers --


def test_registered_checkpoint_is_the_latest_and_no_other(tmp_path: Path) -> None:
    job = walk(tmp_path)
    for suffix in ("a", "b", "c"):
        job.save_tree_and_metadata(suffix, job.state, {"suffix": suffix})
        if suffix == "b":
            job.register("b", best=True)
    assert job.get_metadata("c") == {"suffix": "c"}
    assert (Walk.latest(job.spec), Walk.best(job.spec)) == ("b", "b")
    job.register("c")
    assert (Walk.latest(job.spec), Walk.best(job.spec)) == ("c", "b")
    assert job.get_metadata("best") == {"suffix": "b"}


def test_register_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint is committed there"):
        walk(tmp_path).register("nothing")


def test_latest_is_none_while_nothing_was_registered(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job.save_tree_and_metadata("a", job.state, {})
    job.get_metadata("a")
    assert Walk.latest(job.spec) is None
    assert Walk.checkpoints(job.spec) == ["a"]


def test_stale_latest_gives_way_to_the_newest_that_is_there(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job()
    job.root.remove("general/default/walk/steps/6")
    assert Walk.latest(job.spec) == "steps/4"


def test_failed_save_leaves_the_pointer_and_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = walk(tmp_path)
    job.save_tree_and_metadata("a", job.state, {})
    job.register("a")
    job.get_metadata("a")

    class Lost:
        def require(self) -> None:
            raise PermissionError("the lock is gone")

    job.hold(Lost())
    job.save_tree_and_metadata("b", job.state, {})
    job.register("b")
    with pytest.raises(PermissionError, match="the lock is gone"):
        job._settle()
    assert (Walk.latest(job.spec), Walk.checkpoints(job.spec)) == ("a", ["a"])


def test_register_of_what_could_not_be_saved_is_refused(tmp_path: Path) -> None:
    job = walk(tmp_path)
    with pytest.raises(TreeError, match="cannot hold"):
        job.save_tree_and_metadata("a", {"x": object()}, {})
    with pytest.raises(FileNotFoundError, match="no checkpoint is committed there"):
        job.register("a")

    class Lost:
        def require(self) -> None:
            raise PermissionError("the lock is gone")

    job.hold(Lost())
    job.save_tree_and_metadata("b", job.state, {})
    with pytest.raises(PermissionError, match="the lock is gone"):
        job.get_metadata("b")
    with pytest.raises(FileNotFoundError, match="no checkpoint is committed there"):
        job.register("b")


def test_server_is_told_of_what_is_registered_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    monkeypatch.setattr(
        report.reporter,
        "committed",
        lambda manifest, where, *, took_s, is_best=False: told.append((manifest.step, Path(where).name, is_best)),
    )
    job = walk(tmp_path)
    for step, suffix in enumerate("abcd"):
        job.save_tree_and_metadata(suffix, job.state, {"step": step})
        if suffix == "b":
            job.register("b")
        if suffix == "c":
            job._settle()  # committed before it is registered
            job.register("c", best=True)
            job.register("b")
    job._settle()
    assert told == [(1, "b", False), (2, "c", True)]
    assert (Walk.latest(job.spec), Walk.best(job.spec)) == ("b", "c")
    job.register("d")
    job.register("d", best=True)  # when it was evaluated
    job.register("d")
    assert told[2:] == [(3, "d", False), (3, "d", True)]


def test_old_checkpoints_go_but_neither_the_latest_nor_the_best(tmp_path: Path) -> None:
    class Frugal(Walk):
        save_total_limit = 2

    job = Frugal.local(tmp_path, "walk")
    for suffix in "abcde":
        job.save_tree_and_metadata(suffix, job.state, {})
        job.register(suffix, best=suffix == "a")
    job._settle()
    # Where the last was committed before it was registered, the one before it was the latest, and kept as such.
    assert Walk.checkpoints(job.spec) in (["a", "d", "e"], ["a", "c", "d", "e"])


# -- from a checkpoint --


def test_resume_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = walk(tmp_path / "whole")
    whole()
    first = walk(tmp_path / "cut")
    first.after_step = lambda: first.step == 3 and os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment]
    with pytest.raises(SystemExit) as stopped:
        first()
    assert stopped.value.code == EXIT_STOPPED
    assert Walk.latest(first.spec) == "steps/3"
    np.random.seed(99)
    second, config = Walk.from_checkpoint("latest", ExecutionSpec.local(tmp_path / "cut", "walk"), resume=True)
    assert (second.step, config) == (3, whole.config)
    second()
    np.testing.assert_array_equal(second.state["position"], whole.state["position"])
    np.testing.assert_array_equal(second.state["velocity"]["m"], whole.state["velocity"]["m"])


def test_signals_act_as_ever_after_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    walk(tmp_path)()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("runtime_cfg", [None, {"steps": 8}])
@pytest.mark.parametrize("resume", [True, False])
def test_only_a_resume_restores_the_identity(tmp_path: Path, resume: bool, runtime_cfg: Any) -> None:
    job = walk(tmp_path, "original")
    job.spec = job.spec.with_identity({"id": "tracked-1"})
    job()
    spec = ExecutionSpec.local(tmp_path, "mine", project="p", group="g")
    restored, config = Walk.from_checkpoint_path("general/default/original/steps/6", spec, runtime_cfg, resume=resume)
    identity = (restored.spec.path, restored.spec.id, restored.restored_from)
    if resume:
        assert identity == ("general/default/original", "tracked-1", None)
    else:
        assert identity == ("p/g/mine", None, "general/default/original/steps/6")
    assert (spec.path, spec.id) == ("p/g/mine", None)
    assert config.steps == (8 if runtime_cfg else 6)
    np.testing.assert_array_equal(restored.state["position"], job.state["position"])


def test_runtime_configuration_wins_over_the_checkpoints_where_it_says_something(tmp_path: Path) -> None:
    job = walk(tmp_path, steps=4, stride=0.5)
    job()
    restored, config = Walk.from_checkpoint("steps/4", job.spec, {"steps": 9}, resume=True)
    assert config == restored.config == WalkConfig(steps=9, stride=0.5)
    _, replaced = Walk.from_checkpoint("steps/4", job.spec, WalkConfig(steps=9), resume=True)
    assert replaced == WalkConfig(steps=9)
    with pytest.raises(ConfigurationError, match="did you mean 'stride'"):
        Walk.from_checkpoint("steps/4", job.spec, {"strid": 1})


def test_class_that_wrote_a_checkpoint_is_found_again(tmp_path: Path) -> None:
    walk(tmp_path)()
    spec = ExecutionSpec.local(tmp_path, "walk")
    assert type(RestoreableJob.from_checkpoint("latest", spec)[0]) is Walk
    other = OtherWalk.local(tmp_path, "other")
    other.save()
    other._settle()
    assert type(Walk.from_checkpoint("latest", other.spec)[0]) is OtherWalk


def test_class_that_is_not_loaded_is_an_error_unless_the_caller_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk(tmp_path)()
    spec = ExecutionSpec.local(tmp_path, "walk")
    monkeypatch.setattr(basic_job, "_CLASSES", {})
    with pytest.raises(UnknownJobClassError, match="'test/walk', which is not loaded"):
        RestoreableJob.from_checkpoint("latest", spec)
    assert type(OtherWalk.from_checkpoint("latest", spec)[0]) is OtherWalk


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    job = walk(tmp_path)
    job()
    flip_a_byte(checkpoint(tmp_path, "steps/6"))
    with pytest.raises(CorruptCheckpointError):
        Walk.from_checkpoint("steps/6", job.spec, resume=True)
    flip_a_byte(checkpoint(tmp_path, "steps/4"), "job.json")
    with pytest.raises(CorruptCheckpointError):
        Walk.from_checkpoint("steps/4", job.spec, resume=True)
    assert Walk.from_checkpoint("steps/2", job.spec, resume=True)[0].step == 2
