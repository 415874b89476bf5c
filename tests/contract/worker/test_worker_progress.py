"""`update_trainjob_status` of `trainmaster.trainer`, called by a rank: it reaches the worker beside it."""

from __future__ import annotations

from worker_attempts import Attempts, wait_for

from trainmaster.protocol.reasons import Reason

PROGRAM = """
from trainmaster.trainer import update_trainjob_status
print(update_trainjob_status(40, 90, {'loss': 0.25, 'note': 'fine'}))
print(update_trainjob_status(41))
print(update_trainjob_status(100, 0, {'loss': 0.125}))
"""


def test_progress_that_code_reports_is_the_ranks_and_the_last_is_never_lost(attempts: Attempts) -> None:
    attempt = attempts.python(PROGRAM, environment={"http_proxy": "http://127.0.0.1:1"})
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log().split() == ["True", "False", "False"], "the others came too soon"
    reported = wait_for(lambda: attempt.metrics()[1:] and attempt.metrics())
    assert [{name: record[name] for name in ("percent", "eta_s", "values")} for record in reported] == [
        {"percent": 40.0, "eta_s": 90.0, "values": {"loss": 0.25}},
        {"percent": 100.0, "eta_s": 0.0, "values": {"loss": 0.125}},
    ]
