"""The leader's view in memory is what a new leader would rebuild from the database."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import ACCOUNT, EVERYTHING, Cluster
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from sqlalchemy import Connection

from scripted_backend import Act
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.server.core.errors import ConflictError, NotFoundError
from trainmaster.server.core.resources import JobQueue
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.store import jobs, nodes, queues

ENDS = [Reason.SUCCEEDED, Reason.EXITED_NONZERO, Reason.WORKER_LOST, Reason.OUT_OF_MEMORY]


def lives(request: AttemptRequest, node: int) -> Iterator[Act]:
    """Differs from job to job and from attempt to attempt, and is the same whenever it is asked for."""
    seed = sum(request.job_id.encode()) + request.attempt
    yield {"type": "started", "ranks": []}
    yield {"rank": {"type": "capable", "save": True}}
    if seed % 2:
        path = f"{request.checkpoint_dir}/c{seed}"
        yield {
            "rank": {"type": "checkpoint", "checkpoint_id": f"{request.attempt_id}.{node}", "step": seed, "path": path}
        }
    if seed % 5 == 0:
        yield {"vanish": True}
    yield from itertools.repeat({}, seed % 4)
    yield {"exit": {"reason": ENDS[seed % len(ENDS)], "message": "m", "evidence": {"last_lines": ["x"]}}}


class Views(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.cluster = Cluster(Path(self.directory.name) / "c", lives)
        self.submitted: list[str] = []

    def teardown(self) -> None:
        self.cluster.database.close()
        self.directory.cleanup()

    @rule(node_count=st.integers(1, 2), max_retries=st.integers(0, 2), priority=st.integers(0, 10), given=st.booleans())
    def submit(self, node_count: int, max_retries: int, priority: int, given: bool) -> None:
        job = self.cluster.submit(
            resource_config={"gpu_count": node_count, "node_count": node_count},
            scheduling_config={"max_retries": max_retries, "priority": priority, "preemptible": given},
        )
        self.submitted.append(job.job_id)

    @rule(ticks=st.integers(1, 5))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.cluster.tick()

    @rule(
        name=st.sampled_from(["cancel", "pause", "resume", "delete", "edit"]),
        number=st.integers(0, 5),
        now=st.booleans(),
    )
    def command(self, name: str, number: int, now: bool) -> None:
        if not self.submitted:
            return
        job_id = self.submitted[number % len(self.submitted)]
        arguments = {"priority": number} if name == "edit" else {}
        with contextlib.suppress(ConflictError, NotFoundError):
            getattr(self.cluster.commands, name)(ACCOUNT, job_id, **arguments).result()
        if now:
            self.cluster.tick()

    @rule(action=st.sampled_from(["drain", "force", "enable", "label", "quota"]), number=st.integers(0, 2))
    def operate(self, action: str, number: int) -> None:
        def work(connection: Connection) -> None:
            match action:
                case "drain" | "force":
                    nodes.drain(connection, EVERYTHING, "n", self.cluster.now, force=action == "force")
                case "enable":
                    nodes.enable(connection, EVERYTHING, "n", self.cluster.now)
                case "label":
                    nodes.give(connection, EVERYTHING, "n", self.cluster.now, labels=[f"zone={number}"])
                case _:
                    queues.put(connection, EVERYTHING, JobQueue(name="default", quota_gpus=number), self.cluster.now)

        self.cluster.database.write_now(work)

    @invariant()
    def view_is_what_the_database_says(self) -> None:
        self.cluster.coordinator.run_pass()
        with self.cluster.database.read() as connection:
            rebuilt = (
                ClusterView()
                .with_nodes(nodes.all(connection, EVERYTHING))
                .with_queues(queues.all(connection, EVERYTHING))
                .with_jobs(jobs.unfinished(connection, EVERYTHING))
            )
        assert self.cluster.coordinator.view == rebuilt

    @invariant()
    def nothing_is_held_by_a_job_that_holds_nothing(self) -> None:
        held = sum(len(job.live.shares) for job in self.cluster.all_jobs() if job.attempt is not None)
        assert self.cluster.allocated() == held


Views.TestCase.settings = settings(max_examples=12, stateful_step_count=20)
TestViews = Views.TestCase
