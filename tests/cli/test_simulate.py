"""`trainmaster simulate`: from a name or a file to figures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_server import TRAINMASTER, Server
from click.testing import CliRunner, Result

from trainmaster.cli.commands import simulate as command

SMALL_MIX = """
- className: cohort
  count: 2
  queuesSets:
  - className: cq
    count: 2
    nominalQuota: 20
    borrowingLimit: 20
    workloadsSets:
    - count: 5
      creationIntervalMs: 100
      workloads:
      - {className: small, runtimeMs: 200, priority: 50, request: 1}
      - {className: large, runtimeMs: 1000, priority: 200, request: 40}
"""


def simulate(*options: str) -> Result:
    return CliRunner().invoke(TRAINMASTER, ["simulate", *options])


def figures(*options: str) -> dict[str, Any]:
    result = simulate(*options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_synthetic_trace_is_the_same_for_the_same_seed() -> None:
    options = ("--jobs", "60", "--nodes", "2", "--check")
    first, again = figures(*options), figures(*options)
    other = figures(*options, "--seed", "1")
    assert first["ended"] == {"COMPLETED": 60}
    assert first["waiting"] == again["waiting"]
    assert first["waiting"] != other["waiting"]


def test_tables_for_people_say_what_the_figures_mean() -> None:
    result = simulate("--jobs", "60", "--nodes", "2", "--check", "--queue", "a=3", "--queue", "b")
    assert result.exit_code == 0, result.output
    for words in ("of the GPUs", "its lower bound", "decisions a second", "Jain", "every guarantee held", "pretrain"):
        assert words in result.stdout


def test_machines_without_gpus_are_measured_by_their_cores() -> None:
    assert "of the cores" in simulate("--jobs", "30", "--nodes", "2", "--gpus", "0").stdout


def test_recorded_trace_runs_on_the_machines_that_are_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0, "duration_s": 100, "gpus": 2, "class": "big"}, {"arrival_s": 50, "duration_s": 10}]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = figures("--trace", str(trace), "--nodes", "1", "--gpus", "2")
    assert (answer["jobs"], answer["makespan_s"], answer["gpu_utilisation"]) == (2, 100.0, 1.0)
    assert list(answer["waiting"]) == ["big", "priority 5"]


def test_generator_of_kueues_shape_is_read(tmp_path: Path) -> None:
    document = tmp_path / "generator.yaml"
    document.write_text(SMALL_MIX)
    answer = figures("--trace", str(document), "--check")
    assert (answer["jobs"], answer["nodes"], answer["ended"]) == (40, 4, {"COMPLETED": 40})


@pytest.mark.parametrize("name", ["kueue-baseline", "kueue-large"])
def test_mixes_of_kueue_are_built_in(name: str) -> None:
    assert figures("--trace", name, "--jobs", "50")["ended"] == {"COMPLETED": 50}


@pytest.mark.parametrize(
    ("options", "content", "says"),
    [
        (["--trace", "nowhere.jsonl"], None, "cannot read trace nowhere.jsonl"),
        (["--trace", "t.jsonl"], "", "has no jobs"),
        (["--trace", "t.jsonl"], "{}\n", "line 1 arrival_s must be a number of seconds"),
        (["--trace", "t.jsonl"], '{"arrival_s": 0, "duration_s": 1, "gpu": 2}', "unknown fields: gpu"),
        (["--trace", "t.jsonl"], '{"arrival_s": 0, "duration_s": 1, "gpus": -2}', "gpus must be a whole number"),
        (["--trace", "t.jsonl"], "nonsense", "is not JSON"),
        (["--trace", "t.yaml"], "cohorts: [}", "t.yaml, line 1"),
        (["--trace", "t.yaml"], "cohorts: 3", "cohorts must be a list"),
        (["--trace", "t.yaml"], "- className: c\n  count: 1\n", "has no 'queuesSets'"),
        (["--trace", "kueue-baseline", "--nodes", "3"], None, "has nodes and queues of its own"),
        (["--backend", "hpc", "--nodes", "3"], None, "the backend hpc has nodes of its own"),
        (["--queue", "a=x"], None, "such as research=2:64"),
        (["--queue", "=1"], None, "such as research=2:64"),
    ],
)
def test_what_makes_no_sense_is_told_in_a_line(
    options: list[str], content: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(options[1]).write_text(content)
    result = simulate(*options)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_jobs_of_a_server_are_recorded_and_simulated(
    connected: Server, submit: Callable[..., str], status: Callable[..., Any], tmp_path: Path
) -> None:
    scheduling = {"priority": 7, "max_runtime_seconds": 60}
    for name in ("first", "second"):
        status(submit("sleep 0.2", name=name, scheduling_config=scheduling), "COMPLETED")
    trace = tmp_path / "recorded.jsonl"
    result = simulate("--record", str(trace), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"file": str(trace), "jobs": 2}
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["first", "second"]
    assert all(line["duration_s"] >= 0.2 and line["gpus"] == 0 for line in lines)
    assert all((line["priority"], line["max_runtime_s"]) == (7, 60) for line in lines)
    answer = figures("--trace", str(trace), "--nodes", "1", "--gpus", "0", "--check")
    assert answer["ended"] == {"COMPLETED": 2}

    result = simulate("--record", str(tmp_path / "nowhere" / "trace.jsonl"))
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_jobs_run_on_the_nodes_of_a_backend_as_the_server_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def node(name: str, gpus: int, **more: Any) -> dict[str, Any]:
        units = [{"index": index, "type": "H100-80GB", "memory_mb": 81920, "healthy": True} for index in range(gpus)]
        amount = {"total": 64, "free": 0}
        amounts = dict.fromkeys(("cpu_cores", "ram_mb", "storage_mb", "slots"), amount)
        described = {"id": f"hpc:{name}", "hostname": name, "backend": "hpc", "labels": [], "capabilities": []}
        return {**described, "gpus": units, "state": "READY", **amounts, **more}

    nodes = [node("n1", 4), node("n2", 4), node("n3", 8, state="DRAINED"), node("n4", 16, backend="other")]
    client = SimpleNamespace(cluster=SimpleNamespace(nodes=lambda: nodes))
    monkeypatch.setattr(command, "connect", lambda: contextlib.nullcontext(client))
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0, "duration_s": 100, "gpus": 4} for _ in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {**lines[0], "gpus": 8}]))
    answer = figures("--trace", str(trace), "--backend", "hpc")
    assert (answer["nodes"], answer["gpus"], answer["makespan_s"], answer["impossible"]) == (3, 16, 200.0, 1)
    refused = simulate("--backend", "nowhere")
    assert "it knows those of: hpc, other" in refused.stderr


def test_server_knows_the_nodes_of_its_own_machine(connected: Server) -> None:
    assert figures("--backend", "local", "--jobs", "1")["nodes"] == 1


def test_server_without_ended_jobs_has_nothing_to_record(connected: Server, tmp_path: Path) -> None:
    result = simulate("--record", str(tmp_path / "trace.jsonl"))
    assert result.exit_code == 1
    assert "nothing to record" in result.stderr
    assert not (tmp_path / "trace.jsonl").exists()
