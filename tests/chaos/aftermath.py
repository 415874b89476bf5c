"""What must hold when everything is over, whatever was killed meanwhile."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ground import Entry, Ground, MortalServer, reading

from real_server import wait_for
from trainmaster.server.core.states import TRANSITIONS
from trainmaster.server.store.attempts import all_allocations
from trainmaster.server.store.scope import Scope
from trainmaster.worker.cgroups import own_group


def check(ground: Ground, server: MortalServer, expected: Mapping[str, str], *, database: str = "") -> None:
    """Check every promise for these jobs, which are all there are and have ended so; then stop the servers.

    `database` is its URL when it does not lie in the server's own directory.
    """
    assert {job["job_id"]: job["status"] for job in server.all_jobs()} == dict(expected), "jobs were lost or doubled"
    ledger: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in ground.ledger():
        ledger[entry.job_id].append(entry)
    assert set(ledger) <= set(expected), "something ran that nobody submitted"
    for job_id, status in expected.items():
        job, events, entries = server.job(job_id), server.events(job_id), ledger[job_id]
        try:
            check_events(events, status)
            check_runs(entries, job)
            check_logs(entries, server.log_lines(job_id))
            check_metrics(entries, server.reports(job_id))
        except AssertionError as error:
            raise AssertionError(f"{job_id}: {error}\n{json.dumps(events, indent=1)}") from error
    check_processes(ground, expected)
    check_resources(server, database or f"sqlite:///{server.directory / 'trainmaster.db'}")
    ground.leave()


def check_events(events: Sequence[Mapping[str, Any]], status: str) -> None:
    """Every event is there once, and the edges that they tell of are legal."""
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1)), "events are missing or doubled"
    current = None
    for event in events:
        if event["type"] == "status":
            assert event["from"] == current
            assert event["to"] in {edge.to for (source, _), edge in TRANSITIONS.items() if source == current}
            current = event["to"]
    assert current == status
    noted = [event["data"]["checkpoint_id"] for event in events if event["type"] == "checkpoint"]
    assert len(noted) == len(set(noted)), "a checkpoint was taken in twice"


def check_runs(entries: Sequence[Entry], job: Mapping[str, Any]) -> None:
    """No rank of an attempt was started twice, and no attempt ran beside another one."""
    starts = [(entry.attempt, entry.rank) for entry in entries if entry.what == "start"]
    assert len(starts) == len(set(starts)), "an attempt was started twice"
    numbers = [entry.attempt for entry in entries]
    assert numbers == sorted(numbers), "two attempts ran at the same time"
    attempts = {attempt["number"]: attempt for attempt in job["attempts"]}
    assert list(attempts) == list(range(1, len(attempts) + 1))
    assert set(numbers) <= set(attempts), "something ran that no attempt tells of"
    assert all(attempt["ended_at"] for attempt in attempts.values()), "an attempt never ended"
    if job["status"] == "COMPLETED":
        last = [entry for entry in entries if entry.attempt == len(attempts)]
        ranks = sorted(entry.rank for entry in last if entry.what == "end")
        assert ranks == list(range(job["resource_config"]["node_count"])), "it completed without having run to its end"


def check_logs(entries: Iterable[Entry], lines: Iterable[Mapping[str, Any]]) -> None:
    """Every line that was written before its entry is in the log, once and in order."""
    written: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for line in lines:
        if line["message"].startswith("line "):
            written[line["attempt"], line["rank"]].append(int(line["message"].removeprefix("line ")))
    _check_numbers(entries, written, "lines")


def check_metrics(entries: Iterable[Entry], reports: Iterable[Mapping[str, Any]]) -> None:
    """Every report of rank 0 that was written before its entry is there, once and in order."""
    written: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for report in reports:
        written[report["attempt"], 0].append(report["step"])
    _check_numbers([entry for entry in entries if entry.rank == 0], written, "metrics")


def check_processes(ground: Ground, job_ids: Iterable[str]) -> None:
    """Nothing runs but servers, and no cgroup is left."""
    wait_for(
        lambda: ground.processes() <= ground.expected_processes(),
        "the last process of the jobs to be gone",
    )
    group = own_group()
    if group is not None:
        wait_for(
            lambda: not [left for job_id in job_ids for left in group.glob(f"trainmaster-{job_id}.*")],
            "the last cgroup to be gone",
        )


def check_resources(server: MortalServer, database: str) -> None:
    """Nobody holds anything."""
    for node in server.data("GET", "/v1/nodes")["nodes"]:
        assert node["jobs"] == []
        assert all(gpu["free"] for gpu in node["gpus"])
        assert all(node[name]["free"] == node[name]["total"] for name in ("cpu_cores", "ram_mb", "storage_mb", "slots"))
    with reading(database) as connection:
        assert all_allocations(connection, Scope.everything()) == []


def _check_numbers(entries: Iterable[Entry], written: Mapping[tuple[int, int], Sequence[int]], what: str) -> None:
    counted: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    first: dict[tuple[int, int], int] = {}
    for entry in entries:
        if entry.what == "start":
            first[entry.attempt, entry.rank] = entry.number + 1
        elif entry.what == "count":
            counted[entry.attempt, entry.rank].append(entry.number)
    for run, begin in first.items():
        numbers = list(written.get(run, ()))
        assert numbers == list(range(begin, begin + len(numbers))), f"{what} of {run} are missing or doubled: {numbers}"
        assert numbers[: len(counted[run])] == counted[run], f"{what} of {run} were lost: {numbers}"
