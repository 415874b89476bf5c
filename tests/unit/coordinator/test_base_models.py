"""Base models by name, shapes by file: what an operator gives a server, and what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from model_config import model_config
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.base_models import BaseModels, check_aliases
from trainmaster.server.coordinator.operator_files import ShapeFileError, load_shapes
from trainmaster.server.core.commands import submit
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.core.workloads.trainer_service import TrainerServiceSpec
from trainmaster.server.settings.settings import NamedPath


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make(tmp_path / "model", **model_config())


def make(directory: Path, **config: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def request(base_model: str, **fields: Any) -> SubmitJobRequest:
    workload = {"kind": "trainer_service", "base_model": base_model, **fields}
    return parse_submit({"name": "n", "workload": workload, "resource_config": {"gpu_count": 0}})


def spec_of(found: SubmitJobRequest) -> TrainerServiceSpec:
    assert isinstance(found.workload, TrainerServiceSpec)
    return found.workload


def test_name_leads_to_its_directory_with_its_other_names(model: Path) -> None:
    models = BaseModels([NamedPath("a", model), NamedPath("b", model), NamedPath("c", model.parent)])
    spec = spec_of(models.named(request("b"), "x"))
    assert (spec.model_path, spec.aliases, spec.max_context_length) == (str(model), ("a",), 512)


def test_path_that_is_named_stays(model: Path) -> None:
    asked = request("mine", model_path="/somewhere")
    assert BaseModels([NamedPath("a", model)]).named(asked, "x") is asked


def test_context_of_a_shape_is_no_more_than_the_models(model: Path) -> None:
    models = BaseModels([NamedPath("a", model)])

    def context(**fields: Any) -> int | None:
        return spec_of(models.named(request("a", **fields), "x")).max_context_length

    assert context(max_context_length=4096, training_shape="s") == 512
    assert context(max_context_length=64, training_shape="s") == 64
    assert context(max_context_length=512) == 512
    with pytest.raises(RefusedError, match="max_context_length: is 513, and a was made for 512 tokens"):
        context(max_context_length=513)


def test_stretched_context_is_the_models(tmp_path: Path) -> None:
    """As a trainer reads it: files often still name the length before."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    models = BaseModels([NamedPath("a", make(tmp_path / "yarn", **model_config(rope_scaling=yarn)))])
    assert spec_of(models.named(request("a"), "x")).max_context_length == 2048
    assert spec_of(models.named(request("a", max_context_length=2048), "x")).max_context_length == 2048


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (model_config(model_type="mamba"), "architecture 'mamba' is not among deepseek_v2"),
        (model_config(quantization_config={"bits": 4}), "quantized"),
        (model_config(hidden_size="many"), "hidden_size is 'many'"),
        (model_config(rope_scaling=[1]), "a/config.json makes no sense"),
        (model_config(max_position_embeddings=float("inf")), "a/config.json makes no sense"),
        ({}, "no config.json that can be read"),
    ],
)
def test_model_that_no_trainer_can_hold_is_refused_with_the_reason(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    models = BaseModels([NamedPath("a", make(tmp_path / "odd", **config))])
    with pytest.raises(RefusedError, match=why) as refused:
        models.named(request("a"), "x")
    # Where it lies is the operator's affair.
    assert str(tmp_path) not in str(refused.value)


def test_models_are_read_without_numpy_and_torch() -> None:
    """A server has neither, unless it trains itself."""
    code = (
        "import sys, trainmaster.server.coordinator.base_models; sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_name_says_what_there_is(model: Path) -> None:
    with pytest.raises(RefusedError, match="did you mean 'Qwen/Qwen3-8B'"):
        BaseModels([NamedPath("Qwen/Qwen3-8B", model)]).named(request("Qwen/Qwen3-9B"), "x")
    with pytest.raises(RefusedError, match="--model-alias"):
        BaseModels().named(request("Qwen/Qwen3-9B"), "x")


def test_mixture_of_experts_is_told_by_its_config(tmp_path: Path) -> None:
    for name, config, moe in (
        ("dense", {}, False),
        ("one", {"num_experts": 1}, False),
        ("moe", {"num_local_experts": 8}, True),
        ("inner", {"text_config": {"n_routed_experts": 64, "max_position_embeddings": 9}}, True),
    ):
        found = BaseModels([NamedPath(name, make(tmp_path / name, **config))]).find(name, "x")
        assert found is not None
        assert found.is_moe is moe
    assert found is not None
    assert found.context_length == 9


def test_config_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    found = BaseModels([NamedPath("a", tmp_path)]).find("a", "x")
    assert found is not None
    assert (found.context_length, found.is_moe) == (None, False)


@pytest.mark.parametrize("name", ["accounts/x/models/..", "accounts/x/models/../y/z", "accounts/y/models/m"])
def test_promoted_models_are_found_in_the_own_account_alone(tmp_path: Path, name: str) -> None:
    make(tmp_path / "models" / "y" / "m")
    make(tmp_path / "models" / "x" / "m")
    models = BaseModels(artifacts=tmp_path)
    assert models.find("accounts/x/models/m", "x") is not None
    assert models.find(name, "x") is None


def decided(workload: dict[str, Any], admission: Admission, account_id: str = "x") -> tuple[Job | None, Job]:
    """The job as it is admitted at once, if it is, and as a look at the disk leaves it."""
    asked = parse_submit({"name": "n", "workload": {"kind": "trainer_service", "base_model": "m", **workload}})
    compiled = compile_job(asked)
    made = submit(
        compiled,
        account_id=account_id,
        job_id="job-1",
        created_by="k",
        now=1.0,
        default_backend="local",
    )
    at_once = admission.admit_at_once(made.job, compiled)
    later = admission.decide(made.job, now=2.0)
    assert later is not None
    return (None if at_once is None else at_once.job), later.job


def test_models_that_the_server_offers_are_admitted_at_once(model: Path, tmp_path: Path) -> None:
    promoted = make(tmp_path / "models" / "x" / "m", **model_config())
    models = BaseModels([NamedPath("a", model)], artifacts=tmp_path)
    admission = Admission(data_roots=[tmp_path / "elsewhere"], models=models)
    for path in (model, promoted):
        at_once, later = decided({"model_path": str(path)}, admission)
        assert at_once is not None
        assert (at_once.status, later.status) == (JobStatus.QUEUED, JobStatus.QUEUED)
    _, theirs = decided({"model_path": str(promoted)}, admission, account_id="y")
    assert theirs.status is JobStatus.FAILED


def test_own_path_is_looked_at_before_it_is_queued(model: Path, tmp_path: Path) -> None:
    at_once, inside = decided({"model_path": str(model)}, Admission(data_roots=[tmp_path]))
    assert (at_once, inside.status) == (None, JobStatus.QUEUED)
    _, outside = decided({"model_path": str(model)}, Admission(data_roots=[tmp_path / "other"]))
    assert "outside" in (outside.message or "")
    _, empty = decided({"model_path": str(tmp_path)}, Admission(data_roots=[tmp_path]))
    assert "no config.json" in (empty.message or "")
    _, longer = decided({"model_path": str(model), "max_context_length": 513}, Admission(data_roots=[tmp_path]))
    assert "max_context_length: is 513" in (longer.message or "")
    odd = make(tmp_path / "odd", **model_config(model_type="mamba"))
    _, unknown = decided({"model_path": str(odd)}, Admission(data_roots=[tmp_path]))
    assert "architecture 'mamba'" in (unknown.message or "")


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ([("a", "nowhere")], "a: there is no directory"),
        ([("a", ".")], "has no config.json"),
        ([("a", "model"), ("a", "other")], "a has two directories"),
    ],
)
def test_alias_that_leads_nowhere_is_refused(
    tmp_path: Path, model: Path, aliases: list[tuple[str, str]], said: str
) -> None:
    make(tmp_path / "other")
    with pytest.raises(ValueError, match=said):
        check_aliases([NamedPath(name, (tmp_path / path).resolve()) for name, path in aliases])


