"""Whatever a job writes into its run directory, it can be read, stored and shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from harness import ACCOUNT, EVERYTHING, Cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory_disk import directory_in_memory
from trainmaster.backends.base import endpoint_on_node
from trainmaster.protocol.reasons import Phase, Reason, StopCause
from trainmaster.protocol.run_directory import (
    endpoint_document,
    events_stream,
    exit_document,
    metrics_stream,
    worker_stream,
)
from trainmaster.schema.jobs import JobResource
from trainmaster.server.coordinator.explain import Waiting
from trainmaster.server.coordinator.launch import attempt_request, compiled_launch
from trainmaster.server.coordinator.observation import observe_attempt
from trainmaster.server.core import observations
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.resources import Node, Share
from trainmaster.server.core.states import ACTIVE
from trainmaster.server.http.envelope import Ok
from trainmaster.server.http.job_json import JobView, job_json
from trainmaster.server.storage import run_directory
from trainmaster.server.store import attempts, checkpoints, jobs, nodes

TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["\0", "\ud800", "x" * 5000, ""]))
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([float("nan"), float("inf"), 1e300, -1e300, 2**63, 10**400, 0, True]),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)


def documents(**likely: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Documents whose fields hold what they should, or anything, or are missing."""
    return st.fixed_dictionaries({}, optional={name: st.one_of(values, ANYTHING) for name, values in likely.items()})


KINDS = ["claimed", "started", "ready", "phase", "checkpoint", "capable", "finished", "note"]
RECORDS = documents(
    type=st.sampled_from([*KINDS, "grace_missed", "stacks", "strays_killed", "rank_exited", "unheard-of"]),
    t=st.floats(0, 2e6),
    checkpoint_id=st.sampled_from(["a", "b"]),
    root=st.just("artifacts"),
    path=st.just("{artifacts}/c"),
    step=st.integers(0, 9),
    epoch=st.floats(0, 9),
    metrics=st.dictionaries(TEXTS, NUMBERS, max_size=3),
    size_bytes=st.integers(0, 9),
    duration_s=st.floats(0, 9),
    phase=st.sampled_from(list(Phase)),
    save=st.booleans(),
    message=TEXTS,
    grace_s=NUMBERS,
    count=st.integers(0, 9),
    stacks=st.dictionaries(TEXTS, TEXTS, max_size=3),
)
METRICS = documents(
    t=st.floats(0, 2e6),
    step=st.integers(0, 9),
    total_steps=st.integers(0, 9),
    epoch=NUMBERS,
    percent=NUMBERS,
    eta_s=NUMBERS,
    values=st.dictionaries(TEXTS, NUMBERS, max_size=3),
)
EXITS = documents(
    reason=st.sampled_from([reason.value for reason in Reason]),
    message=TEXTS,
    exit_code=NUMBERS,
    signal=TEXTS,
    rank=st.integers(0, 3),
    step=TEXTS,
    stop_cause=st.sampled_from([cause.value for cause in StopCause]),
    started_at=NUMBERS,
    ended_at=NUMBERS,
    evidence=documents(last_lines=st.lists(TEXTS, max_size=3), frame=TEXTS, oom_kills=NUMBERS),
)
ENDPOINTS = documents(host=TEXTS, port=NUMBERS)


