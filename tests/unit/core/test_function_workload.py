"""Functions, packages and images: what is accepted, what is refused with which words, and what it compiles to."""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from spec_documents import COMMAND
from trainmaster.backends.base import Capabilities, PlacementBy
from trainmaster.protocol import function_runner
from trainmaster.protocol.documents import from_json
from trainmaster.protocol.function_runner import CALL_FILE, RUNNER_FILE, SOURCE_FILE, call_with, with_tuples
from trainmaster.protocol.launch import Launch, LaunchStep, Lifetime
from trainmaster.server.coordinator.admission_checks import check_backend
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.workloads.function import MAX_ARGUMENTS, MAX_SOURCE
from trainmaster.trainer.functions import tuple_paths

SOURCE = "def train(lr=1):\n    return lr\n"
FUNCTION: dict[str, Any] = {"kind": "function", "source": SOURCE, "name": "train"}
ENVIRONMENT = LaunchStep(name="environment", argv=("-P", "-m", "trainmaster.worker.environments"), python=True)


def launch(**workload: Any) -> Launch:
    return compile_job(parse_submit({"name": "n", "workload": {**FUNCTION, **workload}})).launch


def problem_of(**workload: Any) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_submit({"name": "n", "workload": {**FUNCTION, **workload}})
    (problem,) = caught.value.problems
    return problem.field, problem.message


def test_function_compiles_to_a_runner_with_its_source_and_its_call() -> None:
    compiled = launch(arguments={"lr": 0.5}, image="team/image:1", ranks_per_node=2)
    assert compiled.steps == (LaunchStep(name="node", argv=(RUNNER_FILE,), python=True, from_inputs=True),)
    assert (compiled.image, compiled.ranks_per_node) == ("team/image:1", 2)
    assert compiled.inputs.keys() == {RUNNER_FILE, SOURCE_FILE, CALL_FILE}
    assert compiled.inputs[SOURCE_FILE] == SOURCE
    assert json.loads(compiled.inputs[CALL_FILE]) == {"name": "train", "arguments": {"lr": 0.5}, "tuples": []}
    assert from_json(Launch, json.loads(json.dumps(asdict(compiled)))) == compiled


def test_runner_is_python_that_old_interpreters_read_and_imports_nothing_of_ours() -> None:
    tree = ast.parse(launch().inputs[RUNNER_FILE], feature_version=(3, 9))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("trainmaster") for name in imported)
    assert imported >= {"json", "inspect"}


def test_launch_of_an_older_server_has_neither_image_nor_inputs_as_programs() -> None:
    older = {"kind": "command", "steps": [{"name": "main", "argv": ["true"]}]}
    compiled = from_json(Launch, older)
    assert (compiled.image, compiled.steps[0].from_inputs) == (None, False)


@pytest.mark.parametrize(
    ("workload", "field"),
    [
        ({"source": "#" * (MAX_SOURCE + 1)}, "workload.source"),
        ({"source": "a\x00b"}, "workload.source"),
        ({"source": ""}, "workload.source"),
        ({"name": "not a name"}, "workload.name"),
        ({"name": "a.b"}, "workload.name"),
        ({"arguments": [1]}, "workload.arguments"),
        ({"arguments": {"text": "x" * MAX_ARGUMENTS}}, "workload.arguments"),
        ({"arguments": {"a": [1]}, "tuples": [["b"]]}, "workload.tuples.0"),
        ({"arguments": {"a": [1]}, "tuples": [["a"], ["a", 0]]}, "workload.tuples.1"),
        ({"arguments": {"loss": float("nan")}}, "workload.arguments"),
        ({"arguments": {"what": object()}}, "workload.arguments"),
        ({"arguments": {"half": "\ud800"}}, "workload.arguments"),
        ({"image": "-v"}, "workload.image"),
        ({"image": "two words"}, "workload.image"),
        ({"packages": "einops"}, "workload.packages"),
        ({"index_urls": ["ftp://host"]}, "workload.index_urls.0"),
        ({"index_urls": ["https://"]}, "workload.index_urls.0"),
        ({"index_urls": ["file://host/x"]}, "workload.index_urls.0"),
        ({"index_urls": ["https://me:secret@host/simple"]}, "workload.index_urls.0"),
        ({"packages": ["a @ https://token@host/a.whl"]}, "workload.packages.0"),
    ],
)
def test_wrong_field_of_a_function_is_refused_by_its_name(workload: dict[str, Any], field: str) -> None:
    assert problem_of(**workload)[0].replace("[", ".").replace("]", "").startswith(field)


