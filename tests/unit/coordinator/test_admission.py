"""Admission: what a job names on the server is looked at before it is queued."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.backends import CLUSTER_KINDS, capabilities_of
from trainmaster.backends.base import Capabilities, FilesBy, PlacementBy
from trainmaster.jobs.objects import ObjectPlace
from trainmaster.protocol.launch import Lifetime
from trainmaster.server.archive import Archive
from trainmaster.server.coordinator.admission import Admission, importable
from trainmaster.server.coordinator.admission_checks import check_backend
from trainmaster.server.core.commands import new_job_id, submit
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job
from trainmaster.server.settings.settings import Settings

SETTINGS = Settings(data_dir=Path("/nowhere"), container_image="image")
BACKENDS = {name: capabilities_of(name, SETTINGS) for name in ("local", "container")}
ELSEWHERE = Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime), runs_here=True)
COMMAND: dict[str, Any] = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    (root / "rows.jsonl").write_text("{}\n")
    return root


def training(root: Path, **changes: Any) -> dict[str, Any]:
    return {
        "name": "n",
        "training_config": {
            "training_type": "SFT",
            "base_model": {"model_id": str(root / "model")},
            **changes.pop("training_config", {}),
        },
        "data_config": {"sources": [{"path": str(root / "rows.jsonl")}]},
        **changes,
    }


def pending(request: SubmitJobRequest, **fields: Any) -> Job:
    made = submit(
        compile_job(request),
        account_id="a",
        job_id=new_job_id(),
        created_by="k",
        now=time.time(),
        default_backend="local",
    )
    return made.job.evolve(**fields)


def decided(document: dict[str, Any], *, root: Path, backend: str = "local", **admission: Any) -> Job:
    request = parse_submit(document)
    decision = Admission(data_roots=[root], **{"installed": lambda _: True, **admission}).decide(
        pending(request, backend=backend), now=time.time()
    )
    assert decision is not None
    return decision.job


def test_model_that_another_job_left_must_lie_there(root: Path) -> None:
    left = root / "artifacts" / "job-a" / "output" / "model"
    left.mkdir(parents=True)
    (left.parent / "file").touch()
    (left.parent / "out").symlink_to(root / "model")
    (left.parent / "inside").symlink_to("model")

    def named(path: str) -> dict[str, Any]:
        return training(root, training_config={"base_model": {"model_id": f"artifacts:job-a/{path}"}})

    for path in ("output/model", "output/inside", "output"):
        assert decided(named(path), root=root, artifacts=root / "artifacts").status == "QUEUED"
    for path in ("output/absent", "output/file", "output/out"):
        said = refusal(named(path), root=root, artifacts=root / "artifacts")
        assert f"training_config.base_model.model_id: job job-a has left no directory {path}" in said
        assert "trainmaster show job-a" in said


def refusal(document: dict[str, Any], *, root: Path, **admission: Any) -> str:
    job = decided(document, root=root, **admission)
    assert (job.status, job.reason) == ("FAILED", "ADMISSION")
    return str(job.message)


def test_training_whose_files_are_there_is_queued_once_they_were_looked_at(root: Path) -> None:
    request = parse_submit(training(root))
    assert Admission(data_roots=[root]).admit_at_once(pending(request), compile_job(request)) is None
    assert decided(training(root), root=root).status == "QUEUED"


def test_command_that_names_nothing_is_queued_at_once(root: Path) -> None:
    request = parse_submit(COMMAND)
    change = Admission(data_roots=[root]).admit_at_once(pending(request), compile_job(request))
    assert change is not None
    assert change.job.status == "QUEUED"


def test_training_on_data_that_is_not_there_is_refused_by_its_field(root: Path) -> None:
    document = training(root, data_config={"sources": [{"path": f"file://{root}/nothing.jsonl"}]})
    assert refusal(document, root=root).startswith(f"data_config.sources[0].path: there is no {root}/nothing.jsonl")


def test_training_on_data_that_a_pattern_names_is_queued(root: Path) -> None:
    document = training(root, data_config={"sources": [{"path": f"{root}/*.jsonl"}]})
    assert decided(document, root=root).status == "QUEUED"


def test_training_on_a_pattern_below_no_directory_is_refused(root: Path) -> None:
    document = training(root, data_config={"sources": [{"path": f"{root}/nothing/*.jsonl"}]})
    assert "there is no" in refusal(document, root=root)


def test_pattern_is_not_looked_through(root: Path) -> None:
    for number in range(50):
        (root / str(number)).mkdir()
    document = training(root, data_config={"sources": [{"path": f"{root}/{'*/../' * 12}nothing"}]})
    assert decided(document, root=root).status == "QUEUED"


def test_links_in_a_circle_are_refused(root: Path) -> None:
    (root / "circle").symlink_to(root / "circle")
    document = training(root, data_config={"sources": [{"path": f"{root}/circle/rows.jsonl"}]})
    assert refusal(document, root=root)


def test_training_from_a_model_that_is_not_there_is_refused_by_its_field(root: Path) -> None:
    document = training(root, training_config={"base_model": {"model_id": str(root / "other")}})
    assert refusal(document, root=root).startswith("training_config.base_model.model_id: there is no")


@pytest.mark.parametrize("path", ["/etc/hostname", "link/hostname"])
def test_training_on_data_outside_the_data_roots_is_refused(root: Path, path: str) -> None:
    (root / "link").symlink_to("/etc")
    named = path if path.startswith("/") else str(root / path)
    said = refusal(training(root, data_config={"sources": [{"path": named}]}), root=root)
    assert "lies outside the directories that this server allows" in said
    assert "--data-root" in said


def test_results_outside_the_data_roots_are_refused(root: Path) -> None:
    said = refusal(training(root, output_config={"output_path": "/etc/model"}), root=root)
    assert said.startswith("output_config.output_path: /etc/model lies outside")
    assert decided(training(root, output_config={"output_path": f"{root}/new/model"}), root=root).status == "QUEUED"
    assert decided(training(root, output_config={"output_path": "s3://bucket/model"}), root=root).status == "QUEUED"


def test_training_without_its_packages_is_refused_with_how_to_install_them(root: Path) -> None:
    said = refusal(training(root), root=root, installed=lambda package: package != "trl")
    assert "has no trl" in said
    assert "pip install 'trainmaster[train]'" in said
    backends = {"elsewhere": ELSEWHERE}
    made = decided(training(root), root=root, backend="elsewhere", backends=backends, installed=lambda _: False)
    assert made.status == "QUEUED"


def test_paths_of_a_job_in_an_image_are_the_containers_on_any_backend(root: Path) -> None:
    document = {**COMMAND, "workload": {**COMMAND["workload"], "working_directory": "/elsewhere"}}
    without, images = {"elsewhere": ELSEWHERE}, {"elsewhere": replace(ELSEWHERE, images=True)}
    assert decided(document, root=root, backend="elsewhere", backends=without).status == "FAILED"
    assert decided(document, root=root, backend="elsewhere", backends=images).status == "QUEUED"
    assert decided(document, root=root, backend="container", backends=without).status == "QUEUED"  # no longer there


def test_job_without_an_image_is_told_of_the_setting_of_its_backend() -> None:
    request = compile_job(parse_submit(COMMAND))
    boxes = replace(ELSEWHERE, images=True)
    with pytest.raises(RefusedError, match=r"a runtime that has one\)$"):
        check_backend(request, "boxes", {"boxes": boxes})
    with pytest.raises(RefusedError, match="or have the operator set boxes_image"):
        check_backend(request, "boxes", {"boxes": replace(boxes, image_setting="boxes_image")})
    check_backend(request, "boxes", {"boxes": replace(boxes, own_image="image")})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("slurm", "node_anti_affinity", ["old"]),
        ("ray", "node_anti_affinity", ["old"]),
        ("ray", "node_affinity", ["fast"]),
        ("ray", "storage_min_mb", 100),
    ],
)
def test_what_an_engine_cannot_choose_nodes_by_is_refused(kind: str, field: str, value: Any) -> None:
    backends = {"pool": CLUSTER_KINDS[kind].capabilities, "local": capabilities_of("local")}
    wanted = compile_job(parse_submit({**COMMAND, "resource_config": {field: value}}))
    with pytest.raises(RefusedError, match="leave it out, or use one of: local") as refused:
        check_backend(wanted, "pool", backends)
    assert [problem.field for problem in refused.value.problems] == [f"resource_config.{field}"]
    check_backend(wanted, "local", backends)
    check_backend(compile_job(parse_submit(COMMAND)), "pool", backends)


@pytest.mark.parametrize(
    ("spec", "module", "extra"),
    [
        (
            {"type": "cache", "storage_uri": "cache://a/b", "metadata_loc": "/t/a.metadata.json", "num_data_nodes": 2},
            "pyiceberg",
            "cache",
        ),
        ({"type": "huggingface", "storage_uri": "hf://org/data"}, "huggingface_hub", "hub"),
        ({"type": "s3", "storage_uri": "s3://bucket/data"}, "obstore", "s3"),
    ],
)
def test_initializer_without_its_extra_is_refused_at_submission(spec: dict[str, Any], module: str, extra: str) -> None:
    workload = {**COMMAND["workload"], "initializers": {"dataset": spec}}
    request = parse_submit({**COMMAND, "workload": workload})
    lacking = Admission(backends=BACKENDS, installed=lambda package: package != module)
    with pytest.raises(RefusedError, match=re.escape(f"pip install 'trainmaster[{extra}]'")) as caught:
        lacking.compile(request, "a")
    assert caught.value.problems[0].field == "workload.initializers.dataset.type"
    lacking.compile(request.model_copy(update={"backend": "container"}), "a")
    Admission(backends=BACKENDS, installed=lambda _: True).compile(request, "a")


def test_training_without_its_packages_is_refused_at_submission(root: Path) -> None:
    request = parse_submit(training(root))
    with pytest.raises(RefusedError, match="has no trl, which the built-in trainers need"):
        Admission(backends=BACKENDS, installed=lambda package: package != "trl").compile(request, "a")
    Admission(backends=BACKENDS, installed=lambda _: True).compile(request, "a")


def test_hyperparameter_without_its_package_is_refused(root: Path) -> None:
    document = training(root, training_config={"hyperparameters": {"use_liger_kernel": True}})
    assert "needs the package liger-kernel" in refusal(document, root=root, installed=lambda p: p != "liger_kernel")


def test_custom_script_needs_no_packages_and_its_data_is_looked_at(root: Path) -> None:
    (root / "train.py").touch()
    framework = {"type": "CUSTOM", "custom_script_path": str(root / "train.py")}
    document = training(root, training_config={"framework": framework})
    assert decided(document, root=root, installed=lambda _: False).status == "QUEUED"
    document = {**document, "data_config": {"sources": [{"path": f"{root}/nothing"}]}}
    assert "there is no" in refusal(document, root=root)


@pytest.mark.parametrize("service", ["scaidrive", "scaiatlas"])
def test_service_that_the_server_does_not_know_is_refused_with_the_setting(root: Path, service: str) -> None:
    document = training(root, data_config={"sources": [{"path": f"{service}://rows.jsonl"}]})
    assert f"{service}_url" in refusal(document, root=root)
    assert decided(document, root=root, services=[service]).status == "QUEUED"


@pytest.mark.parametrize(
    "changes",
    [
        {"training_config": {"base_model": {"model_id": "m", "source": "scaiatlas"}}},
        {"training_config": {"base_model": {"model_id": "a/b", "tokenizer_id": "scaiatlas://t"}}},
        {"data_config": {"sources": [{"path": "/etc"}], "preprocess": {"tokenizer_id": "scaiatlas://t"}}},
        {"data_config": {"sources": [{"path": "rows.jsonl", "type": "ScaiAtlas"}]}},
    ],
)
def test_service_that_the_server_does_not_know_is_refused_wherever_it_is_named(
    root: Path, changes: dict[str, Any]
) -> None:
    assert "scaiatlas_url" in refusal(training(root, **changes), root=Path("/"))


def test_shipped_files_are_not_looked_for_on_the_server(root: Path) -> None:
    workload = {"kind": "trainer", "files": [{"path": "rows.jsonl", "sha256": "0" * 64}]}
    document = training(root, data_config={"sources": [{"path": "rows.jsonl"}]}, workload=workload)
    assert decided(document, root=root).status == "QUEUED"


def test_package_is_found_without_being_imported() -> None:
    assert importable("xml")
    assert not importable("there_is_no_such_package")
    before = set(sys.modules)
    importable("torch")
    assert "torch" in before or "torch" not in sys.modules


def test_job_that_saves_with_the_servers_keys_of_the_object_store_has_no_others() -> None:
    capable = replace(CLUSTER_KINDS["slurm"].capabilities, files=FilesBy.OBJECT_ROOT)
    archive = Archive(ObjectPlace(store=None, bucket="b", key=""))  # type: ignore[arg-type]

    def compile_with(archive: Archive | None, environment: dict[str, str]) -> None:
        workload = {**COMMAND["workload"], "environment": environment}
        request = parse_submit({**COMMAND, "workload": workload})
        Admission(backends={"hpc": capable}, default_backend="hpc", archive=archive).compile(request, "a")

    compile_with(archive, {"A": "b"})
    with pytest.raises(RefusedError, match=r"AWS_ACCESS_KEY_ID: .*can have no others"):
        compile_with(archive, {"AWS_ACCESS_KEY_ID": "mine"})
    with pytest.raises(RefusedError, match="the server has none"):
        compile_with(None, {})
