"""One set of cases, run with the real kubeflow package and with ours: each comes to what `outcomes.py` says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import outcomes
import pytest
from case_programs import CASES, ROOT, Run, kubeflow_python, make_index

from real_server import running
from wheel_index import WheelIndex


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blackbox")


@pytest.fixture(scope="module")
def index(ground: Path) -> WheelIndex:
    return make_index(ground / "index")


@pytest.fixture(scope="module")
def runs(ground: Path, index: WheelIndex) -> Iterator[dict[str, Run]]:
    """Both clients of a server at once, each in its environment."""
    theirs, ours = kubeflow_python(), Path(sys.executable)
    started: dict[str, Run] = {}
    with running(ground / "data") as server:
        at = {"TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key}
        source = {"PYTHONPATH": str(ROOT / "src")}
        try:
            started["trainmaster"] = Run(ours, "trainmaster", "local", ground / "trainmaster", index, **at)
            started["facade"] = Run(theirs, "kubeflow", "ours", ground / "facade", index, **at, **source)
            yield started
        finally:
            for run in started.values():
                run.close()


@pytest.fixture(scope="module")
def kubeflow(ground: Path, index: WheelIndex) -> Iterator[dict[str, str]]:
    run = Run(kubeflow_python(), "kubeflow", "local", ground / "kubeflow", index)
    try:
        yield run.outcomes()
    finally:
        run.close()


@pytest.fixture(scope="module")
def trainmaster(runs: dict[str, Run]) -> dict[str, str]:
    return runs["trainmaster"].outcomes()


@pytest.fixture(scope="module")
def facade(runs: dict[str, Run]) -> dict[str, str]:
    return runs["facade"].outcomes()


@pytest.mark.parametrize("case", CASES)
def test_ours_comes_to_what_the_table_says(trainmaster: dict[str, str], case: str) -> None:
    assert trainmaster[case] == outcomes.ROWS[case].ours


@pytest.mark.parametrize("case", CASES)
def test_our_backend_behind_kubeflows_own_client_comes_to_the_same(facade: dict[str, str], case: str) -> None:
    row = outcomes.ROWS[case]
    assert facade[case] == (row.facade or row.ours)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_kubeflow_comes_to_what_the_table_says(kubeflow: dict[str, str], case: str) -> None:
    assert kubeflow[case] == outcomes.ROWS[case].local


def test_every_case_has_a_row_and_every_difference_a_reason() -> None:
    assert sorted(outcomes.ROWS) == sorted(CASES)
    unexplained = [row.case for row in outcomes.ROWS.values() if (row.ours != row.local) != bool(row.why)]
    assert not unexplained


def test_page_is_up_to_date() -> None:
    assert outcomes.PAGE.read_text() == outcomes.page(), "run `make docs`"
