"""A cluster's backend: from what its engine says of an attempt, and the claims of workers, to liveness and losses."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from real_server import wait_for
from scripted_engine import ScriptedEngine
from trainmaster.backends import CLUSTER_KINDS
from trainmaster.backends.base import Change, LaunchError, Loss, NotYetError, claim_free_nodes
from trainmaster.backends.cluster import following, unheard
from trainmaster.backends.cluster.backend import ClusterBackend
from trainmaster.backends.cluster.context import ClusterContext
from trainmaster.backends.cluster.engine import ClusterOptions, EnginePhase, EngineRefusedError
from trainmaster.backends.cluster.worker_start import GIVES_UP_AFTER_S, MESSAGES, SHOWN_SOURCE, SPEC, TOKEN
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control, EngineNeeds, NodeAssignment
from trainmaster.protocol.run_directory import REQUEST, RunDirectory, exit_document
from trainmaster.protocol.secrets import NO_SECRETS
from trainmaster.server.core.reports import Liveness
from trainmaster.server.core.resources import Node
from trainmaster.worker import bootstrap

NAME = "tm-k3f9-job-1-1"
CAPABLE = next(iter(CLUSTER_KINDS.values())).capabilities
CLAIM = {"nonce": "n", "pid": 1, "start_time": 1, "boot_id": "b", "host": "h"}


class Clock:
    now = 1000.0


class Cluster:
    def __init__(self, directory: Path, workers: Path, nodes: int = 1) -> None:
        self.engine = ScriptedEngine()
        self.hints: list[str] = []
        self.request = AttemptRequest(
            job_id="job-1",
            attempt=1,
            token="worker-token",
            rank_token="rank-token",
            launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("true",)),)),
            nodes=(NodeAssignment(node_id="hpc"),) * nodes,
            checkpoint_dir="",
            output_dir="",
            owner_file="",
            server_url="http://server:7070",
            engine_needs=EngineNeeds(account="a", job_name="n"),
        )
        self.directory = RunDirectory(directory / "runs" / "job-1" / "1")
        self.directory.create(self.request, with_ranks=False)
        self.context = ClusterContext(
            name="hpc",
            instance="k3f9",
            run_directory=lambda request: RunDirectory(directory / "runs" / request.job_id / str(request.attempt)),
            runs=directory / "runs",
            workers=workers,
            hint=self.hints.append,
        )
        self.backend = self.server()

    def server(self) -> ClusterBackend:
        """A server that follows the engine's jobs when it is told to."""
        return ClusterBackend(self.engine, ClusterOptions(), CAPABLE, self.context)

    def queued(self) -> NotYetError:
        with pytest.raises(NotYetError) as waits:
            self.backend.submit(self.request, NO_SECRETS)
        return waits.value

    def runs(self, **more: Any) -> None:
        """The engine has started it, and the server has seen that."""
        self.queued()
        self.engine.becomes(NAME, phase=EnginePhase.RUNNING, **more)
        self.backend.follower.poll()

    def liveness(self) -> list[Liveness]:
        return list(self.backend.observe(self.request))


