"""What a client shows of jobs that run and that ended, and what it does to them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from blackbox_world import PATIENCE_S, RUNTIME, World, outcome_of

SOON_S = 60.0
"""Long enough for a line that is passed on when it is written."""


# -- while the first job runs, behind its gate --


def status_while_running(world: World) -> str:
    name = world.begin()
    world.wait_for(lambda: world.client.get_job(name).status != "Created", "the job that has begun to be seen")
    return str(world.client.get_job(name).status)


def directory_of_the_caller(world: World) -> str:
    world.begin()
    found = "kept" if os.getcwd() == str(world.home) else "changed"
    os.chdir(world.home)
    return found


def timeout_while_running(world: World) -> str:
    name = world.begin()
    return outcome_of(lambda: world.client.wait_for_job_status(name, timeout=0.4, polling_interval=0.2))


def callbacks_of_a_wait(world: World) -> str:
    """Each poll calls every callback with the job, also the poll that ends the wait."""
    name = world.begin()
    seen: list[Any] = []
    outcome_of(
        lambda: world.client.wait_for_job_status(name, timeout=2, polling_interval=0.25, callbacks=[seen.append])
    )
    polls = len(seen)
    world.client.wait_for_job_status(name, status={"Running"}, timeout=2, polling_interval=1, callbacks=[seen.append])
    statuses = {job.status for job in seen}
    return f"{'each poll' if polls >= 2 and len(seen) == polls + 1 else polls}, {', '.join(sorted(statuses))}"


def logs_while_running(world: World) -> str:
    return "there" if "begun" in world.lines(world.begin()) else "not there"


def follow(world: World) -> str:
    """Whether a line is passed on when it is written, and whether the last one ends the iterator."""
    name = world.begin()
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in world.client.get_job_logs(name, follow=True):
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    found: list[str] = []
    while "begun" not in found:
        try:
            found += str(lines.get(timeout=SOON_S)).splitlines()
        except queue.Empty:
            break
    when = "as it is written" if "begun" in found else "when the job has ended"
    world.finish()
    while (line := lines.get(timeout=PATIENCE_S)) is not None:
        found += line.splitlines()
    return f"{when}, {'to the end' if 'done' in found else 'without the end'}"


# -- when it has ended --


def status_when_complete(world: World) -> str:
    return str(world.client.get_job(world.finish()).status)


def status_when_failed(world: World) -> str:
    return str(world.client.get_job(world.ended("fail", "Failed")).status)


def failed_while_waiting(world: World) -> str:
    name = world.ended("fail", "Failed")
    return outcome_of(lambda: world.client.wait_for_job_status(name, timeout=1, polling_interval=0.5))


def waiting_for_a_failure(world: World) -> str:
    name = world.ended("fail", "Failed")
    return outcome_of(
        lambda: world.client.wait_for_job_status(name, status={"Complete", "Failed"}, timeout=1, polling_interval=0.5),
        lambda job: str(job.status),
    )


def steps(world: World) -> str:
    job = world.client.get_job(world.finish())
    return ", ".join(f"{step.name} {step.status}" for step in job.steps)


def job_shape(world: World) -> str:
    job = world.client.get_job(world.finish())
    return f"{job.runtime.name}, {job.num_nodes} node, created at a {type(job.creation_timestamp).__name__}"


def _told(world: World, what: str) -> str:
    lines = world.lines(world.finish())
    return next((line.removeprefix(f"{what}: ") for line in lines if line.startswith(f"{what}: ")), "not told")


def number_of_nodes(world: World) -> str:
    return str(world.client.get_job(world.ended("fail", "Failed")).num_nodes)


def function_arguments(world: World) -> str:
    return _told(world, "arguments")


def function_of_one_dict(world: World) -> str:
    lines = world.lines(world.ended("fail", "Failed"))
    return "called with the dict" if "number: 3" in lines else "not called"


def installed_package(world: World) -> str:
    return _told(world, "package")


def environment_given(world: World) -> str:
    return _told(world, "given")


def environment_merged(world: World) -> str:
    return {"True": "merged", "False": "replaced"}.get(_told(world, "home"), "not told")


def log_lines(world: World) -> str:
    lines = list(world.client.get_job_logs(world.finish()))
    broken = [line for line in lines if "\n" in line.rstrip("\n") or not isinstance(line, str)]
    return "a line each" if not broken and any(line.rstrip("\n") == "done" for line in lines) else "chunks"


def log_after_the_last_line(world: World) -> str:
    return "nothing" if world.lines(world.finish())[-1] == "done" else "a line of the client's own"


def logs_of_an_unknown_step(world: World) -> str:
    name = world.finish()
    return outcome_of(lambda: list(world.client.get_job_logs(name, step="no-such-step")), lambda lines: str(lines))


def logs_of_another_node(world: World) -> str:
    lines = world.lines(world.ended("fail", "Failed"), step="node-1")
    if "rank: 0" in lines:
        return "those of the first"
    return "its own" if lines else "none"


def events(world: World) -> str:
    name = world.finish()
    return outcome_of(lambda: world.client.get_job_events(name), lambda found: "some" if found else "none")


def listed_status(world: World) -> str:
    name = world.finish()
    return ", ".join(str(job.status) for job in world.client.list_jobs() if job.name == name)


def listed_by_runtime(world: World) -> str:
    name = world.finish()
    runtime = world.client.get_runtime(RUNTIME)
    there = name in [job.name for job in world.client.list_jobs(runtime=runtime)]
    runtime.name = "no-such-name"
    others = [job.name for job in world.client.list_jobs(runtime=runtime)]
    return f"{'its jobs' if there else 'not its jobs'}, {'no others' if name not in others else 'and others'}"


def seen_by_another_client(world: World) -> str:
    name = world.finish()
    other = world.place.make_client()
    return "listed" if name in [job.name for job in other.list_jobs()] else "not listed"


def files_of_a_failed_job(world: World) -> str:
    name = world.ended("fail", "Failed")
    left = [path for path in (world.directory / "temporary").iterdir() if path.name.startswith(name)]
    return "stay in the temporary directory" if left else "none in the temporary directory"


# -- deletion --


def deleted_while_silent(world: World) -> str:
    """Whether the processes of a job that says nothing end with it, those that it started too."""
    world.wait_for((world.directory / "hide" / "begun").exists, "the hiding job to begin")
    assert len(world.hidden_processes()) >= 2
    world.client.delete_job(world.names["hide"])
    deadline = time.monotonic() + SOON_S
    while (left := world.hidden_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return "its processes run on" if left else "its processes are gone"


def deleted_twice(world: World) -> str:
    name = world.finish()
    world.client.delete_job(name)
    return outcome_of(lambda: world.client.delete_job(name))


def deleted_and_asked_for(world: World) -> str:
    name = world.names["tell"]
    listed = name in [job.name for job in world.client.list_jobs()]
    return f"{'listed' if listed else 'not listed'}, {outcome_of(lambda: world.client.get_job(name))}"


CASES: tuple[Callable[[World], str], ...] = (
    status_while_running,
    directory_of_the_caller,
    timeout_while_running,
    callbacks_of_a_wait,
    logs_while_running,
    follow,
    status_when_complete,
    status_when_failed,
    failed_while_waiting,
    waiting_for_a_failure,
    steps,
    job_shape,
    number_of_nodes,
    function_arguments,
    function_of_one_dict,
    installed_package,
    environment_given,
    environment_merged,
    log_lines,
    log_after_the_last_line,
    logs_of_an_unknown_step,
    logs_of_another_node,
    events,
    listed_status,
    listed_by_runtime,
    seen_by_another_client,
    files_of_a_failed_job,
    deleted_while_silent,
    deleted_twice,
    deleted_and_asked_for,
)
