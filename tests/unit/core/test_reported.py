"""What is let through of what jobs and workers report."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.server.core import reports


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, True, "1", None, [1]])
def test_number_that_is_none_is_left_out(value: object) -> None:
    assert reports.number(value) is None


def test_number_out_of_its_bounds_is_left_out() -> None:
    assert reports.number(3, low=0, high=2) is None
    assert reports.number(2, low=0, high=2) == 2.0


@pytest.mark.parametrize("value", [-1, 2**63, 1e300, 0.5, float("nan"), float("inf"), False, "1", None])
def test_whole_number_that_cannot_be_kept_is_left_out(value: object) -> None:
    assert reports.whole(value) is None


def test_whole_number_may_be_written_as_a_float() -> None:
    assert reports.whole(3.0) == 3


@pytest.mark.parametrize(("told", "kept"), [(5.0, 10.0), (15.0, 15.0), (1e300, 20.0), ("15", None)])
def test_moment_is_held_within_what_is_possible(told: object, kept: float | None) -> None:
    assert reports.moment(told, since=10.0, now=20.0) == kept


def test_text_is_cut_and_cleaned() -> None:
    assert reports.text("a\ud800b\0c" + "x" * 99, 6) == "a?bcx"
    assert reports.text(["a"]) is None


def test_exact_text_is_whole_or_refused() -> None:
    assert reports.exact_text("runs/a") == "runs/a"
    for value in ("", "a\0", "a\ud800", "s3://b/k\r\nx: y", "x" * 5000, 7, None):
        with pytest.raises(ValueError, match="plain characters"):
            reports.exact_text(value)


def test_metrics_are_finite_few_and_have_short_names() -> None:
    values: dict[str, Any] = {"loss": 1, "bad": float("nan"), "text": "x", "n" * 999: 2.0}
    assert reports.metrics(values) == {"loss": 1.0, "n" * 200: 2.0}
    assert len(reports.metrics({str(n): n for n in range(1000)})) == 200
    assert reports.metrics([("loss", 1)]) == {}


def test_ending_keeps_what_it_understands_field_by_field() -> None:
    document = {
        "reason": "EXITED_NONZERO",
        "message": "exited with 3\0",
        "exit_code": [3],
        "signal": 9,
        "rank": 1,
        "step": {"name": "main"},
        "stop_cause": "whim",
        "started_at": 5,
        "ended_at": "late",
        "evidence": {"last_lines": ["a\ud800", 3], "frame": ["f"], "oom_kills": float("nan")},
        "streams": {"x": 1},
    }
    assert reports.ending(document, since=10.0, now=20.0) == {
        "reason": Reason.EXITED_NONZERO,
        "message": "exited with 3",
        "rank": 1,
        "started_at": 10.0,
        "ended_at": 20.0,
        "evidence": {"last_lines": ["a?"]},
    }


def test_ending_of_a_worker_is_kept_whole() -> None:
    document = {
        "reason": "WORKER_LOST",
        "message": "m",
        "exit_code": None,
        "signal": "SIGKILL",
        "rank": 0,
        "step": "main",
        "stop_cause": "peer",
        "started_at": 11.0,
        "ended_at": 12.0,
        "evidence": {"last_lines": ["x"], "frame": "File ...", "oom_kills": 2},
    }
    kept = {**document, "stop_cause": StopCause.PEER}
    del kept["exit_code"]
    assert reports.ending(document, since=10.0, now=20.0) == kept


@pytest.mark.parametrize("reason", [None, "FROM_THE_FUTURE", ["SUCCEEDED"], 3, {}])
def test_ending_for_an_unknown_reason_is_a_lost_worker(reason: object) -> None:
    ended = reports.ending({"reason": reason, "message": "m"}, since=10.0, now=20.0)
    assert (ended["reason"], ended["ended_at"]) == (Reason.WORKER_LOST, 20.0)
    assert "unknown reason" in ended["message"]
