"""An attempt whose backend has something to make ready keeps its place, however long that takes, and tells of it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from scripted_backend import ScriptedBackend, ScriptedWorld
from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.coordinator.actions import LAUNCH_TIMEOUT_S, AttemptActions
from trainmaster.server.coordinator.launch import JobSecrets, Launches
from trainmaster.server.core.commands import cancel, submit
from trainmaster.server.core.job import Job
from trainmaster.server.core.observations import admit, observe, place
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.resources import Share
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots
from trainmaster.server.store import accounts
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope


class Inline(Executor):
    """Does everything at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


class SlowBackend(ScriptedBackend):
    """Is not ready for a while."""

    def __init__(self) -> None:
        super().__init__(ScriptedWorld(lambda _: pytest.fail("it looks at nothing")), [])
        self.error: Exception | None = None
        self.refuse: Callable[[], None] = lambda: None
        self.submitted = self.revoked = 0

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        self.submitted += 1
        self.refuse()
        if self.error is not None:
            raise self.error
        return "started"

    def revoke(self, request: AttemptRequest) -> None:
        self.revoked += 1


@dataclass
class World:
    """A job that was placed, and what acts for it."""

    acting: AttemptActions
    backend: SlowBackend
    job: Job
    hints: list[str] = field(default_factory=list)

    def pass_at(self, now: float) -> None:
        """Take in what happened, and act."""
        change = self.acting.take_outcome(self.job, now) if self.job.attempt else None
        if change is not None:
            self.job = change.job
        self.acting.act(ClusterView().with_jobs([self.job]), now)


def placed_job(job_id: str, backend: str, **workload: Any) -> Job:
    workload = {"kind": "command", "argv": ["x"], **workload}
    document = {"name": "j", "workload": workload, "resource_config": {"gpu_count": 0}}
    request = parse_submit(document)
    new = submit(compile_job(request), account_id="a", job_id=job_id, created_by="t", now=0.0, default_backend=backend)
    admitted = admit(new.job, now=0.0)
    assert admitted is not None
    placed = place(admitted.job, now=0.0, shares=[Share(node_id="n")], token="t")
    assert placed is not None
    return placed.job


def running_and_cancelled(job_id: str, backend: str) -> Job:
    job = placed_job(job_id, backend)
    observation = AttemptObservation(
        attempt=1, nodes=[NodeObservation(liveness=Liveness.ALIVE, records=({"type": "claimed"},))]
    )
    claimed = observe(job, observation, now=0.0)
    assert claimed is not None
    cancelled = cancel(claimed.job, now=0.0)
    assert cancelled is not None
    return cancelled.job


def acting_for(
    backends: Mapping[str, ScriptedBackend],
    directory: Path,
    pool: Executor | None,
    hint: Callable[[str], None] = lambda _: None,
) -> AttemptActions:
    roots = Roots({RUNS: directory / "runs", ARTIFACTS: directory / "artifacts", BLOBS: directory / "blobs"})
    settings = Settings(data_dir=directory, shared_uid=True)
    database = Database.open(f"sqlite:///{directory}/tm.db")
    database.write_now(lambda connection: accounts.ensure(connection, Scope.everything(), "a", 0.0))
    launches = Launches(database, roots, JobSecrets(Sealer(bytes(32))), settings)
    return AttemptActions(backends=backends, roots=roots, launches=launches, hint=hint, pool=pool)


@pytest.fixture
def world(tmp_path: Path) -> World:
    hints: list[str] = []
    backend = SlowBackend()
    acting = acting_for({"slow": backend}, tmp_path, Inline(), hints.append)
    return World(acting=acting, backend=backend, job=placed_job("j", "slow"), hints=hints)


