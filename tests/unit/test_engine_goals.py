"""The table of the benchmark `engine_tokens`: what is set against what, and whether goals are met."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from benchmarks.engine_goals import CASES, CURVES, ROWS, SHOWING, Goal, cases_of_rows, table_of
from benchmarks.loss_picture import apart, picture


def outcome(rate: float, **fields: Any) -> dict[str, Any]:
    return {"tokens": rate, "seconds": 1.0, "value": None, "unit": "tokens/s", **fields}


def test_rows_are_of_cases_that_there_are() -> None:
    keys = [case.key for case in CASES]
    assert len(set(keys)) == len(keys)
    named = {key for rows in ROWS.values() for row in rows for key in (row.key, *row.peers)}
    goals = {goal.of for rows in ROWS.values() for row in rows for goal in row.goals if goal.of}
    assert named | goals | SHOWING | set(CURVES) <= set(keys)


@pytest.mark.parametrize("shape", ROWS)
def test_table_measures_all_that_its_goals_need_and_loads_a_model_once(shape: str) -> None:
    cases = cases_of_rows(shape)
    measured = {case.key for case in cases}
    for row in ROWS[shape]:
        assert {row.key, *row.peers, *(goal.of for goal in row.goals if goal.of)} <= measured
    hosts = [host for host, _ in itertools.groupby(cases, key=lambda case: case.host)]
    assert len(set(hosts)) == len(hosts)


@pytest.mark.parametrize(
    ("goal", "found", "missing"),
    [
        (Goal(least=100), 100.0, ""),
        (Goal(least=100), 75.0, "by 25%"),
        (Goal(most=100), 100.0, ""),
        (Goal(most=100), 150.0, "by 50%"),
        (Goal(times=1.15, of="other"), 230.0, ""),
        (Goal(times=1.15, of="other"), 115.0, "by 50%"),
        (Goal(times=1.15, of="nobody"), 115.0, None),
    ],
)
def test_goal_is_met_at_its_bound(goal: Goal, found: float, missing: str | None) -> None:
    assert goal.missing(found, {"other": 200.0}) == missing


def test_table_sets_a_figure_against_the_best_peer_and_tells_what_failed() -> None:
    table = table_of(
        "8B",
        {
            "engine-equal": outcome(18_000),
            "peft-equal-compiled": outcome(15_000),
            "peft-equal": outcome(11_000),
            "update": outcome(1, value=120.0, unit="ms"),
            "engine-fp8-equal": "not available: the engine has no option `fp8`",
            "engine-mixed": outcome(17_000),
        },
    )
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()[2:]}
    assert "18,000 tokens/s | 15,000 tokens/s (`peft-equal-compiled`) | 1.2 |" in lines["training, equal lengths"]
    assert lines["training, equal lengths"].endswith("| met |")
    assert lines["training, mixed lengths, packed"].endswith("| the peer was not measured |")
    assert lines["from `optim_step` to the first token"].endswith("| ≤ 100 ms | missed by 20% |")
    assert "not available" in lines["training, equal lengths, base in fp8"]
    assert len(lines) == 4


def test_curves_are_drawn_with_their_names() -> None:
    falling = [3.0 - step / 100 for step in range(200)]
    drawn = picture({"one": falling, "another": [each + 0.1 for each in falling]}, "losses")
    assert drawn.count('<path d="M56.0') == 2
    assert ">one</text>" in drawn
    assert apart(falling, [each + 0.1 for each in falling]) == pytest.approx(0.1)
