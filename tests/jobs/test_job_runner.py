"""Running a job class under an identity: first start, further starts, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from walking import Walk, flip_a_byte, walk

from trainmaster.jobs import BasicJob, ExecutionSpec, basic_job, report, runner
from trainmaster.jobs.checkpointed_job import Registrar
from trainmaster.jobs.objects import ObjectStoreError
from trainmaster.jobs.roots import open_root
from trainmaster.jobs.runner import RunError, RunRequest
from trainmaster.jobs.spec import Cluster

HOME = "general/default/walk"


class Basic(BasicJob):  # type: ignore[type-arg]
    def run(self) -> None:
        print(f"ran with {self.config}")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    """Run the walk below a root of its own."""

    def start(*overrides: str, **fields: Any) -> None:
        request = {"target": "walking:Walk", "name": "walk", "overrides": overrides, **fields}
        runner.run(RunRequest(**request), Cluster(root=str(tmp_path)))

    return start


def saved(root: Path, suffix: str, name: str, home: str = HOME) -> Any:
    text = (root / "checkpoints" / home / suffix / name).read_text()
    return yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text)


def suffixes(root: Path, name: str = "walk") -> list[str]:
    return Walk.checkpoints(ExecutionSpec.local(root, name))


def test_first_run_shows_the_whole_configuration(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("steps=2", config={"stride": 0.5})
    out = capsys.readouterr().out
    assert out.startswith(f"# {HOME}\n")
    assert yaml.safe_load(out) == {"steps": 2, "stride": 0.5, "save_every": 2}
    assert suffixes(tmp_path) == ["steps/2"]


def test_finished_job_that_is_run_again_ends_at_once(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setattr(Walk, "run", lambda self: pytest.fail("it was complete"))
    run()
    assert suffixes(tmp_path) == ["steps/2", "steps/4", "steps/6"]


def test_broken_off_job_goes_on_from_its_latest_checkpoint(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Walk, "after_step", lambda self: seen.append(self.step) or (seen == [1, 2, 3] and 1 / 0))
    with pytest.raises(ZeroDivisionError):
        run()
    run()
    assert seen == [1, 2, 3, 3, 4, 5, 6]
    assert f"continues from {HOME}/steps/2 (step 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("killed_in", "latest", "saves"),
    [("_register", "steps/2", 4), ("_report", "steps/4", 3)],
    ids=["before the pointer is set", "before the server is told"],
)
def test_run_that_is_killed_after_a_commit_goes_on_from_what_was_registered(
    run: Callable[..., None], tmp_path: Path, killed_in: str, latest: str, saves: int
) -> None:
    whole = walk(tmp_path / "whole")
    whole()

    def first_run() -> None:
        do = getattr(Registrar, killed_in)

        def unless_it_is_the_second(self: Registrar, place: str, *rest: Any, **more: Any) -> None:
            if place.endswith("steps/4"):
                os.kill(os.getpid(), signal.SIGKILL)
            do(self, place, *rest, **more)

        setattr(Registrar, killed_in, unless_it_is_the_second)
        walk(tmp_path / "unused")  # the generators at their start
        run()

    assert ended_by(first_run) == -signal.SIGKILL
    assert suffixes(tmp_path) == ["steps/2", "steps/4"]
    assert Walk.latest(ExecutionSpec.local(tmp_path, "walk")) == latest
    np.random.seed(99)
    run()
    assert suffixes(tmp_path) == ["steps/2", "steps/4", "steps/6"]
    assert len(open_root(tmp_path / "checkpoints").committed(HOME)) == saves
    assert Walk.latest(ExecutionSpec.local(tmp_path, "walk")) == "steps/6"
    again = walk(tmp_path)
    tree, _ = again.get_tree_and_metadata("steps/6", again.state)
    np.testing.assert_array_equal(tree["position"], whole.state["position"])
    np.testing.assert_array_equal(tree["velocity"]["m"], whole.state["velocity"]["m"])


def ended_by(work: Callable[[], None]) -> int:
    """How a child that does something ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the test runner, which hold nothing
        child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_changed_configuration_is_refused_with_what_is_different(run: Callable[..., None], tmp_path: Path) -> None:
    run("steps=2")
    with pytest.raises(RunError) as refused:
        run("steps=4", "stride=3")
    assert "  steps: 2 -> 4\n  stride: 1.0 -> 3.0\n" in str(refused.value)
    assert suffixes(tmp_path) == ["steps/2"]


def test_overlay_changes_what_it_says_and_keeps_the_rest(run: Callable[..., None], tmp_path: Path) -> None:
    run("steps=2", "stride=0.5")
    run("steps=4", overlay=True)
    assert saved(tmp_path, "steps/4", "config.yaml") == {"steps": 4, "stride": 0.5, "save_every": 2}
    with pytest.raises(RunError, match="steps: 4 -> 2"):
        run("steps=2", "stride=0.5")


