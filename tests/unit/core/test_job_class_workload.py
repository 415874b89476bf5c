"""Job classes as workloads: what they compile to, and what is refused before they are stored."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse_submit
from trainmaster.server.core.spec.submit import compile_job


def document(workload: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "name": "my run",
        "workload": {"kind": "job_class", "target": "package.module:Class", **(workload or {})},
        "resource_config": {"gpu_count": 2, "node_count": 2, "gpu_type": "H100"},
        **fields,
    }


def refused(workload: dict[str, Any], **fields: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_submit(document(workload, **fields))
    return {problem.field: problem.message for problem in caught.value.problems}


def test_runner_is_told_who_runs_and_on_what() -> None:
    config = {"lr": 1e-4, "deep": {"list": [1, None, "x"]}}
    request = parse_submit(document({"config": config, "overrides": ["lr=0.1"], "restore": "a/b/c/d"}))
    launch = compile_job(request).launch
    (step,) = launch.steps
    assert (step.argv, step.python, step.tokens) == (("-m", "trainmaster.jobs.runner"), True, False)
    assert launch.reports_phases
    assert json.loads(launch.inputs["run.json"]) == {
        "target": "package.module:Class",
        "module": None,
        "config": config,
        "overrides": ["lr=0.1"],
        "restore": "a/b/c/d",
        "overlay": False,
        "elastic": False,
        "project": "general",
        "group": "default",
        "name": "my run",
        "checkpoints": None,
        "tracker": "none",
        "nodes": 2,
        "hardware": {"chip": "H100", "min_chips": 2},
    }


def test_runner_is_told_of_other_process_counts_and_of_the_tracker() -> None:
    request = parse_submit(document({"elastic": True, "tracker": "wandb"}))
    told = json.loads(compile_job(request).launch.inputs["run.json"])
    assert (told["elastic"], told["tracker"]) == (True, "wandb")


def test_name_of_its_own_wins_over_the_jobs() -> None:
    request = parse_submit(document({"name": "pretrain-7"}, name="any text / at all"))
    assert json.loads(compile_job(request).launch.inputs["run.json"])["name"] == "pretrain-7"


def test_stored_job_class_compiles_to_the_same() -> None:
    request = parse_submit(document({"config": {"a": 1}}))
    assert compile_job(load_stored(SPEC_VERSION, dump(request))).launch == compile_job(request).launch


@pytest.mark.parametrize(
    ("workload", "field", "said"),
    [
        ({"target": "Class"}, "workload.target", "is not module:Class"),
        ({"target": "module:"}, "workload.target", "has to be module:Class"),
        ({"target": "x/y", "module": "a b"}, "workload.module", "name of a module"),
        ({"name": "latest"}, "workload.name", "neither latest nor best"),
        ({"project": "a/b"}, "workload.project", "has letters, digits"),
        ({"group": ".."}, "workload.group", "has letters, digits"),
        ({"overrides": ["lr"]}, "workload.overrides[0]", "has to be key=value"),
        ({"overrides": ["=1"]}, "workload.overrides[0]", "has to be key=value"),
        ({"restore": "../other"}, "workload.restore", "plain relative path"),
        ({"config": [1]}, "workload.config", "must be an object"),
        ({"config": {"a": ["\ud800"]}}, "workload.config", "proper Unicode"),
        ({"config": {"a": {"\ud800": 1}}}, "workload.config", "proper Unicode"),
        (
            {"config": {"a": functools.reduce(lambda inner, _: [inner], range(64), 1)}},
            "workload.config",
            "nested deeper",
        ),
        ({"checkpoints": "/srv/checkpoints"}, "workload.checkpoints", "is like s3://bucket/prefix"),
        ({"tracker": "paper"}, "workload.tracker", "paper"),
        ({"traget": "x"}, "workload.traget", "target"),
    ],
)
def test_job_class_that_cannot_be_run_is_refused(workload: dict[str, Any], field: str, said: str) -> None:
    assert said in refused(workload)[field]


def test_name_of_the_job_that_cannot_be_a_path_asks_for_another() -> None:
    assert "give a name here" in refused({}, name="a/b")["workload.name"]


def test_registered_name_needs_the_module_that_registers_it() -> None:
    parse_submit(document({"target": "language/pretrain", "module": "my.jobs"}))