def test_a_wait_that_is_longer_than_a_launch_may_take_is_survived_and_told(world: World) -> None:
    ready: Future[None] = Future()
    for second in range(600):
        world.backend.error = NotYetError(f"pulling it: {second // 100} of 6 layers", ready)
        world.pass_at(float(second))
    assert (world.job.status, world.backend.revoked) == (JobStatus.SCHEDULING, 0)
    assert world.job.message == "pulling it: 5 of 6 layers"
    assert world.job.event_count == 3 + 6  # once for each message, after it was submitted, admitted and placed
    # From here on nobody claims it.
    world.hints.clear()
    ready.set_result(None)
    assert len(world.hints) == 1
    world.backend.error, before = None, world.backend.submitted
    world.pass_at(599.1)
    assert world.backend.submitted == before + 1
    world.pass_at(599.1 + LAUNCH_TIMEOUT_S)
    assert world.backend.revoked == 0
    world.pass_at(599.2 + LAUNCH_TIMEOUT_S)
    assert world.backend.revoked == 1


def test_an_attempt_in_an_engines_queue_is_left_alone_until_the_engine_reports_a_change(world: World) -> None:
    change: Future[None] = Future()
    world.backend.error = NotYetError("waits for a node", change, again_in_s=1000.0, handle="7")
    for second in range(5):  # handed over, and all that was said of it is taken in
        world.pass_at(float(second))
    assert world.acting.is_quiet(world.job, 10.0)
    assert world.acting.is_quiet(world.job, 999.0)
    world.pass_at(LAUNCH_TIMEOUT_S + 10.0)
    assert (world.backend.submitted, world.backend.revoked) == (1, 0)
    assert not world.acting.is_quiet(world.job, 1001.0)
    assert not world.acting.is_quiet(world.job, -1.0)  # the clock was set back
    stopped = cancel(world.job, now=11.0)
    assert stopped is not None
    assert not world.acting.is_quiet(stopped.job, 11.0)
    change.set_result(None)
    assert not world.acting.is_quiet(world.job, 12.0)
    world.pass_at(200.0)
    assert world.backend.submitted == 2


def test_a_wait_keeps_nothing_alive_but_what_it_said(world: World) -> None:
    class Large:
        pass

    def refuse() -> None:
        large = Large()
        seen.append(weakref.ref(large))
        raise NotYetError("waits for a node", Future())

    seen: list[weakref.ref[Large]] = []
    world.backend.refuse = refuse
    world.pass_at(1.0)
    gc.collect()
    assert [each() for each in seen] == [None]


def test_a_launch_that_nobody_claims_is_withdrawn_in_time(world: World) -> None:
    for second in range(int(LAUNCH_TIMEOUT_S) + 2):
        assert world.backend.revoked == 0
        world.pass_at(float(second))
    assert world.backend.revoked == 1


@pytest.mark.parametrize("removes", [True, False])
def test_the_working_directory_goes_with_an_attempt_whose_worker_has_not_removed_it(
    world: World, tmp_path: Path, removes: bool
) -> None:
    world.job = placed_job("j", "slow", remove_working_directory=removes)
    world.pass_at(1.0)
    (tmp_path / "runs/j/1/work/left").mkdir(parents=True)
    world.acting.act(ClusterView(), 2.0)  # it has ended
    assert (tmp_path / "runs/j/1/work").exists() is not removes
    assert (tmp_path / "runs/j/1").exists()


def test_a_job_is_tried_later_and_later_until_it_has_begun(world: World) -> None:
    def refused_at(now: float) -> float:
        world.pass_at(now)
        world.pass_at(now)
        assert world.job.status is JobStatus.QUEUED
        wait_s = world.job.not_before - now
        again = place(world.job, now=now, shares=[Share(node_id="n")], token="t")
        assert again is not None
        world.job = again.job
        return wait_s

    world.backend.error = LaunchError("no engine answers")
    assert [refused_at(now) for now in (1.0, 2.0, 3.0)] == [5, 10, 20]
    observation = AttemptObservation(
        attempt=world.job.live.number, nodes=[NodeObservation(liveness=Liveness.ALIVE, records=({"type": "claimed"},))]
    )
    claimed = observe(world.job, observation, now=4.0)
    assert claimed is not None
    waits, world.job = world.job, claimed.job
    world.pass_at(4.0)
    world.job = waits
    assert refused_at(5.0) == 5


def test_a_backend_says_itself_when_to_try_again(world: World) -> None:
    world.backend.error = LaunchError("the registry is down", again_in_s=77.0)
    world.pass_at(1.0)
    world.pass_at(2.0)
    assert (world.job.status, world.job.not_before) == (JobStatus.QUEUED, 79.0)


