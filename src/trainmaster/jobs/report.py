"""The reporter of this process, as plain functions: `from trainmaster.jobs import report`.

    start = verify(path).step if (path := report.resume_path()) else 0
    for step in range(start + 1, total + 1):
        loss = train_one_step()
        report.metrics(step=step, loss=loss)
        stop = report.stop_requested()
        if report.save_requested() or (stop and stop.save) or step % 100 == 0:
            with report.checkpoint(step=step, metrics={"loss": loss}) as directory:
                save(directory)
        if stop:
            report.exit_stopped()
    report.finished()

Outside a job the same code runs: reports go nowhere and checkpoints lie in `./checkpoints`.
"""

from __future__ import annotations

import os

from trainmaster.jobs.reporter import Reporter

reporter = Reporter(os.environ)
"""What the functions below belong to, for code that takes a `Reporter`."""
reporter.offer_stacks()
os.register_at_fork(after_in_child=reporter.renew_lock)

checkpoint = reporter.checkpoint
doing = reporter.doing
exit_stopped = reporter.exit_stopped
fail = reporter.fail
finished = reporter.finished
job_id = reporter.job_id
metrics = reporter.metrics
note = reporter.note
output_dir = reporter.output_dir
phase = reporter.phase
progress = reporter.progress
rank = reporter.rank
resume_from = reporter.resume_from
resume_path = reporter.resume_path
save_requested = reporter.save_requested
stop_requested = reporter.stop_requested