def test_checkpoint_with_keys_that_are_no_longer_known_is_compared_as_it_is(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("steps=2")
    monkeypatch.setattr(basic_job, "config_type", lambda cls: dict)
    with pytest.raises(RunError, match=r"stride: 1.0 -> \(none\)"):
        run("steps=2")


def test_restore_begins_from_another_run_as_itself(run: Callable[..., None], tmp_path: Path) -> None:
    other = walk(tmp_path, "other")
    other()
    run("steps=2", restore="general/default/other/steps/6")
    identity = saved(tmp_path, "steps/2", "job.json")
    assert (identity["name"], identity["restored_from"]) == ("walk", "general/default/other/steps/6")
    mine = walk(tmp_path)
    tree, _ = mine.get_tree_and_metadata("steps/2", mine.state)
    assert tree["velocity"]["m"][0] > other.state["velocity"]["m"][0]


def test_restore_is_for_the_first_start_alone(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    walk(tmp_path, "other")()
    run("steps=2", restore="general/default/other/steps/6")
    run("steps=4", restore="general/default/other/steps/6", overlay=True)
    assert f"continues from {HOME}/steps/2" in capsys.readouterr().err
    assert saved(tmp_path, "steps/4", "job.json")["restored_from"] == "general/default/other/steps/6"
    with pytest.raises(RunError, match=r"started from general/default/other/steps/6; give another name"):
        run("steps=4", restore="general/default/other/steps/4")


@pytest.mark.parametrize("place", ["general/default/other/nothing", "../x"])
def test_restore_from_what_is_not_there_is_refused(run: Callable[..., None], place: str) -> None:
    with pytest.raises(RunError, match=r"there is no checkpoint|no path"):
        run(restore=place)


def test_restore_from_what_is_damaged_is_refused(run: Callable[..., None], tmp_path: Path) -> None:
    walk(tmp_path, "other", steps=2)()
    flip_a_byte(tmp_path / "checkpoints/general/default/other/steps/2")
    with pytest.raises(RunError, match="general/default/other/steps/2 is damaged"):
        run(restore="general/default/other/steps/2")


def test_node_rank_that_others_set_does_not_matter(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_RANK", "3")
    run("steps=2")
    assert suffixes(tmp_path) == ["steps/2"]


def test_damaged_latest_gives_way_to_the_one_before(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("steps=6")
    home = tmp_path / "checkpoints" / HOME
    flip_a_byte(home / "steps/6")
    flip_a_byte(home / "steps/4", "config.yaml")
    run("steps=6")
    said = capsys.readouterr().err
    assert "steps/6 is damaged, and" in said
    assert suffixes(tmp_path) == ["steps/2", "steps/4", "steps/6"]
    assert len(open_root(tmp_path / "checkpoints").committed(HOME)) == 5
    again = walk(tmp_path)
    assert again.get_tree_and_metadata("latest", again.state)[1] == {"step": 6}
    assert again.get_tree_and_metadata("steps/6", again.state)[1] == {"step": 6}  # the new one, which is whole


def test_job_whose_checkpoints_are_all_damaged_does_not_begin_anew(run: Callable[..., None], tmp_path: Path) -> None:
    run("steps=2")
    for pattern in ("*.safetensors", "job.json"):
        flip_a_byte(tmp_path / "checkpoints" / HOME / "steps/2", pattern)
        with pytest.raises(RunError, match="is damaged, and there is none before it"):
            run("steps=2")


def test_second_run_of_the_same_job_is_refused_while_the_first_one_lasts(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOCK_WAIT_S", 0.0)
    with (
        open_root(tmp_path / "checkpoints").lock(HOME, "somebody"),
        pytest.raises(RunError, match=r"general/default/walk runs already: .*somebody"),
    ):
        run()
    run()


def test_checkpoint_that_the_server_names_is_gone_on_from(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("steps=6")
    monkeypatch.setenv("TRAINMASTER_RESUME_FROM", str(tmp_path / "checkpoints" / HOME / "steps/2"))
    run("steps=6")
    assert f"continues from {HOME}/steps/2 (step 2)" in capsys.readouterr().err


def test_checkpoint_that_was_never_registered_is_not_gone_on_from(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("steps=4")
    job = walk(tmp_path)
    job.save_tree_and_metadata("unregistered", job.state, {"step": 1})
    job._settle()
    monkeypatch.setenv("TRAINMASTER_RESUME_FROM", str(tmp_path / "checkpoints" / HOME / "unregistered"))
    run("steps=4")
    assert f"continues from {HOME}/steps/4" in capsys.readouterr().err


def test_checkpoint_of_another_kind_of_job_is_refused(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMASTER_RESUME_FROM", str(tmp_path / "job-1/checkpoints/checkpoint-2"))
    with pytest.raises(RunError, match="is no checkpoint of a job class"):
        run()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"target": "walking:Wolk"}, "did you mean 'Walk'"),
        ({"target": "nowhere:Walk"}, "there is no module 'nowhere'"),
        ({"target": "tests/unknown"}, "no job class is registered"),
        ({"overrides": ("step=1",)}, "step: unknown key; did you mean 'steps'"),
        ({"overrides": ("steps",)}, "write it as key=value"),
        ({"name": "a/b"}, "name 'a/b'"),
        ({"target": "test_job_runner:Basic", "restore": "a/b/c/d"}, "is no RestoreableJob"),
    ],
)
def test_request_that_cannot_be_run_is_refused(run: Callable[..., None], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RunError) as refused:
        run(**fields)
    assert said in str(refused.value)


def test_basic_job_runs_each_time(run: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        run("a=1", target="test_job_runner:Basic", name="basic")
    assert capsys.readouterr().out.count("ran with {'a': 1}") == 2


@pytest.fixture
def in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the walk as a step of a job does."""
    for name in ("inputs", "checkpoints", "output", "cache"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINMASTER_INPUTS_DIR", str(tmp_path / "inputs"))
    monkeypatch.setenv("TRAINMASTER_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setenv("TRAINMASTER_OUTPUT_DIR", str(tmp_path / "output"))
    monkeypatch.setenv("TRAINMASTER_CACHE_DIR", str(tmp_path / "cache"))

    def start(*overrides: str, **fields: Any) -> None:
        request = {"target": "walking:Walk", "name": "walk", "overrides": overrides, "unknown": 1, **fields}
        (tmp_path / "inputs" / "run.json").write_text(json.dumps(request))
        runner.main()

    return start


def test_inside_a_job_the_request_comes_as_a_file_and_a_refusal_is_told(
    in_a_job: Callable[..., None], tmp_path: Path
) -> None:
    in_a_job("steps=2", hardware={"min_chips": 1})
    assert saved(tmp_path, "steps/2", "job.json")["hardware"]["requested"]["min_chips"] == 1
    with pytest.raises(SystemExit, match=r"BAD_INPUT: .*another configuration"):
        in_a_job("steps=3")


def test_resumed_run_rejoins_the_tracker(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainmaster.jobs import tracker as tracking

    started: list[tuple[str, str | None]] = []

    def start(name: str, project: str, config: Any, run_id: str | None) -> tracking.TrackerRun:
        started.append((name, run_id))
        return tracking.TrackerRun(run_id or "tracked-1", lambda values, step: None, lambda: None)

    monkeypatch.setattr(basic_job, "tracker_for", lambda kind, directory=None, group=None: tracking.Mirror(start))
    run("steps=2", tracker="trackio")
    run("steps=4", tracker="trackio", overlay=True)
    assert started == [("walk", None), ("walk", "tracked-1")]
    assert saved(tmp_path, "steps/4", "job.json")["id"] == "tracked-1"
    other = walk(tmp_path, "other")
    np.testing.assert_equal(other.spec.id, None)
    assert report.job_id() is None


def test_tracker_whose_package_is_missing_fails_the_run_before_it_trains(
    run: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"pip install 'trainmaster\[wandb\]'"):
        run("steps=2", tracker="wandb")
    assert suffixes(tmp_path) == []


def test_job_whose_checkpoints_lie_on_an_object_store_goes_on_from_there(
    s3_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(root=str(tmp_path), checkpoints=f"{s3_root}/checkpoints")

    def run(*overrides: str, **fields: Any) -> None:
        runner.run(RunRequest(target="walking:Walk", name="walk", overrides=overrides, **fields), cluster)

    run("steps=2")
    run("steps=4", overlay=True)
    assert f"continues from {HOME}/steps/2 (step 2)" in capsys.readouterr().err
    spec = ExecutionSpec.on(cluster, name="walk")
    assert (Walk.checkpoints(spec), Walk.latest(spec)) == (["steps/2", "steps/4"], "steps/4")
    assert Walk._get_checkpoint_path(spec, "steps/4") == f"{s3_root}/checkpoints/{HOME}/steps/4"
    again = Walk(spec)
    again.save_tree_and_metadata("steps/4", again.state, {"step": -1})
    assert again.get_metadata("steps/4") == Walk(spec).get_metadata("steps/4") == {"step": -1}
    assert Walk._get_checkpoint_path(spec, "steps/4") == f"{s3_root}/checkpoints/{HOME}/steps/4-attempt-0"
    monkeypatch.setattr(runner, "LOCK_WAIT_S", 0.0)
    with open_root(cluster.checkpoints_uri).lock(HOME, "somebody"), pytest.raises(RunError, match="somebody"):
        run("steps=4")


def test_inside_a_job_a_store_that_refuses_or_does_not_answer_is_told(
    in_a_job: Callable[..., None], s3_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_job("steps=2", checkpoints=s3_root)
    assert open_root(s3_root).committed() == [f"{HOME}/steps/2"]
    with monkeypatch.context() as wrong:
        wrong.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(SystemExit, match=r"CREDENTIALS_REFUSED: .*SignatureDoesNotMatch.*workload.environment"):
            in_a_job("steps=2", checkpoints=s3_root)

    def away(*_: object, **__: object) -> None:
        raise ObjectStoreError("connection refused")

    monkeypatch.setattr("trainmaster.jobs.objects.put_if", away)
    with pytest.raises(SystemExit, match=r"STORAGE_UNAVAILABLE: connection refused"):
        in_a_job("steps=2", checkpoints=s3_root)