@pytest.mark.parametrize(
    "requirement",
    [
        "einops",
        "Zope.Interface",
        "einops>=0.8",
        "einops >= 0.8, != 0.9, < 2",
        "torch==2.7.1+cpu",
        "jax[cuda12, k8s]~=0.4.30",
        "foo==1.*",
        'tomli>=1; python_version < "3.11"',
        "foo @ https://host/foo-1.0.whl#sha256=abc",
        "foo[bar] @ git+https://host/foo.git@v1",
        "git+ssh://git@host/team/foo.git",
        "https://host/foo-1.0.tar.gz",
        "file:///srv/wheels/foo-1.0.whl",
    ],
)
def test_requirement_of_the_usual_shapes_is_accepted(requirement: str) -> None:
    compiled = launch(packages=[requirement], index_urls=["https://host/simple", "file:///srv/simple"])
    assert compiled.steps[0] == ENVIRONMENT
    assert compiled.steps[1].name == "node"
    assert json.loads(compiled.inputs["packages.json"]) == {
        "packages": [requirement],
        "index_urls": ["https://host/simple", "file:///srv/simple"],
    }


@pytest.mark.parametrize(
    "requirement",
    [
        "",
        "-r requirements.txt",
        "--index-url=https://elsewhere",
        "foo --hash=sha256:abc",
        "foo\n--no-deps",
        "foo bar",
        "./foo",
        "/srv/foo.whl",
        "foo # why",
        "foo>=",
        "foo;",
        "$(id)",
        "foo @ ftp://host/foo.whl",
        "é",
    ],
)
def test_requirement_of_any_other_shape_is_refused(requirement: str) -> None:
    assert problem_of(packages=[requirement])[0].startswith("workload.packages")


def test_packages_belong_to_functions_scripts_and_commands_alone() -> None:
    wanted = {"packages": ["einops"]}
    for workload in ({"kind": "command", "argv": ["a"]}, {"kind": "script", "path": "/a.py"}):
        compiled = compile_job(parse_submit({"name": "n", "workload": {**workload, **wanted}})).launch
        assert [step.name for step in compiled.steps] == ["environment", "main"]
    for workload in ({"kind": "service", "argv": ["a"]}, {"kind": "container", "image": "a"}):
        with pytest.raises(SpecError, match="packages"):
            parse_submit({"name": "n", "workload": {**workload, **wanted}})


def test_container_runs_its_argv_or_its_images_own_command() -> None:
    workload = {"kind": "container", "image": "host:5000/team/image@sha256:00", "argv": ["run", "-x"]}
    compiled = compile_job(parse_submit({"name": "n", "workload": workload})).launch
    assert compiled.steps == (LaunchStep(name="node", argv=("run", "-x")),)
    assert compiled.image == "host:5000/team/image@sha256:00"
    plain = compile_job(parse_submit({"name": "n", "workload": {"kind": "container", "image": "image"}})).launch
    assert plain.steps == (LaunchStep(name="node", argv=()),)
    for given, step in (
        ({"args": ["-x"]}, LaunchStep(name="node", argv=(), args=("-x",))),
        ({"argv": ["run"], "args": ["-x"]}, LaunchStep(name="node", argv=("run", "-x"))),
    ):
        workload = {"kind": "container", "image": "image", **given}
        launch = compile_job(parse_submit({"name": "n", "workload": workload})).launch
        assert launch.steps == (step,)
        assert from_json(Launch, json.loads(json.dumps(asdict(launch)))) == launch
    for wrong in ({}, {"image": None}, {"image": "a", "argv": []}):
        with pytest.raises(SpecError):
            parse_submit({"name": "n", "workload": {"kind": "container", **wrong}})


