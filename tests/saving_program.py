"""A program that counts steps, saves, and goes on where it was. No file is shared with it: all is said by the API."""

from __future__ import annotations

from typing import Any

from job_server import JobServer
from real_server import wait_for

TRAINS = """
import argparse, json, os, signal, sys, time
from trainmaster.jobs import report, verify

options = argparse.ArgumentParser()
options.add_argument("--steps", type=int, default=100_000)
options.add_argument("--save-every", type=int, default=0)
options.add_argument("--fail-at", type=int)
options.add_argument("--die-at", type=int)
options.add_argument("--ignore-stops", action="store_true")
given = options.parse_args()

step = 0
if path := report.resume_path():
    step = verify(path).step
    assert json.loads((path / "state.json").read_text()) == {"step": step}
print("begins at", step, flush=True)

def save():
    with report.checkpoint(step=step, metrics={"loss": 1 / step}) as directory:
        (directory / "state.json").write_text(json.dumps({"step": step}))

while step < given.steps:
    step += 1
    report.progress(step, total_steps=given.steps)
    if step == given.fail_at:
        sys.exit("cannot go on")
    if step == given.die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    stop = report.stop_requested()
    if stop and not given.ignore_stops:
        if stop.save:
            save()
        print("stopped at", step, flush=True)
        report.exit_stopped()
    if given.save_every and step % given.save_every == 0:
        save()
    time.sleep(0.005)
report.finished()
print("done", flush=True)
"""


def wait_until_it_can_save(server: JobServer, job_id: str) -> None:
    """Wait until the job has said that it saves when it is asked to stop."""
    wait_for(lambda: server.job(job_id)["can_save"], f"{job_id} to say that it saves")


def latest_checkpoint(job: Any) -> Any:
    """The checkpoint from which the job would go on."""
    (latest,) = [checkpoint for checkpoint in job["checkpoints"] if checkpoint["is_latest"]]
    assert latest["checkpoint_id"] == job["latest_checkpoint_id"]
    return latest


def number_after(server: JobServer, job_id: str, text: str, **query: Any) -> int:
    """The number in the line that begins with a text, once it is there."""
    return int(server.wait_for_line(job_id, text, **query).removeprefix(text))