def test_a_refusal_that_is_looked_at_while_its_claims_are_withdrawn_keeps_its_reason(tmp_path: Path) -> None:
    withdrawn, seen = threading.Event(), threading.Event()

    class Refusing(SlowBackend):
        def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
            withdrawn.set()
            assert seen.wait(PATIENCE_S)
            raise LaunchError("there is no such image", Reason.LAUNCH_REFUSED)

        def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
            return [Liveness.REVOKED]

    acting = acting_for({"slow": Refusing()}, tmp_path, None)
    job = placed_job("j", "slow")
    view = ClusterView().with_jobs([job])
    try:
        acting.act(view, 1.0)
        assert withdrawn.wait(PATIENCE_S)
        for look in range(2):
            observation = acting.observe(job, view)
            assert observation is not None
            assert [node.liveness for node in observation.nodes] == [Liveness.UNKNOWN]
            if look == 0:
                seen.set()
                wait_until_idle(acting)
        refused = acting.take_outcome(job, 2.0)
        assert refused is not None
        assert (refused.job.status, refused.job.reason) == (JobStatus.FAILED, Reason.LAUNCH_REFUSED)
    finally:
        seen.set()
        acting.close()


def test_a_backend_that_hangs_holds_up_neither_stops_nor_other_backends(tmp_path: Path) -> None:
    hangs, free = threading.Event(), threading.Event()
    done: list[str] = []

    class Hanging(SlowBackend):
        def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
            hangs.set()
            free.wait(2 * PATIENCE_S)
            return None

    class Prompt(SlowBackend):
        def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
            done.append("launched")
            return None

        def stop(self, request: AttemptRequest, control: Control) -> None:
            done.append("stopped")

    acting = acting_for({"slow": Hanging(), "local": Prompt()}, tmp_path, None)
    stuck = [placed_job(f"stuck-{number}", "slow") for number in range(6)]
    launched, stopped = placed_job("launched", "local"), running_and_cancelled("stopped", "local")
    try:
        acting.act(ClusterView().with_jobs(stuck), 1.0)
        assert hangs.wait(PATIENCE_S)
        acting.act(ClusterView().with_jobs([*stuck, launched, stopped]), 1.0)
        deadline = time.monotonic() + PATIENCE_S
        while len(done) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sorted(done) == ["launched", "stopped"]
    finally:
        free.set()
        acting.close()


def test_kills_that_hang_hold_up_no_other_backend_and_the_end_of_the_server_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.server.coordinator.threads.CLOSE_S", 0.2)
    free, done, stopped = threading.Event(), threading.Event(), threading.Semaphore(0)

    class Hanging(SlowBackend):
        def stop(self, request: AttemptRequest, control: Control) -> None:
            stopped.release()

        def kill(self, request: AttemptRequest) -> None:
            stopped.release()
            free.wait(2 * PATIENCE_S)

        def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
            stopped.release()
            free.wait(2 * PATIENCE_S)
            return None

    class Prompt(SlowBackend):
        def stop(self, request: AttemptRequest, control: Control) -> None:
            done.set()

    acting = acting_for({"slow": Hanging(), "local": Prompt()}, tmp_path, None)
    stuck = [running_and_cancelled(f"stuck-{number}", "slow") for number in range(4)]
    view = ClusterView().with_jobs(stuck)
    try:
        acting.act(view, 1.0)
        assert all(stopped.acquire(timeout=PATIENCE_S) for _ in stuck)
        wait_until_idle(acting)
        acting.act(view.with_jobs([placed_job("launched", "slow")]), 1000.0)
        assert all(stopped.acquire(timeout=PATIENCE_S) for _ in (*stuck, "launched"))
        acting.act(view.with_jobs([running_and_cancelled("local", "local")]), 1000.0)
        assert done.wait(PATIENCE_S)
        began = time.monotonic()
        acting.close()
        assert time.monotonic() - began < PATIENCE_S
    finally:
        free.set()


def wait_until_idle(acting: AttemptActions) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(memory.busy for memory in acting._memory.values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
