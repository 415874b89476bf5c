"""Which checkpoint a path means, over a directory and over a real S3 server."""

from __future__ import annotations

import pytest
from root_saves import fill, manifest, overwrite, save

from trainmaster.jobs import CorruptCheckpointError
from trainmaster.jobs.checkpoint_reader import find, newest, path_of, paths
from trainmaster.jobs.roots import Root, commit_beside, open_root

HOME = "project/group/name"


def save_again(root: Root, path: str, step: int, *, job_id: str = "job-1", attempt: int = 1) -> str:
    with root.draft(path, job_id=job_id, attempt=attempt) as draft:
        fill(draft)
        made = manifest(step, job_id=job_id, attempt=attempt)
        return commit_beside(root, draft, path, made, check_owner=lambda: None)[0]


def step_at(root: Root, path: str) -> int:
    found = root.manifest(find(root, path))
    assert found is not None
    return found.step


def test_path_means_its_newest_save_for_every_reader(root: Root, root_uri: str) -> None:
    # The second job is a new submission of the same class, and counts its attempts from one again.
    writers = [("job-1", 1), ("job-1", 2), ("job-1", 2), ("job-2", 1), ("job-2", 1)]
    for step, (job_id, attempt) in enumerate(writers):
        save_again(root, f"{HOME}/best", step, job_id=job_id, attempt=attempt)
        assert step_at(root, f"{HOME}/best") == step_at(open_root(root_uri), f"{HOME}/best") == step
    assert len(root.committed()) == 5
    assert paths(root, HOME) == [f"{HOME}/best"]


def test_path_whose_first_save_was_removed_means_the_newest(root: Root) -> None:
    for step in range(3):
        save_again(root, "a", step)
    root.remove("a")
    assert save_again(root, "a", 3) == "a"
    assert (step_at(root, "a"), newest(root, "a")) == (3, "a")
    root.remove("a")
    assert step_at(root, "a") == 2


def test_later_save_is_found_by_its_place_too(root: Root) -> None:
    places = [save_again(root, "a", step) for step in range(2)]
    assert places == ["a", "a-attempt-1"]
    assert step_at(root, "a-attempt-1") == 1
    assert [path_of(root, place) for place in places] == ["a", "a"]
    save_again(root, "a", 2)
    assert path_of(root, "a-attempt-1") == "a-attempt-1"


def test_saves_of_an_older_version_are_told_apart_by_their_age(root: Root) -> None:
    save(root, "a", step=1)
    save(root, "a-attempt-1", step=2)
    assert step_at(root, "a") == 2
    save_again(root, "a", 3)
    assert step_at(root, "a") == 3


def test_neighbours_with_similar_names_are_left_alone(root: Root) -> None:
    for name in ("a", "a-attempt", "a-attempt-x", "ab", "a-attempt-1-b"):
        save(root, name, step=len(name))
    assert [step_at(root, name) for name in ("a", "a-attempt", "ab")] == [1, 9, 2]


def test_unreadable_manifest_is_told_and_no_older_save_is_passed_off_as_the_newest(root: Root) -> None:
    save_again(root, "a", 1)
    place = save_again(root, "a", 2)
    overwrite(root, f"{place}/manifest.json", b"{")
    with pytest.raises(CorruptCheckpointError):
        find(root, "a")
    save_again(root, "b", 1)
    assert step_at(root, "b") == 1


@pytest.mark.parametrize("name", ["nothing", "latest", "best"])
def test_path_that_leads_nowhere_is_told(root: Root, name: str) -> None:
    with pytest.raises(FileNotFoundError, match=name):
        find(root, f"{HOME}/{name}")
