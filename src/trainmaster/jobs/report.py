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

_reporter = Reporter(os.environ)
_reporter.offer_stacks()
os.register_at_fork(after_in_child=_reporter.renew_lock)

checkpoint = _reporter.checkpoint
exit_stopped = _reporter.exit_stopped
fail = _reporter.fail
finished = _reporter.finished
job_id = _reporter.job_id
metrics = _reporter.metrics
note = _reporter.note
output_dir = _reporter.output_dir
phase = _reporter.phase
progress = _reporter.progress
rank = _reporter.rank
resume_path = _reporter.resume_path
save_requested = _reporter.save_requested
stop_requested = _reporter.stop_requested