def test_stored_function_is_read_back_as_it_was() -> None:
    request = parse_submit({"name": "n", "workload": {**FUNCTION, "arguments": {"a": [1, None]}, "packages": ["b"]}})
    assert load_stored(SPEC_VERSION, json.loads(json.dumps(dump(request)))) == request


def test_backend_that_cannot_run_a_job_refuses_it_and_names_one_that_can() -> None:
    batch = Capabilities(placement=PlacementBy.US, lifetimes=frozenset({Lifetime.BATCH}))
    boxes = Capabilities(
        placement=PlacementBy.US,
        lifetimes=frozenset(Lifetime),
        images=True,
        image_setting="container_image",
    )
    in_image = parse_submit({"name": "n", "workload": {**FUNCTION, "image": "image"}})
    serving = {"kind": "service", "argv": ["serve"]}
    service = parse_submit({"name": "n", "workload": serving})
    backends = {"local": batch, "boxes": boxes}
    for request in (in_image, parse_submit({"name": "n", "workload": {**serving, "image": "image"}})):
        check_backend(compile_job(request), "boxes", backends)
    check_backend(compile_job(parse_submit(COMMAND)), "local", backends)
    with pytest.raises(RefusedError) as caught:
        check_backend(compile_job(in_image), "local", backends)
    assert caught.value.message == (
        "workload.image: the backend local runs no containers; use one of: boxes, or leave image out"
    )
    with pytest.raises(RefusedError, match=r"^workload.image: .*names none.*CustomTrainer\(image=.*container_image"):
        check_backend(compile_job(parse_submit(COMMAND)), "boxes", backends)
    check_backend(compile_job(parse_submit(COMMAND)), "boxes", {"boxes": replace(boxes, own_image="image")})
    with pytest.raises(RefusedError) as caught:
        check_backend(compile_job(service), "local", {"local": batch})
    assert caught.value.message == (
        "backend: the backend local cannot run a service workload; this server has none that does"
    )


def test_tuples_among_the_arguments_are_tuples_again() -> None:
    arguments = {"shape": (1, (2, [3])), "rows": [(4,), [5]], "plain": [6]}
    paths = list(tuple_paths(arguments))
    travelled = json.loads(json.dumps(arguments))
    call = json.loads(launch(arguments=travelled, tuples=paths).inputs[CALL_FILE])
    assert call["tuples"] == [["shape", 1], ["shape"], ["rows", 0]]
    assert with_tuples(call["arguments"], call["tuples"]) == arguments


def test_arguments_reach_a_function_by_name_or_as_one_dict() -> None:
    def named(a: int, b: int = 2) -> tuple[int, int]:
        return a, b

    def whole(config: dict[str, int]) -> dict[str, int]:
        return config

    def both(a: int, b: int) -> int:
        return a + b

    assert call_with(named, {"a": 1}) == (1, 2)
    assert call_with(whole, {"a": 1}) == {"a": 1}
    assert call_with(whole, {"config": 1}) == 1
    assert call_with(lambda: "nothing", {}) == "nothing"
    with pytest.raises(TypeError, match="cannot be called with its arguments: missing a required argument: 'a'"):
        call_with(both, {"b": 1, "c": 2})


def test_result_is_written_whole_or_told(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Scalar:
        def tolist(self) -> float:
            return 0.5

    function_runner.keep({"loss": Scalar()}, "train", str(tmp_path))
    assert json.loads((tmp_path / "result.json").read_text()) == {"loss": 0.5}
    for value in (float("nan"), {1, 2}, {(1, 2): 3}):
        function_runner.keep(value, "train", str(tmp_path))
        assert "what train returned is not kept" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
