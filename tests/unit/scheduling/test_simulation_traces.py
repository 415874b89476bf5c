"""What is simulated: recorded lines, made-up jobs, and mixes of Kueue's shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_diary import nodes

from trainmaster.server.core.resources import JobQueue, Needs
from trainmaster.server.scheduling.simulation import makespan_bound
from trainmaster.server.scheduling.synthetic import kueue_baseline, kueue_large, kueue_trace, synthetic
from trainmaster.server.scheduling.traces import TraceError, TraceJob, from_line, from_lines, to_line

seconds = st.floats(0, 1e7, allow_nan=False)
names = st.text(min_size=1, max_size=20)
needs = st.builds(
    Needs,
    node_count=st.integers(1, 64),
    gpus_per_node=st.integers(0, 16),
    gpu_type=st.none() | names,
    gpu_memory_min_mb=st.integers(0, 200_000),
    cpu_cores=st.integers(0, 256),
    ram_mb=st.integers(0, 10**6),
    storage_mb=st.integers(0, 10**6),
    capabilities=st.lists(names, max_size=3).map(tuple),
    affinity=st.lists(names, max_size=3).map(tuple),
    anti_affinity=st.lists(names, max_size=3).map(tuple),
)
jobs = st.builds(
    TraceJob,
    name=names,
    arrival_s=seconds,
    duration_s=seconds,
    needs=needs,
    priority=st.integers(0, 10),
    queue=names,
    preemptible=st.booleans(),
    max_retries=st.integers(0, 5),
    max_runtime_s=st.none() | seconds,
    save_s=seconds,
    class_name=st.text(max_size=10),
)


@given(job=jobs)
def test_recorded_job_is_read_as_it_was_written(job: TraceJob) -> None:
    line = to_line(job)
    assert "\n" not in line
    assert from_line(line) == job


def test_line_that_is_wrong_is_named_by_its_number() -> None:
    good = '{"arrival_s": 0, "duration_s": 1}'
    with pytest.raises(TraceError, match=r"^line 3 priority must be from 0 to 10$"):
        from_lines([good, "", '{"arrival_s": 0, "duration_s": 1, "priority": 11}'])


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"arrival_s": -1, "duration_s": 1}',
        '{"arrival_s": 0, "duration_s": true}',
        '{"arrival_s": 0, "duration_s": NaN}',
        '{"arrival_s": 0, "duration_s": 1, "gpus": 1.5}',
        '{"arrival_s": 0, "duration_s": 1, "queue": 7}',
        '{"arrival_s": 0, "duration_s": 1, "max_runtime_s": "1h"}',
        '{"arrival_s": 0, "duration_s": 1, "capabilities": "nvlink"}',
    ],
)
def test_line_that_is_no_job_is_refused(line: str) -> None:
    with pytest.raises(TraceError):
        from_line(line)


def test_synthetic_trace_asks_for_the_load_that_was_wanted() -> None:
    cluster = nodes(16)
    trace = synthetic(jobs=2000, seed=3, nodes=cluster, load=0.5)
    asked = sum(job.gpus * job.duration_s for job in trace.jobs)
    assert asked / (128 * trace.jobs[-1].arrival_s) == pytest.approx(0.5, rel=0.1)
    assert trace.jobs == synthetic(jobs=2000, seed=3, nodes=cluster, load=0.5).jobs


def test_synthetic_jobs_go_to_the_queues_by_weight_and_fit_the_machines() -> None:
    queues = [JobQueue(name="a", weight=3.0), JobQueue(name="b", weight=1.0)]
    trace = synthetic(jobs=1000, seed=1, nodes=nodes(2, gpus=2), queues=queues)
    assert sum(job.queue == "a" for job in trace.jobs) == pytest.approx(750, abs=60)
    assert max(job.gpus for job in trace.jobs) <= 4
    assert all(job.max_runtime_s is None or job.max_runtime_s >= job.duration_s for job in trace.jobs)


def test_baseline_mix_is_the_published_one() -> None:
    trace = kueue_baseline()
    assert (len(trace.jobs), len(trace.queues), len(trace.nodes)) == (15_000, 30, 30)
    assert makespan_bound(trace) == pytest.approx(66.0)
    assert {(queue.weight, queue.quota_gpus) for queue in trace.queues} == {(20.0, 120)}
    assert {(job.class_name, job.priority, job.gpus) for job in trace.jobs} == {
        ("small", 0, 1),
        ("medium", 5, 5),
        ("large", 10, 20),
    }


def test_large_mix_is_the_published_one() -> None:
    trace = kueue_large()
    assert (len(trace.jobs), len(trace.queues)) == (50_000, 1000)
    assert sum(len(node.gpus) for node in trace.nodes) == 20_000


def test_cohorts_do_not_share_nodes_and_large_requests_become_gangs() -> None:
    workload = {"className": "w", "runtimeMs": 1000, "priority": 1, "request": 40}
    queue = {
        "className": "cq",
        "count": 1,
        "nominalQuota": 40,
        "workloadsSets": [{"count": 2, "creationIntervalMs": 500, "workloads": [workload]}],
    }
    trace = kueue_trace({"cohorts": [{"className": "c", "count": 2, "queuesSets": [queue]}]}, name="t")
    assert [(job.arrival_s, job.needs.capabilities) for job in trace.jobs] == [
        (0.0, ("c-0",)),
        (0.0, ("c-1",)),
        (0.5, ("c-0",)),
        (0.5, ("c-1",)),
    ]
    assert {(job.needs.node_count, job.needs.gpus_per_node) for job in trace.jobs} == {(2, 20)}
    assert [node.capabilities for node in trace.nodes] == [("c-0",), ("c-0",), ("c-1",), ("c-1",)]
    assert {queue.quota_gpus for queue in trace.queues} == {None}
