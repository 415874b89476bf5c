"""The notebook of the examples, executed as a person would: a real kernel, a server of its own."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from real_server import PATIENCE_S, running

NOTEBOOK = Path(__file__).parents[2] / "examples" / "trainer_client.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each cell of code left, as text, by its first line."""
    directory = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with running(directory / "data", OMP_NUM_THREADS="1") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINMASTER_URL", server.url)
        patch.setenv("TRAINMASTER_API_KEY", server.key)
        patch.setenv("IPYTHONDIR", str(directory / "ipython"))
        NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(directory)}}).execute()
    return {
        cell.source.splitlines()[0]: [_text(output) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def _text(output: nbformat.NotebookNode) -> str:
    return output.text if output.output_type == "stream" else output.data.get("text/html", output.data["text/plain"])


def test_what_is_trained_is_seen_line_by_line(executed: dict[str, list[str]]) -> None:
    text = "".join(executed["for line in client.get_job_logs(name, follow=True):"])
    assert [line.partition(":")[0] for line in text.splitlines()] == [f"step {step}" for step in range(20, 101, 20)]


def test_wait_leaves_a_bar_with_the_loss_and_the_job_as_a_table(executed: dict[str, list[str]]) -> None:
    bar, job = executed["client.wait_for_job_status(name)"]
    assert re.fullmatch(
        r'<div><code>[a-z0-9]{12}</code> <progress max="100" value="100.0"></progress> '
        r"COMPLETED · step 100 of 100 · loss [0-9.e-]+</div>",
        bar,
    ), bar
    assert job.startswith("<table>")
    assert all(f"<th>{column}</th>" in job for column in ("job", "status", "progress", "metrics"))
    assert "<td>Complete</td>" in job
    assert "<td>step 100 of 100, 100 %</td>" in job
    assert re.search(r"<td>loss [0-9.e-]+</td>", job), job


def test_what_it_returns_is_right(executed: dict[str, list[str]]) -> None:
    result = ast.literal_eval(executed["result = client.get_job_result(name)"][-1])
    assert result["slope"] == pytest.approx(3, abs=0.01)
    assert result["offset"] == pytest.approx(1, abs=0.01)


def test_two_nodes_meet(executed: dict[str, list[str]]) -> None:
    assert executed["def meet() -> float:"][-1] == "3.0"


def test_jobs_and_runtimes_are_tables(executed: dict[str, list[str]]) -> None:
    jobs, runtimes = executed["client.list_jobs()"][-1], executed["client.list_runtimes()"][-1]
    assert jobs.count("Complete") == 2
    assert "<table" in jobs
    assert "torch-distributed" in runtimes
    assert "<table" in runtimes