# -- shapes by file --


def test_shapes_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "h100.yaml").write_text(
        "description: one of ours\n"
        "versions:\n"
        "  - {version: 1, accelerator_type: H100, accelerator_count: 1, max_context_length: 8192}\n"
        "  - {version: 2, accelerator_type: H100, accelerator_count: 2, max_context_length: 8192}\n"
    )
    (tmp_path / "cpu.yml").write_text("versions: [{version: a, max_context_length: 64, cpu_cores: 2}]\n")
    (tmp_path / "notes.txt").write_text("not a shape")
    shapes = load_shapes(tmp_path)
    assert [each.name for each in shapes] == ["cpu", "h100", "one-gpu"]
    assert shapes.version("h100", "latest").accelerator_count == 2
    assert shapes.version("cpu", "a").cpu_cores == 2
    assert [each.name for each in load_shapes(tmp_path / "nowhere")] == ["cpu", "one-gpu"]


def test_every_wrong_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("versions: [{version: 1, max_context_lenght: 64}]\n")
    (tmp_path / "b.yaml").write_text("versions: [\n")
    (tmp_path / "c.yaml").write_text("- 1\n")
    (tmp_path / "d.yaml").write_text("name: same\nversions: [{version: 1, max_context_length: 1}]\n")
    (tmp_path / "e.yaml").write_text("name: same\nversions: [{version: 1, max_context_length: 1}]\n")
    (tmp_path / "f.yaml").write_bytes(b"\xff")
    with pytest.raises(ShapeFileError) as caught:
        load_shapes(tmp_path)
    said = str(caught.value)
    assert "a.yaml: versions[0].max_context_lenght: unknown field; did you mean 'max_context_length'" in said
    assert "a.yaml: versions[0].max_context_length: required" in said
    for name, words in (("b", "line 2"), ("c", "object"), ("e", "another file has a shape same"), ("f", "")):
        assert f"{name}.yaml: " in said
        assert words in said