def stop_time(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which the test moves on."""
    now = [1000.0]
    monkeypatch.setattr(following, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    return now


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the worker is packed, once."""
    return tmp_path_factory.mktemp("workers")


@pytest.fixture
def cluster(tmp_path: Path, workers: Path) -> Cluster:
    return Cluster(tmp_path, workers)


def test_an_attempt_waits_in_the_engines_queue_with_its_words_and_starts_once(cluster: Cluster) -> None:
    first = cluster.queued()
    assert first.handle == "1"
    cluster.backend.follower.poll()
    again = cluster.queued()
    assert (str(again), len(cluster.engine.launches)) == ("Priority", 1)
    assert not again.until.done()
    cluster.engine.becomes(NAME, phase=EnginePhase.RUNNING)
    cluster.backend.follower.poll()
    assert again.until.done()
    assert cluster.backend.submit(cluster.request, NO_SECRETS) == "1"
    assert len(cluster.engine.launches) == 1


def test_engine_that_runs_something_else_than_what_is_asked_for_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(cluster.queued()) == "handed to the engine"
    monkeypatch.setattr(ScriptedEngine, "instead", lambda _, launch: f"a job of {launch.instance}", raising=False)
    cluster.engine.present.clear()
    cluster.backend.follower.poll()
    assert str(cluster.queued()) == "handed to the engine as a job of k3f9"


def test_workers_that_run_and_do_not_reach_the_server_say_so_until_they_give_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(following.time, "monotonic", lambda: clock.now)
    cluster.runs()
    assert cluster.backend.submit(cluster.request, NO_SECRETS) == "1"

    for since_s in (unheard.UNHEARD_S, bootstrap.PATIENCE_S):
        clock.now = 1000.0 + since_s
        cluster.backend.follower.poll()
        assert "have not reached this server at http://server:7070 yet" in str(cluster.queued())

    clock.now = 1000.0 + GIVES_UP_AFTER_S
    cluster.backend.follower.poll()
    assert cluster.backend.submit(cluster.request, NO_SECRETS) == "1"


def test_the_token_is_in_the_secrets_of_a_launch_alone(cluster: Cluster) -> None:
    cluster.queued()
    (launch,) = cluster.engine.launches
    assert launch.secrets == {TOKEN: "worker-token"}
    told = repr(launch.environment) + repr(launch.command) + cluster.backend.render(cluster.request)
    assert "worker-token" not in told
    spec = json.loads(launch.environment[SPEC])
    assert (spec["server_url"], spec["attempt_id"]) == ("http://server:7070", "job-1.1")
    assert "worker-token" not in repr(launch).replace(repr(launch.request), "")


def test_a_start_whose_answer_was_lost_is_found_again_by_its_name(cluster: Cluster) -> None:
    cluster.queued()
    cluster.engine.lists = False  # a list may lag behind
    cluster.backend = cluster.server()
    assert cluster.queued().handle == "1"
    assert len(cluster.engine.launches) == 1


def test_an_engine_is_not_asked_for_an_attempt_that_nobody_can_have_handed_over(cluster: Cluster) -> None:
    cluster.backend.follower.poll()
    cluster.backend.follower.poll()  # began after this server leads: it shows all that earlier leaders handed over
    os.utime(cluster.directory.path / REQUEST, (time.time(), time.time()))
    cluster.engine.away()
    cluster.queued()
    cluster.engine.error = None
    cluster.queued()  # it may have been started the first time
    assert cluster.engine.new == [True, False]


def test_an_engine_is_asked_for_an_attempt_that_an_earlier_leader_laid_out(cluster: Cluster) -> None:
    """Its request may still be under way, and reach the engine after the list."""
    cluster.backend.follower.poll()
    cluster.backend.follower.poll()
    cluster.queued()
    assert cluster.engine.new == [False]


def test_a_start_that_the_engine_lost_is_handed_over_again(cluster: Cluster) -> None:
    first = cluster.queued()
    cluster.engine.present.clear()
    cluster.backend.follower.poll()
    assert first.until.done()
    cluster.queued()
    assert len(cluster.engine.launches) == 2


def test_an_engine_that_is_away_leaves_everything_unknown_and_nothing_starts_twice(cluster: Cluster) -> None:
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.liveness()
    cluster.backend.follower.poll()
    assert cluster.liveness() == [Liveness.ALIVE]
    cluster.engine.away()
    with pytest.raises(Exception, match="does not answer"):
        cluster.backend.follower.poll()
    restarted = cluster.server()
    assert restarted.observe(cluster.request) == [Liveness.UNKNOWN]
    with pytest.raises(NotYetError, match="does not answer"):
        restarted.submit(cluster.request, NO_SECRETS)
    assert len(cluster.engine.launches) == 1
    cluster.engine.error = None
    restarted.follower.poll()
    assert restarted.observe(cluster.request) == [Liveness.ALIVE]


def test_a_list_from_before_the_claim_says_nothing_about_the_claimant(cluster: Cluster) -> None:
    cluster.backend.follower.poll()
    cluster.directory.claim(0, CLAIM)
    assert cluster.liveness() == [Liveness.UNKNOWN]


def test_an_old_list_says_nothing_about_the_present(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now = stop_time(monkeypatch)
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.liveness()
    cluster.backend.follower.poll()
    assert cluster.liveness() == [Liveness.ALIVE]
    now[0] += following.STALE_S + 1
    assert cluster.liveness() == [Liveness.UNKNOWN]


def test_a_claimed_attempt_that_has_ended_is_gone_for_the_engines_reason(cluster: Cluster) -> None:
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.liveness()
    lost = Loss(reason=Reason.NODE_LOST, message="node n1 failed")
    cluster.engine.becomes(NAME, phase=EnginePhase.ENDED, loss=lost)
    cluster.backend.follower.poll()
    assert cluster.liveness() == [Liveness.GONE]
    assert cluster.backend.loss(cluster.request, 0) == lost
    assert "job-1.1" in cluster.hints


def test_a_job_that_the_engine_does_not_know_any_more_was_removed_by_somebody(cluster: Cluster) -> None:
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.liveness()
    cluster.engine.present.clear()
    cluster.backend.follower.poll()
    assert cluster.liveness() == [Liveness.GONE]
    told = cluster.backend.loss(cluster.request, 0)
    assert told is not None
    assert told.reason is Reason.ENGINE_CANCELLED


def test_what_ended_while_no_server_ran_is_found_by_its_name(cluster: Cluster) -> None:
    """Slurm lists ended jobs for minutes, and its accounting knows them by their names for long."""
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    lost = Loss(reason=Reason.NODE_LOST, message="n1 failed")
    cluster.engine.becomes(NAME, phase=EnginePhase.ENDED, loss=lost)
    cluster.engine.lists = False
    asked: list[str] = []
    find = cluster.engine.find

    def counted(name: str) -> Any:
        asked.append(name)
        return find(name)

    cluster.engine.find = counted  # type: ignore[method-assign]
    cluster.backend = cluster.server()
    assert cluster.liveness() == [Liveness.UNKNOWN]
    for _ in range(3):
        cluster.backend.follower.poll()
        assert cluster.liveness() == [Liveness.GONE]
        assert cluster.backend.loss(cluster.request, 0) == lost
    assert asked == [NAME]
    cluster.directory.close()
    cluster.backend.follower.poll()
    assert cluster.engine.forgotten == ["1"]
    cluster.backend.follower.poll()
    assert cluster.engine.forgotten == ["1"]


def test_a_node_of_a_running_gang_is_lost_alone(tmp_path: Path, workers: Path) -> None:
    cluster = Cluster(tmp_path, workers, nodes=2)
    lost = Loss(reason=Reason.NODE_LOST, message="it died")
    cluster.queued()
    for node in range(2):
        cluster.directory.claim(node, CLAIM)
    cluster.liveness()
    cluster.engine.becomes(NAME, phase=EnginePhase.RUNNING, node_losses={1: lost})
    cluster.backend.follower.poll()
    assert cluster.liveness() == [Liveness.ALIVE, Liveness.GONE]
    assert (cluster.backend.loss(cluster.request, 0), cluster.backend.loss(cluster.request, 1)) == (None, lost)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (Loss(reason=Reason.NODE_LOST, message="boot failed"), Reason.NODE_LOST),
        (Loss(reason=Reason.LAUNCH_REFUSED, message=MESSAGES[bootstrap.TOO_OLD]), Reason.LAUNCH_REFUSED),
        (Loss(reason=Reason.TIMEOUT, message="its time was up"), Reason.LAUNCH_REFUSED),
        (None, Reason.ENGINE_UNAVAILABLE),
    ],
)
def test_an_attempt_that_ended_before_any_worker_claimed_it_is_refused(
    cluster: Cluster, loss: Loss | None, reason: Reason
) -> None:
    cluster.queued()
    cluster.engine.becomes(NAME, phase=EnginePhase.ENDED, loss=loss, message="it ended")
    cluster.backend.follower.poll()
    with pytest.raises(LaunchError) as refused:
        cluster.backend.submit(cluster.request, NO_SECRETS)
    assert (refused.value.reason, str(refused.value)) == (reason, loss.message if loss else "it ended")
    assert cluster.liveness() == [Liveness.REVOKED]


