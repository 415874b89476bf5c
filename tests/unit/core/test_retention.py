"""What of a job may be removed, and what may not."""

from __future__ import annotations

from typing import Any

import pytest
from job_factory import NOW, new_job, training

from trainmaster.protocol.launch import Lifetime
from trainmaster.server.core.errors import ConflictError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.core.retention import (
    RetentionPolicy,
    checkpoint_limit,
    delete_checkpoint,
    deletion_expired,
    expired_checkpoints,
    owns_files,
    pin,
    prune,
    runs_expired,
)
from trainmaster.server.core.states import JobStatus


def checkpoint(step: int, **fields: Any) -> CheckpointRecord:
    values: dict[str, Any] = {
        "checkpoint_id": f"c{step}",
        "job_id": "job-1",
        "attempt": 1,
        "step": step,
        "created_at": NOW + step,
        "metrics": {"loss": abs(20.0 - step)},
        "root": "artifacts",
        "path": f"job-1/checkpoints/c{step}",
    }
    return CheckpointRecord(**{**values, **fields})


ALL = [checkpoint(10), checkpoint(20), checkpoint(30)]


def saved(**fields: Any) -> Job:
    """A job that runs and has saved three times, best at step 20."""
    values = {
        "latest_checkpoint_id": "c30",
        "best_checkpoint_id": "c20",
        "best_metric": "loss",
        "best_metric_value": 0.0,
        **fields,
    }
    return training(new_job()).evolve(**values)


def ended(**fields: Any) -> Job:
    return saved(status=JobStatus.COMPLETED, attempt=None, finished_at=NOW, **fields)


def without(job: Job, gone: CheckpointRecord, *, users: set[str] = frozenset(), left: Any = None) -> Any:  # type: ignore[assignment]
    others = [c for c in ALL if c != gone] if left is None else left
    return delete_checkpoint(job, gone, others=others, users=users, now=NOW)


def test_pinning_is_an_event_and_pinning_twice_is_nothing() -> None:
    change = pin(saved(), ALL[0], pinned=True, now=NOW)
    assert change is not None
    assert [event.type for event in change.events] == ["checkpoint_pinned"]
    assert pin(saved(), checkpoint(10, pinned=True), pinned=True, now=NOW) is None
    assert pin(saved(), checkpoint(10, pinned=True), pinned=False, now=NOW) is not None


def test_deleting_the_latest_moves_the_pointer_to_the_one_before() -> None:
    change = without(saved(), ALL[2])
    assert change.job.latest_checkpoint_id == "c20"
    assert change.job.best_checkpoint_id == "c20"
    assert change.events[0].type == "checkpoint_deleted"
    assert change.events[0].data["latest_checkpoint_id"] == "c20"


def test_deleting_the_best_moves_the_pointer_to_the_next_best() -> None:
    change = without(saved(), ALL[1])
    assert change.job.best_checkpoint_id == "c10"
    assert change.job.best_metric_value == 10.0
    assert change.job.latest_checkpoint_id == "c30"
    greater = without(saved(best_is_greater=True), ALL[1], left=[ALL[0], checkpoint(50)])
    assert greater.job.best_checkpoint_id == "c50"


def test_deleting_the_last_one_of_a_job_that_ended_leaves_no_pointers() -> None:
    change = without(ended(), ALL[0], left=[])
    assert change.job.best_checkpoint_id == "c20"  # it was another's
    change = without(ended(latest_checkpoint_id="c10", best_checkpoint_id="c10"), ALL[0], left=[])
    assert (change.job.latest_checkpoint_id, change.job.best_checkpoint_id) == (None, None)
    assert change.job.best_metric_value is None


def test_deleting_is_refused_while_somebody_needs_it() -> None:
    with pytest.raises(ConflictError, match="pinned"):
        without(saved(), checkpoint(10, pinned=True))
    with pytest.raises(ConflictError, match="job-2 needs"):
        without(ended(), ALL[0], users={"job-2"})
    with pytest.raises(ConflictError, match="the last one of a job that has not ended"):
        without(saved(), ALL[0], left=[])
    with pytest.raises(ConflictError, match="has not ended"):
        without(saved(status=JobStatus.PAUSED, attempt=None), ALL[0], left=[])


