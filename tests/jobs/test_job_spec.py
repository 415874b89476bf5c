"""Who a job class is, and what it runs on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainmaster.jobs.spec import (
    Chip,
    Cluster,
    ClusterMachine,
    ExecutionSpec,
    HardwareRequest,
    HardwareResult,
    JobSpec,
    Topology,
)


def spec_at(root: Path, **fields: Any) -> ExecutionSpec:
    return ExecutionSpec.local(root, "run", **fields)


def test_identity_has_its_defaults() -> None:
    spec = JobSpec(name="run")
    assert (spec.id, spec.project, spec.group, spec.path) == (None, "general", "default", "general/default/run")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "latest", "best", "a\nb", "é", "x" * 129])
def test_name_that_cannot_be_part_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        JobSpec(name=name)


def test_places_default_below_the_root_and_are_made(tmp_path: Path) -> None:
    cluster = Cluster(root=str(tmp_path / "root"), results=str(tmp_path / "elsewhere"))
    assert cluster.checkpoints_dir == tmp_path / "root" / "checkpoints"
    assert cluster.log_dir == tmp_path / "root" / "work" / "logs"
    assert cluster.results_dir == tmp_path / "elsewhere"
    assert all(each.is_dir() for each in (cluster.checkpoints_dir, cluster.log_dir, cluster.results_dir))


def test_checkpoints_may_lie_on_an_object_store() -> None:
    cluster = Cluster(root="s3://bucket/prefix/")
    assert cluster.checkpoints_uri == "s3://bucket/prefix/checkpoints"
    with pytest.raises(ValueError, match="no local directory"):
        _ = cluster.work_dir


def test_local_spec_keeps_what_it_was_given(tmp_path: Path) -> None:
    spec = spec_at(tmp_path, project="p", group="g")
    assert (spec.path, spec.distributed, spec.node, spec.cluster.root) == ("p/g/run", False, 0, str(tmp_path))
    assert spec.topology is not None
    assert spec.topology.is_main


def test_local_spec_imports_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from trainmaster.jobs.spec import ExecutionSpec; "
        f"spec = ExecutionSpec.local({str(tmp_path)!r}, 'x'); "
        "assert spec.topology.chip.name == 'cpu' and spec.hardware.total_chips == 0; "
        "assert not {'torch', 'jax', 'numpy', 'pydantic', 'yaml'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saved_identity_replaces_who_it_is_and_not_what_it_runs_on(tmp_path: Path) -> None:
    old, new = spec_at(tmp_path / "old", project="p"), spec_at(tmp_path / "new")
    joined = new.with_identity({**old.to_json(), "id": "run-7", "job_class": "x"})
    assert (joined.path, joined.id) == ("p/default/run", "run-7")
    assert joined.hardware is new.hardware
    assert (new.project, new.id) == ("general", None)


def test_what_was_asked_for_and_what_was_given_are_apart(tmp_path: Path) -> None:
    request = HardwareRequest(chip="H100", min_chips=4, preferred_clusters=("a",))
    machine = ClusterMachine(name="n0", cluster=Cluster(root=str(tmp_path)), resources={"A100": 8})
    result = HardwareResult(hosts=(machine,), chip=Chip(name="A100"), total_chips=8, requested=request)
    assert result.requested == request
    with pytest.raises(ValueError, match="both preferred and forbidden"):
        HardwareRequest(preferred_clusters=("a",), forbidden_clusters=("a",))
    with pytest.raises(ValueError, match="negative"):
        HardwareRequest(min_chips=-1)
    with pytest.raises(ValueError, match="at least one host"):
        HardwareResult(hosts=())


def test_shards_have_to_divide_the_devices_of_a_process() -> None:
    topology = Topology(
        chip=Chip(name="cpu"), device_count=8, local_device_count=4, process_count=2, is_main=True, shard_into=2
    )
    assert (topology.replicas, topology.local_replicas) == (4, 2)
    with pytest.raises(ValueError, match="must divide"):
        Topology(
            chip=Chip(name="cpu"), device_count=8, local_device_count=4, process_count=2, is_main=True, shard_into=3
        )


def test_result_is_there_when_it_is_whole(tmp_path: Path) -> None:
    spec = spec_at(tmp_path)
    path = spec.result_path("plots/loss.txt")
    assert path == tmp_path / "results/general/default/run/plots/loss.txt"
    with spec.result("plots/loss.txt") as file:
        assert file is not None
        file.write("é")
        assert not path.exists()
    assert path.read_text(encoding="utf-8") == "é"
    with pytest.raises(ZeroDivisionError), spec.result("plots/loss.txt") as file:
        print(1 / 0, file=file)
    assert path.read_text(encoding="utf-8") == "é"
    assert [entry.name for entry in path.parent.iterdir()] == ["loss.txt"]


def test_result_may_be_bytes_or_appended(tmp_path: Path) -> None:
    spec = spec_at(tmp_path)
    with spec.result("a.bin", mode="wb", encoding=None) as file:
        assert file is not None
        file.write(b"1")
    with spec.result("a.bin", mode="ab") as file:
        assert file is not None
        file.write(b"2")
    assert spec.result_path("a.bin").read_bytes() == b"12"
    with pytest.raises(FileExistsError), spec.result("a.bin", mode="xb"):
        pass


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "a/../b", ".x"])
def test_result_outside_its_place_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="no path"):
        spec_at(tmp_path).result_path(name)