def test_what_the_engine_refuses_is_withdrawn_and_says_why(cluster: Cluster) -> None:
    cluster.backend.follower.poll()
    cluster.engine.error = EngineRefusedError("Invalid partition name")
    cluster.engine.find = lambda name: None  # type: ignore[method-assign]
    with pytest.raises(LaunchError, match="hpc: Invalid partition name") as refused:
        cluster.backend.submit(cluster.request, NO_SECRETS)
    assert refused.value.reason is Reason.LAUNCH_REFUSED
    assert cluster.liveness() == [Liveness.REVOKED]


def test_revoking_what_waits_cancels_it_even_if_the_engine_is_away_meanwhile(cluster: Cluster) -> None:
    cluster.queued()
    cluster.engine.away()
    cluster.backend.revoke(cluster.request)
    assert cluster.liveness() == [Liveness.REVOKED]
    assert cluster.engine.cancelled == []
    cluster.engine.error = None
    cluster.backend.follower.poll()
    assert cluster.engine.cancelled == ["1"]


def test_what_was_withdrawn_by_a_server_that_died_does_not_stay_in_the_engines_queue(cluster: Cluster) -> None:
    cluster.queued()
    cluster.backend.follower.poll()
    claim_free_nodes(cluster.directory, cluster.request)  # and it dies before it tells the engine
    next_leader = cluster.server()
    assert next_leader.observe(cluster.request) == [Liveness.REVOKED]
    next_leader.follower.poll()
    assert cluster.engine.cancelled == ["1"]