def test_checkpoints_outlive_their_job_for_as_long_as_the_setting_says() -> None:
    keep, later = RetentionPolicy(checkpoints_s=100), NOW + 101

    def expired(job: Job, checkpoints: list[CheckpointRecord] = ALL, in_use: tuple[str, ...] = ()) -> list[str]:
        found = expired_checkpoints(job, checkpoints, in_use=in_use, keep=keep, now=later)
        return [each.checkpoint_id for each in found]

    assert expired(ended()) == ["c10"]  # neither the best nor the latest
    assert expired(ended(), [checkpoint(10, pinned=True), *ALL[1:]]) == []
    assert expired(ended(), in_use=("c10",)) == []
    assert expired(saved()) == []
    assert expired(ended(deleted_at=NOW)) == ["c10", "c20", "c30"]
    assert expired(ended(deleted_at=NOW), in_use=("c20",)) == ["c10", "c30"]
    assert expired_checkpoints(ended(), ALL, in_use=(), keep=keep, now=NOW + 99) == []
    assert expired_checkpoints(ended(), ALL, in_use=(), keep=RetentionPolicy(), now=NOW + 1e9) == []


def test_zero_keeps_for_ever() -> None:
    assert not runs_expired(ended(), RetentionPolicy(), now=NOW + 1e9)
    assert runs_expired(ended(), RetentionPolicy(runs_s=10), now=NOW + 11)
    assert not runs_expired(saved(), RetentionPolicy(runs_s=10), now=NOW + 1e9)
    assert not deletion_expired(ended(deleted_at=NOW), RetentionPolicy(), now=NOW + 1e9)
    assert deletion_expired(ended(deleted_at=NOW), RetentionPolicy(deleted_s=10), now=NOW + 11)
    assert not deletion_expired(ended(), RetentionPolicy(deleted_s=10), now=NOW + 1e9)


@pytest.mark.parametrize(
    ("path", "others", "owns"),
    [
        ("job-1/checkpoints/a", [], True),
        ("job-1/checkpoints/a", ["job-1/checkpoints/b"], True),
        ("job-2/checkpoints/a", [], False),
        ("job-1", [], False),
        ("job-1/checkpoints", ["job-1/checkpoints/b"], False),
        ("job-1/checkpoints/a/inner", ["job-1/checkpoints/a"], False),
        ("job-1/checkpoints/a", ["job-1/checkpoints/a"], False),
    ],
)
def test_files_go_with_a_checkpoint_only_when_they_are_its_own(path: str, others: list[str], owns: bool) -> None:
    theirs = [checkpoint(n, path=other) for n, other in enumerate(others)]
    assert owns_files(checkpoint(9, path=path), theirs, root="artifacts") is owns
    assert not owns_files(checkpoint(9, path=path, root="runs"), theirs, root="artifacts")


def limited(limit: int, **fields: Any) -> Job:
    spec = {"output_config": {"checkpoint": {"save_total_limit": limit}}}
    return saved(spec=spec, spec_version=3, **fields)


def test_services_and_jobs_whose_limit_had_no_effect_keep_all_checkpoints() -> None:
    assert checkpoint_limit(limited(1)) == 1
    assert checkpoint_limit(limited(1).evolve(spec_version=2)) is None
    assert checkpoint_limit(limited(1).evolve(lifetime=Lifetime.SERVICE)) is None
    assert checkpoint_limit(saved(spec={}, spec_version=3)) is None


def test_pruning_says_why() -> None:
    change = prune(limited(1), ALL[:1], now=NOW)
    assert change is not None
    [event] = change.events
    assert (event.type, event.message) == (
        "checkpoint_deleted",
        "checkpoint c10 at step 10 was deleted: save_total_limit is 1",
    )
    assert (change.job.latest_checkpoint_id, change.job.best_checkpoint_id) == ("c30", "c20")


def test_files_of_a_class_lie_below_its_account_and_those_elsewhere_stay() -> None:
    home = "classes/default"
    own = checkpoint(10, path=f"{home}/general/default/n/10")
    assert owns_files(own, [], root="artifacts", homes=[home])
    assert not owns_files(own, [], root="artifacts", homes=["classes/other"])
    assert not owns_files(own, [checkpoint(11, path=own.path)], root="artifacts", homes=[home])
    assert not owns_files(checkpoint(10, path="s3://bucket/key", root="uri"), [], root="artifacts")
