"""Workload kinds: what each compiles to, and how a new one is added."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from spec_documents import COMMAND, CUSTOM, changed
from trainmaster.protocol.documents import from_json
from trainmaster.protocol.launch import (
    BlobFile,
    Launch,
    LaunchStep,
    Lifetime,
    Readiness,
)
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse_submit, secret_values
from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job
from trainmaster.server.core.workloads import kinds, register, spec_for
from trainmaster.server.core.workloads.programs import ServiceSpec

DIGEST = "ab" * 32


def launch(workload: dict[str, Any], **request: Any) -> Launch:
    return compile_job(parse_submit({"name": "n", "workload": workload, **request})).launch


def problems_of(workload: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_submit({"name": "n", "workload": workload})
    return [problem.field for problem in caught.value.problems]


def test_kinds_are_the_built_in_ones() -> None:
    expected = "command container function job_class script service trainer trainer_service"
    assert kinds() == tuple(expected.split())


def test_kind_registered_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'command' is registered already"):
        register(spec_for("command"))


def test_command_compiles_to_its_argv() -> None:
    assert launch({"kind": "command", "argv": ["sh", "-c", ""]}) == Launch(
        kind="command", steps=(LaunchStep(name="main", argv=("sh", "-c", "")),)
    )


def test_common_fields_are_passed_on_to_the_launch() -> None:
    compiled = launch(
        {
            "kind": "command",
            "argv": ["true"],
            "environment": {"A": 1},
            "working_directory": "/srv",
            "ranks_per_node": 4,
            "can_save": True,
            "grace_period_s": 0,
            "retry_exit_codes": [3, 75],
            "files": [{"path": "a/b", "sha256": DIGEST, "executable": True}],
        }
    )
    assert compiled == Launch(
        kind="command",
        steps=(LaunchStep(name="main", argv=("true",)),),
        secrets={"A": "secret:env.A"},
        blobs=(BlobFile(sha256=DIGEST, path="a/b", executable=True),),
        working_directory="/srv",
        ranks_per_node=4,
        can_save=True,
        grace_s=0.0,
        retry_exit_codes=(3, 75),
    )


def test_launch_of_any_kind_survives_json() -> None:
    workload = {"kind": "service", "argv": ["serve"], "files": [{"path": "a", "sha256": DIGEST}]}
    compiled = launch(workload)
    assert from_json(Launch, json.loads(json.dumps(asdict(compiled)))) == compiled


def test_environment_of_the_workload_wins_over_the_training_config() -> None:
    document = changed(CUSTOM, "training_config.environment", {"A": "training", "B": "training"})
    document["workload"] = {"kind": "trainer", "environment": {"B": "workload"}}
    request = parse_submit(document)
    assert secret_values(request) == {"env.A": "training", "env.B": "workload"}
    assert compile_job(request).launch.secrets == {"A": "secret:env.A", "B": "secret:env.B"}


@pytest.mark.parametrize(
    "argv", [[], [""], ["  "], ["a\x00b"], "true", ["x" * 200_000], [1]], ids=lambda argv: str(argv)[:12]
)
def test_command_that_cannot_be_started_is_refused(argv: object) -> None:
    [field] = problems_of({"kind": "command", "argv": argv})
    assert field.startswith("workload.argv")


@pytest.mark.parametrize(
    ("workload", "step"),
    [
        ({"path": "/srv/a.py", "args": ["-v"]}, LaunchStep(name="main", argv=("/srv/a.py", "-v"), python=True)),
        ({"path": "/srv/a.sh", "args": ["-v"]}, LaunchStep(name="main", argv=("sh", "/srv/a.sh", "-v"))),
        ({"path": "/srv/a"}, LaunchStep(name="main", argv=("sh", "/srv/a"))),
        (
            {"path": "/srv/a.py", "interpreter": ["python3.12", "-u"], "args": ["1"]},
            LaunchStep(name="main", argv=("python3.12", "-u", "/srv/a.py", "1")),
        ),
    ],
)
def test_script_runs_with_the_interpreter_that_fits(workload: dict[str, Any], step: LaunchStep) -> None:
    assert launch({"kind": "script", **workload}).steps == (step,)


def test_script_that_was_shipped_runs_from_the_working_directory() -> None:
    compiled = launch({"kind": "script", "path": "a/b.py", "files": [{"path": "a/b.py", "sha256": DIGEST}]})
    assert compiled.steps[0].argv == ("a/b.py",)
    assert compiled.blobs == (BlobFile(sha256=DIGEST, path="a/b.py"),)


def test_script_in_a_named_working_directory_need_not_be_shipped() -> None:
    assert launch({"kind": "script", "path": "b.py", "working_directory": "/srv"}).working_directory == "/srv"


@pytest.mark.parametrize("path", ["a.py", "../a.py", "", "/srv/../a.py"])
def test_script_that_cannot_be_found_is_refused(path: str) -> None:
    assert problems_of({"kind": "script", "path": path}) == ["workload.path"]


def test_service_has_a_port_readiness_and_no_end() -> None:
    compiled = launch({"kind": "service", "argv": ["-m", "http.server"], "python": True})
    assert compiled == Launch(
        kind="service",
        steps=(LaunchStep(name="main", argv=("-m", "http.server"), python=True),),
        lifetime=Lifetime.SERVICE,
        port_environment="PORT",
        readiness=Readiness(path="/", timeout_s=600.0),
    )


def test_service_fields_are_passed_on_to_the_launch() -> None:
    compiled = launch(
        {
            "kind": "service",
            "argv": ["serve"],
            "port_environment": "HTTP_PORT",
            "readiness": {"path": "/health?full=1", "timeout_s": 5},
        }
    )
    assert compiled.port_environment == "HTTP_PORT"
    assert compiled.readiness == Readiness(path="/health?full=1", timeout_s=5.0)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"port_environment": "TRAINMASTER_PORT"}, "port_environment"),
        ({"port_environment": "A-B"}, "port_environment"),
        ({"readiness": {"path": "health"}}, "readiness.path"),
        ({"readiness": {"timeout_s": 0}}, "readiness.timeout_s"),
        ({"inactivity_timeout_s": -1}, "inactivity_timeout_s"),
        ({"argv": []}, "argv"),
    ],
)
def test_service_with_a_wrong_field_is_refused(fields: dict[str, Any], path: str) -> None:
    assert problems_of({"kind": "service", "argv": ["serve"], **fields}) == [f"workload.{path}"]


@pytest.mark.parametrize(
    ("fields", "after_s"),
    [
        ({}, 3600.0),
        ({"inactivity_timeout_s": 0}, 3600.0),
        ({"inactivity_timeout_s": 60}, 60.0),
        ({"inactivity_timeout_s": 60, "disable_inactivity_cleanup": True}, None),
    ],
)
def test_service_is_parked_after_its_inactivity_timeout(fields: dict[str, Any], after_s: float | None) -> None:
    request = parse_submit({"name": "n", "workload": {"kind": "service", "argv": ["serve"], **fields}})
    assert isinstance(request.workload, ServiceSpec)
    assert request.workload.effective_inactivity_s == after_s


def test_custom_framework_is_a_script_with_the_job_s_ranks_and_environment() -> None:
    document = changed(CUSTOM, "training_config.environment", {"A": "b"})
    document["resource_config"] = {"gpu_count": 8, "node_count": 2}
    request = parse_submit(document)
    assert request.workload is None
    assert request.effective_workload.kind == "script"
    compiled = compile_job(request).launch
    fetch, script = compiled.steps
    fetching = ("-s", "-P", "-m", "trainmaster.training.fetching")
    assert fetch == LaunchStep(name="prepare", argv=fetching, python=True, tokens=True)
    assert script == LaunchStep(name="main", argv=("/srv/train.py",), python=True)
    assert (compiled.kind, compiled.ranks_per_node, compiled.secrets) == ("script", 4, {"A": "secret:env.A"})
    assert json.loads(compiled.inputs["training.json"])["data_config"]["sources"][0]["path"] == "hf://org/data"
    assert not compiled.reports_phases


def test_explicit_workload_is_the_effective_one() -> None:
    request = parse_submit(COMMAND)
    assert request.effective_workload is request.workload


def test_new_kind_is_submitted_stored_shown_and_compiled(toy_kind: Any) -> None:
    request = parse_submit({"name": "n", "workload": {"kind": "toy", "greeting": "hi", "ranks_per_node": 2}})
    again = load_stored(SPEC_VERSION, dump(request))
    assert dump(again)["workload"]["greeting"] == "hi"
    assert compile_job(again).launch == Launch(
        kind="toy",
        steps=(
            LaunchStep(name="prepare", argv=("sh", "-c", "echo 'hi' > greeting")),
            LaunchStep(name="main", argv=("cat", "greeting")),
        ),
        ranks_per_node=2,
    )


def test_new_kind_s_own_rules_and_fields_are_checked(toy_kind: Any) -> None:
    assert problems_of({"kind": "toy", "greeting": "it's"}) == ["workload.greeting"]
    with pytest.raises(SpecError, match=r"workload\.greting: unknown field; did you mean 'greeting'"):
        parse_submit({"name": "n", "workload": {"kind": "toy", "greting": "hi"}})


def test_new_kind_is_in_the_schema_while_it_is_registered(toy_kind: Any) -> None:
    union = SubmitJobRequest.model_json_schema()["properties"]["workload"]["anyOf"][0]
    assert union["discriminator"]["mapping"]["toy"] == "#/$defs/ToySpec"
    assert {"$ref": "#/$defs/ToySpec"} in union["oneOf"]


def test_kind_that_was_never_registered_is_refused() -> None:
    assert problems_of({"kind": "toy"}) == ["workload.kind"]