def test_what_another_leader_withdrew_meanwhile_does_not_stay_in_the_engines_queue(cluster: Cluster) -> None:
    leads = [True]
    cluster.context = replace(cluster.context, leads=lambda: leads[0])
    cluster.backend = cluster.server()
    cluster.queued()
    cluster.backend.follower.poll()
    leads[0] = False
    cluster.backend.follower.poll()
    claim_free_nodes(cluster.directory, cluster.request)
    leads[0] = True
    cluster.backend.follower.poll()
    assert cluster.engine.cancelled == ["1"]


def test_a_claimed_attempt_is_not_cancelled_by_a_late_revocation(cluster: Cluster) -> None:
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.backend.revoke(cluster.request)
    assert cluster.engine.cancelled == []
    cluster.backend.kill(cluster.request)
    assert cluster.engine.cancelled == ["1"]


def test_a_stop_reaches_workers_by_their_control_document(cluster: Cluster) -> None:
    cluster.backend.stop(cluster.request, Control(seq=3))
    assert (cluster.directory.document("control.json") or {})["seq"] == 3


def test_document_shows_one_line_in_place_of_the_source_that_starts_a_worker(cluster: Cluster) -> None:
    shown = cluster.backend.render(cluster.request)
    assert NAME in shown
    assert SHOWN_SOURCE in shown
    assert "import urllib" not in shown


def test_an_ended_job_stays_on_the_engine_until_its_end_was_reported(cluster: Cluster) -> None:
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.engine.becomes(NAME, phase=EnginePhase.ENDED)
    cluster.backend.follower.poll()
    assert cluster.engine.forgotten == []
    cluster.directory.put_document(exit_document(0), {"reason": "SUCCEEDED"})
    cluster.backend.follower.poll()
    assert cluster.engine.forgotten == ["1"]


