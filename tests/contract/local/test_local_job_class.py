"""Job classes as jobs: known by who they are, so that pausing, killing and submitting again lose nothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from local_servers import LocalServer
from real_server import wait_for
from seaweed_server import SeaweedServer

WALKS = """
import random, time
from dataclasses import dataclass
from trainmaster.jobs import RestoreableJob

@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    steps: int = 30
    pause_s: float = 0.02
    save_every: int = 5
    start: float = 0.0
    hold_at: int = 0  # a walk from the start waits at this step until it is stopped

class Walk(RestoreableJob[WalkConfig]):
    def __init__(self, spec, config=None):
        super().__init__(spec, config)
        random.seed(11)
        self.step, self.position = 0, self.config.start

    @property
    def done(self):
        return self.step >= self.config.steps

    def run(self):
        print("begins at", self.step, flush=True)
        hold_at = self.config.hold_at if self.step == 0 else 0
        while not self.done:
            self.step += 1
            self.position += random.gauss()
            self.log({"position": self.position}, step=self.step, total_steps=self.config.steps)
            time.sleep(self.config.pause_s)
            while self.step == hold_at and not self.stop_requested:
                time.sleep(self.config.pause_s)
            if self.checkpoint_due(self.step, self.config.save_every) or self.done:
                suffix = f"steps/{self.step}"
                self.save_tree_and_metadata(suffix, {"position": self.position}, {"step": self.step})
                self.register(suffix)
            self.exit_if_stopped()
        with self.spec.result("end.txt") as file:
            if file:
                file.write(repr(self.position))
        print("ends at", repr(self.position), flush=True)

    def restore_from_path(self, rel_path):
        tree, metadata = self.get_tree_and_metadata_from_path(rel_path, {"position": 0.0})
        self.position = tree["position"]
        if self.is_own(rel_path):
            self.step = metadata["step"]