NODE = Node(
    node_id="n",
    backend="scripted",
    hostname="h",
    cpu_cores=1,
    ram_mb=1,
    storage_mb=1,
    slots=1_000_000,
    last_seen_at=1.0,
)
"""One that all examples together do not fill."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with directory_in_memory() as directory:
        (directory / "c").mkdir()
        cluster = Cluster(directory / "c")
        cluster.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, [NODE]))
        yield cluster
        cluster.database.close()


def placed(cluster: Cluster, kind: str, node_count: int) -> Job:
    job = cluster.submit(
        workload={"kind": kind, "argv": ["x"]}, resource_config={"gpu_count": 0, "node_count": node_count}
    )
    shares = [Share(node_id="n")] * node_count
    return stored(cluster, observations.place(job, now=cluster.now, shares=shares, token=job.job_id))


def stored(cluster: Cluster, change: Change | None) -> Job:
    """A change must be stored, read back as it was, and shown."""
    assert change is not None
    assert cluster.database.write_now(lambda connection: jobs.apply(connection, EVERYTHING, change))
    with cluster.database.read() as connection:
        job = jobs.get(connection, ACCOUNT, change.job.job_id)
        tries = attempts.of_job(connection, ACCOUNT, job.job_id)
        saved = checkpoints.of_job(connection, ACCOUNT, job.job_id)
    assert job == change.job
    view = JobView(
        job=job,
        attempts=tries,
        checkpoints=saved,
        waiting=Waiting(),
        used_at=None,
        has_output=True,
        now=cluster.now + 10,
    )
    Ok[JobResource](data=json.loads(job_json(view)))
    for event in change.events:
        event.message.encode()
        json.dumps(event.data, allow_nan=False)
    return job


ROUNDS = st.lists(
    st.lists(
        st.fixed_dictionaries(
            {
                "worker": st.lists(RECORDS, max_size=2),
                "rank": st.lists(RECORDS, max_size=3),
                "metrics": st.lists(METRICS, max_size=2),
                "exit": st.one_of(st.none(), EXITS, ANYTHING),
                "endpoint": st.one_of(st.none(), ENDPOINTS, ANYTHING),
                "liveness": st.sampled_from([Liveness.ALIVE, Liveness.ALIVE, Liveness.GONE, Liveness.REVOKED]),
            }
        ),
        min_size=2,
        max_size=2,
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(rounds=ROUNDS, kind=st.sampled_from(["command", "service"]), nodes=st.integers(1, 2))
def test_anything_in_a_run_directory_can_be_read_stored_and_shown(
    cluster: Cluster, rounds: list[list[dict[str, Any]]], kind: str, nodes: int
) -> None:
    job = placed(cluster, kind, nodes)
    directory = run_directory(cluster.roots, job.job_id, 1)
    directory.create(
        attempt_request(
            job, compiled_launch(job), nodes={}, roots=cluster.roots, resume=None, hint_socket=None, server_url=None
        )
    )
    artifacts = str(cluster.directory / "artifacts")
    for number, wrote in enumerate(rounds, start=1):
        for node, said in enumerate(wrote[:nodes]):
            streams = {
                worker_stream(node): said["worker"],
                events_stream(node, node): said["rank"],
                metrics_stream(node, node): said["metrics"],
            }
            for stream, records in streams.items():
                text = "".join(json.dumps(record).replace("{artifacts}", artifacts) + "\n" for record in records)
                directory.append(stream, dict(directory.streams()).get(stream, 0), text.encode())
            for name, document in ((exit_document, said["exit"]), (endpoint_document, said["endpoint"])):
                if document is not None:
                    (directory.path / name(node)).write_text(json.dumps(document))
        liveness = [said["liveness"] for said in wrote[:nodes]]
        observation = observe_attempt(
            job,
            directory,
            liveness,
            ranks_per_node=1,
            roots=cluster.roots,
            endpoint=partial(endpoint_on_node, directory.request()),
        )
        change = observations.observe(job, observation, now=cluster.now + number)
        if change is not None:
            job = stored(cluster, change)
        if job.status not in ACTIVE:
            return


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(records=st.lists(RECORDS, max_size=4), ended=st.one_of(st.none(), EXITS), begun=st.booleans())
def test_anything_that_is_observed_can_be_stored_and_shown(
    cluster: Cluster, records: list[dict[str, Any]], ended: dict[str, Any] | None, begun: bool
) -> None:
    job = placed(cluster, "command", 1)
    if begun:
        started = [{"type": "claimed"}, {"type": "started"}]
        seen = AttemptObservation(attempt=1, nodes=[NodeObservation(liveness=Liveness.ALIVE, records=started)])
        job = stored(cluster, observations.observe(job, seen, now=cluster.now))
    node = NodeObservation(liveness=Liveness.ALIVE, records=records, exit=ended)
    change = observations.observe(job, AttemptObservation(attempt=1, nodes=[node]), now=cluster.now + 1)
    if change is not None:
        stored(cluster, change)