def test_an_ended_job_that_no_leader_asks_for_is_removed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.engine.becomes(NAME, phase=EnginePhase.ENDED)
    server = cluster.server()
    server.follower.poll()
    assert cluster.engine.forgotten == []
    monkeypatch.setattr(following, "UNKNOWN_AFTER_S", -1.0)
    server.follower.poll()
    assert cluster.engine.forgotten == ["1"]


def test_what_still_runs_of_an_attempt_that_is_over_is_cancelled_after_a_while(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a batch script that hangs when its worker has ended: it would hold its nodes for ever."""
    now = stop_time(monkeypatch)
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.directory.put_document(exit_document(0), {"reason": "SUCCEEDED"})
    cluster.backend.observe(cluster.request)  # for the last time
    cluster.backend.follower.poll()
    assert cluster.engine.cancelled == []
    now[0] += following.UNKNOWN_AFTER_S + 1
    cluster.backend.follower.poll()
    assert cluster.engine.cancelled == ["1"]


def test_a_job_whose_worker_has_just_ended_is_not_cancelled_by_a_new_leader(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of its end may arrive before the new leader has looked at it, and while its engine is ending it."""
    now = stop_time(monkeypatch)
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.directory.put_document(exit_document(0), {"reason": "SUCCEEDED"})
    server = cluster.server()  # one that has not observed any attempt yet
    server.follower.poll()
    assert cluster.engine.cancelled == []
    now[0] += following.UNKNOWN_AFTER_S + 1
    server.follower.poll()
    assert cluster.engine.cancelled == ["1"]


def test_what_a_leader_knew_does_not_outlive_its_term(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    now = stop_time(monkeypatch)
    leads = [True]
    cluster.context = replace(cluster.context, leads=lambda: leads[0])
    cluster.backend = cluster.server()
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.liveness()
    leads[0] = False
    cluster.backend.follower.poll()
    cluster.engine.becomes(NAME, phase=EnginePhase.ENDED)
    leads[0] = True
    cluster.backend.follower.poll()
    now[0] += following.UNKNOWN_AFTER_S + 1
    cluster.backend.follower.poll()
    assert cluster.engine.forgotten == ["1"]


def test_list_of_jobs_is_as_old_as_the_question_for_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the question for the nodes before it, which may take long."""
    now = stop_time(monkeypatch)
    nodes = cluster.engine.nodes

    def slow() -> Any:
        now[0] += following.STALE_S + 1
        return nodes()

    monkeypatch.setattr(cluster.engine, "nodes", slow)
    cluster.runs()
    cluster.directory.claim(0, CLAIM)
    cluster.liveness()
    now[0] += following.NODES_EVERY_S + 1
    cluster.backend.follower.poll()
    assert cluster.liveness() == [Liveness.ALIVE]


def test_list_from_before_the_end_of_a_start_has_nothing_started_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that is asked for meanwhile shows half of it, and its change has the attempt looked at again."""
    start = cluster.engine.start

    def slow(launch: Any, *, is_new: bool = False) -> str:
        handle = start(launch, is_new=is_new)
        whole = cluster.engine.present[NAME]
        cluster.engine.becomes(NAME, phase=EnginePhase.PREPARING)
        cluster.backend.follower.poll()
        cluster.engine.present[NAME] = whole
        return handle

    monkeypatch.setattr(cluster.engine, "start", slow)
    for _ in range(2):
        assert str(cluster.queued()) == "handed to the engine"
    assert len(cluster.engine.new) == 1
    cluster.backend.follower.poll()
    assert "Priority" in str(cluster.queued())


def test_half_an_attempt_on_the_engine_is_completed(cluster: Cluster) -> None:
    cluster.queued()
    cluster.engine.becomes(NAME, phase=EnginePhase.PREPARING)
    cluster.backend.follower.poll()
    cluster.queued()
    assert len(cluster.engine.launches) == 2


def test_jobs_of_attempts_that_are_gone_are_cancelled_and_those_of_others_are_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = stop_time(monkeypatch)
    cluster.queued()
    gone = replace(cluster.engine.present[NAME], attempt_id="job-2.1", handle="7")
    cluster.engine.present["tm-k3f9-job-2-1"] = gone
    server = cluster.server()  # one that has not observed any attempt yet
    server.follower.poll()
    # A new leader has not laid out, or mounted, all run directories yet.
    assert cluster.engine.cancelled == []
    now[0] += following.UNKNOWN_AFTER_S + 1
    server.follower.poll()
    assert cluster.engine.cancelled == ["7"]


def test_only_the_leader_tidies_up(cluster: Cluster) -> None:
    cluster.queued()
    gone = replace(cluster.engine.present[NAME], attempt_id="job-2.1", handle="7")
    cluster.engine.present["tm-k3f9-job-2-1"] = gone
    cluster.context = replace(cluster.context, leads=lambda: False)
    cluster.server().follower.poll()
    assert cluster.engine.cancelled == []


def test_services_are_reached_where_the_engine_says_and_not_where_their_worker_does(cluster: Cluster) -> None:
    cluster.runs(addresses={0: "10.0.0.7"})
    assert cluster.backend.endpoint(cluster.request, 0, "evil", 8000) == "10.0.0.7:8000"
    assert cluster.backend.endpoint(cluster.request, 1, "evil", 8000) is None


def test_nodes_are_those_of_the_pool_and_changes_are_news(cluster: Cluster) -> None:
    news: list[Callable[[], None]] = []
    cluster.context = replace(cluster.context, on_nodes=lambda: news.append(print))
    backend = cluster.server()
    assert backend.inventory() == ()
    node = Node(node_id="hpc:n1", backend="hpc", hostname="n1", cpu_cores=4, ram_mb=1, storage_mb=1)
    cluster.engine.known_nodes = [node]
    backend.follower.poll()
    (seen,) = backend.inventory()
    assert (seen.pool, seen.is_in_pool, len(news)) == ("hpc", True, 1)


def await_change(change: Change) -> None:
    told = threading.Event()
    change.add_done_callback(lambda _: told.set())
    assert told.wait(60)
    assert change.done()


def test_a_follower_wakes_those_who_wait_and_survives_an_engine_that_goes_and_comes(cluster: Cluster) -> None:
    cluster.backend = ClusterBackend(cluster.engine, ClusterOptions(poll_s=0.1), CAPABLE, cluster.context)
    cluster.backend.open()
    try:
        waits = cluster.queued()
        cluster.engine.becomes(NAME, phase=EnginePhase.RUNNING)
        await_change(waits.until)
        cluster.engine.away()
        again = cluster.backend.follower.next_change(NAME)
        cluster.engine.error = None
        cluster.engine.becomes(NAME, phase=EnginePhase.ENDED)
        await_change(again)
    finally:
        cluster.backend.close()


def test_a_follower_knows_since_when_the_engine_does_not_answer(cluster: Cluster) -> None:
    cluster.backend = ClusterBackend(cluster.engine, ClusterOptions(poll_s=0.1), CAPABLE, cluster.context)
    follower = cluster.backend.follower
    cluster.engine.away("no route")
    before = time.time()
    cluster.backend.open()
    try:
        first = wait_for(lambda: follower.outage, "the outage")
        assert before <= first.since <= time.time()
        assert first.problem == "no route"
        cluster.engine.away("it hangs")
        follower.look_now()
        later = wait_for(lambda: (now := follower.outage) and now != first and now, "the other problem")
        assert (later.since, later.problem) == (first.since, "it hangs")
        cluster.engine.error = None
        follower.look_now()
        wait_for(lambda: follower.outage is None, "the answer")
    finally:
        cluster.backend.close()