"""


HELD = "hold_at=7"
"""Override of a walk that is stopped on its way, after its first checkpoint."""

_groups = itertools.count()


class Walks:
    """Submits the walk to a server."""

    def __init__(self, server: LocalServer) -> None:
        self.server = server
        self.digest = server.upload_files(WALKS.encode())
        self.group = f"group-{next(_groups)}"
        """Of this test alone: what others walked is not its concern, nor what it did before it was run again."""

    def submit(self, name: str, *overrides: str, workload: Any = None, **document: Any) -> str:
        described = {
            "target": "walks:Walk",
            "overrides": list(overrides),
            "group": self.group,
            "files": [{"path": "walks.py", "sha256": self.digest}],
            **(workload or {}),
        }
        return self.server.submit_workload("job_class", described, name=name, **document)

    def end(self, job_id: str) -> str:
        """What the walk said at its end."""
        (found,) = [line for line in self.all_lines(job_id) if line.startswith("ends at")]
        return found

    def begins(self, job_id: str) -> list[int]:
        """The steps at which its attempts began."""
        begun = [line for line in self.all_lines(job_id) if line.startswith("begins at")]
        return [int(line.rpartition(" ")[2]) for line in begun]

    def all_lines(self, job_id: str) -> list[str]:
        """What all its attempts wrote."""
        attempts = self.server.job(job_id)["attempt"]
        return [line for number in range(1, attempts + 1) for line in self.server.lines(job_id, attempt=number)]


@pytest.fixture
def walks(server: LocalServer) -> Walks:
    return Walks(server)


@pytest.fixture(scope="module")
def uninterrupted(shared_server: LocalServer) -> str:
    """How a walk of 30 steps ends when nobody disturbs it."""
    walks = Walks(shared_server)
    job_id = walks.submit("uninterrupted")
    shared_server.until(job_id, "COMPLETED")
    return walks.end(job_id)


def test_job_class_completes_with_its_checkpoints_listed(walks: Walks, server: LocalServer) -> None:
    job_id = walks.submit("plain", "steps=10")
    job = server.until(job_id, "COMPLETED")
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [5, 10]
    assert job["progress"]["step"] == 10
    assert walks.begins(job_id) == [0]


@pytest.mark.long
def test_paused_walk_goes_on_to_the_same_end(walks: Walks, server: LocalServer, uninterrupted: str) -> None:
    job_id = walks.submit("paused", HELD)
    wait_for(lambda: (server.job(job_id)["progress"]["step"] or 0) >= 7, "some steps")
    server.control(job_id, "pause")
    paused = server.until(job_id, "PAUSED")
    saved = paused["checkpoints"][-1]["step"]
    assert saved >= 7
    server.control(job_id, "resume")
    server.until(job_id, "COMPLETED")
    assert walks.begins(job_id) == [0, saved]
    assert walks.end(job_id) == uninterrupted


@pytest.mark.long
def test_killed_walk_is_tried_again_from_its_latest_checkpoint(
    walks: Walks, server: LocalServer, uninterrupted: str
) -> None:
    job_id = walks.submit("killed", HELD, scheduling_config={"max_retries": 1})
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    server.kill_rank(job_id)
    server.until(job_id, "COMPLETED")
    first, second = walks.begins(job_id)
    assert first == 0
    assert second >= 5
    assert second % 5 == 0
    assert walks.end(job_id) == uninterrupted


def test_walk_that_is_submitted_again_finds_its_predecessors_checkpoints(
    walks: Walks, server: LocalServer, uninterrupted: str
) -> None:
    first = walks.submit("again", HELD)
    wait_for(lambda: server.job(first)["checkpoints"], "a checkpoint")
    server.control(first, "cancel")
    server.until(first, "CANCELLED")
    second = walks.submit("again", HELD)
    server.until(second, "COMPLETED")
    (begun,) = walks.begins(second)
    assert begun >= 5
    assert walks.end(second) == uninterrupted
    third = walks.submit("again", HELD)
    assert server.until(third, "COMPLETED")["status"] == "COMPLETED"
    assert walks.begins(third) == []


@pytest.mark.long  # tests/jobs/test_job_runner.py has this, too
def test_another_configuration_is_refused_unless_it_is_overlaid(walks: Walks, server: LocalServer) -> None:
    server.until(walks.submit("changed", "steps=5"), "COMPLETED")
    refused = server.until(walks.submit("changed", "steps=10"), "FAILED")
    assert refused["error_type"] == "BAD_INPUT"
    assert "steps: 5 -> 10" in refused["error_message"]
    overlaid = walks.submit("changed", "steps=10", workload={"overlay": True})
    server.until(overlaid, "COMPLETED")
    assert walks.begins(overlaid) == [5]


@pytest.mark.long  # tests/jobs/test_job_runner.py has this, too
def test_two_jobs_cannot_be_the_same_walk_at_the_same_time(walks: Walks, server: LocalServer) -> None:
    first = walks.submit("twin", "steps=100000")
    wait_for(lambda: server.job(first)["checkpoints"], "a checkpoint")
    second = server.until(walks.submit("twin", "steps=100000"), "FAILED")
    assert f"general/{walks.group}/twin runs already" in second["error_message"]
    assert f"{first}.1" in second["error_message"]
    server.control(first, "cancel")


@pytest.mark.long  # tests/jobs/test_job_runner.py has this, too
def test_restore_begins_from_another_walk_as_itself(walks: Walks, server: LocalServer) -> None:
    server.until(walks.submit("source", "steps=5"), "COMPLETED")
    branch = walks.submit("branch", "steps=5", workload={"restore": f"general/{walks.group}/source/steps/5"})
    server.until(branch, "COMPLETED")
    assert walks.begins(branch) == [0]
    refused = walks.submit("branch 2", workload={"restore": "general/default/nothing/1"})
    failed = server.until(refused, "FAILED")
    assert "there is no checkpoint general/default/nothing/1" in failed["error_message"]


@pytest.mark.long
def test_resume_from_an_older_checkpoint_begins_there(walks: Walks, server: LocalServer) -> None:
    job_id = walks.submit("older", "steps=100000")
    wait_for(lambda: len(server.job(job_id)["checkpoints"]) >= 2, "two checkpoints")
    server.control(job_id, "pause")
    oldest = server.until(job_id, "PAUSED")["checkpoints"][0]
    server.control(job_id, "resume", checkpoint_id=oldest["checkpoint_id"])
    wait_for(lambda: len(walks.begins(job_id)) == 2, "the second attempt")
    assert walks.begins(job_id) == [0, oldest["step"]]


@pytest.mark.long
def test_retried_walk_is_a_child_that_goes_on_from_its_parents_checkpoint(
    walks: Walks, server: LocalServer, uninterrupted: str
) -> None:
    parent = walks.submit("retried", HELD)
    wait_for(lambda: server.job(parent)["checkpoints"], "a checkpoint")
    server.control(parent, "cancel")
    latest = server.until(parent, "CANCELLED")["checkpoints"][-1]
    child = server.control(parent, "retry", modify_resources=True, new_resource_config={"gpu_count": 0, "cpu_cores": 1})
    assert child["checkpoint_id"] == latest["checkpoint_id"]
    server.until(child["job_id"], "COMPLETED")
    assert walks.begins(child["job_id"]) == [latest["step"]]
    assert walks.end(child["job_id"]) == uninterrupted


def test_checkpoints_may_lie_on_an_object_store(
    walks: Walks, server: LocalServer, uninterrupted: str, seaweed: SeaweedServer
) -> None:
    stored = {"checkpoints": seaweed.new_prefix(), "environment": seaweed.environment}
    job_id = walks.submit("stored", HELD, workload=stored)
    wait_for(lambda: server.job(job_id)["checkpoints"], "a checkpoint")
    server.control(job_id, "pause")
    paused = server.until(job_id, "PAUSED")["checkpoints"]
    home = f"{stored['checkpoints']}/general/{walks.group}/stored/steps/"
    assert all(checkpoint["uri"].startswith(home) for checkpoint in paused)
    server.control(job_id, "resume")
    server.until(job_id, "COMPLETED")
    assert walks.begins(job_id) == [0, paused[-1]["step"]]
    assert walks.end(job_id) == uninterrupted
    again = walks.submit("stored", HELD, workload=stored)
    server.until(again, "COMPLETED")
    assert walks.begins(again) == []


@pytest.mark.long  # tests/jobs/test_job_classes_torch.py joins ranks
def test_two_ranks_are_joined_and_save_together(walks: Walks, server: LocalServer) -> None:
    job_id = walks.submit("ranks", "steps=5", workload={"ranks_per_node": 2})
    job = server.until(job_id, "COMPLETED")
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [5]
