"""What the dashboard of a Ray cluster is sent for an attempt."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
import sys
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ray_launches import launch_of
from trainmaster.backends.ray import driver, render
from trainmaster.backends.ray.options import RayOptions, Spread
from trainmaster.backends.ray.render import (
    accelerators,
    bundle,
    document,
    driver_package,
    driver_submission,
    driver_version,
    labels,
    package,
    plan,
)
from trainmaster.protocol.request import EngineNeeds

GOLDEN = """\
{
  "package": "tm-k3f9-job-1-1.zip",
  "launch": {
    "attempt": "job-1.1",
    "nodes": 2,
    "strategy": "STRICT_SPREAD",
    "bundle": {
      "CPU": 4.0,
      "GPU": 2.0,
      "memory": 8589934592.0,
      "infiniband": 0.001
    },
    "labels": {
      "ray.io/availability-region": "north",
      "disk": "nvme"
    },
    "accelerators": [
      "A100-80G",
      "A100"
    ],
    "grace_s": 30.0,
    "lost_grace_s": 10,
    "node_variable": "TRAINMASTER_NODE",
    "command": [
      "sh",
      "-c",
      "exec true"
    ],
    "environment": {
      "TRAINMASTER_WORKER": "{\\"attempt_id\\": \\"job-1.1\\"}"
    },
    "secrets": {
      "TRAINMASTER_WORKER_TOKEN": "(hidden)"
    }
  }
}
"""


def options(**values: Any) -> RayOptions:
    return RayOptions(address="http://head:8265", **values)


def needs(**values: Any) -> EngineNeeds:
    return EngineNeeds(account="team", job_name="a", **values)


def test_document_shows_everything_but_secrets() -> None:
    launch = launch_of(
        job_id="job-1",
        node_count=2,
        gpus=2,
        gpu_type="A100-80GB",
        cpu_cores=4,
        memory_mb=8192,
        capabilities=("infiniband", "region=north", "disk=nvme"),
    )
    assert document(launch, options()) == GOLDEN


def test_entry_point_is_one_command_of_plain_words() -> None:
    line = driver_submission("trainmaster-k3f9-1", "k3f9", options(driver_python="/opt/my ray/python"))["entrypoint"]
    assert shlex.split(line) == [
        *("exec", "/opt/my ray/python", "-c", render.LOADER),
        *("gcs://trainmaster-k3f9-1.zip", "trainmaster-k3f9"),
    ]


def test_entry_point_without_a_python_finds_that_of_its_parent(tmp_path: Path) -> None:
    """By the library of Ray, as the memory of its parent shows it; the parent runs on any Python."""
    packages = tmp_path / "my venv" / "lib" / "python3.11" / "site-packages"
    (packages / "ray").mkdir(parents=True)
    (packages / "ray" / "_raylet.so").write_bytes(bytes(4096))
    (tmp_path / "my venv" / "bin").mkdir()
    found = tmp_path / "my venv" / "bin" / "python3"
    found.write_text('#!/bin/sh\necho "found $1 $3 $4"\n')
    found.chmod(0o755)
    parent = (
        "import mmap, os, subprocess, sys; file = os.open(sys.argv[1], os.O_RDONLY); "
        "held = mmap.mmap(file, 4096, prot=mmap.PROT_READ); subprocess.run(sys.argv[2], shell=True, check=True)"
    )
    line = driver_submission("trainmaster-k3f9-1", "k3f9", options())["entrypoint"]
    command = [sys.executable, "-c", parent, str(packages / "ray" / "_raylet.so"), line]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "found -c gcs://trainmaster-k3f9-1.zip trainmaster-k3f9\n"


def test_document_has_no_secret_and_the_package_has() -> None:
    launch = launch_of()
    assert "secret-token" not in document(launch, options())
    content = json.loads(zlib.decompress(package(launch, options())))
    assert content["secrets"] == {"TRAINMASTER_WORKER_TOKEN": "secret-token"}


def test_driver_differs_with_what_it_needs_to_know_and_looks_for_requests_of_its_instance_alone() -> None:
    given = json.loads(zlib.decompress(driver_package("k3f9", options())))
    assert {"actor", "driver", "keeper", "namespace", "document"} <= given.keys()
    assert given["mailbox"] == "gcs://tm-k3f9-"
    assert f"gcs://{render.package_name(launch_of().name, 'stop')}".startswith(given["mailbox"])
    others = [("other", options()), ("k3f9", options(namespace="n")), ("k3f9", options(driver_python="p"))]
    versions = {driver_version(*each) for each in [("k3f9", options()), *others]}
    assert len(versions) == 4
    assert given["version"] == driver_version("k3f9", options(token="another", work_dir="/elsewhere"))


def test_namespace_is_the_operators_or_of_the_instance() -> None:
    assert driver_submission("trainmaster-k3f9-1", "k3f9", options())["entrypoint"].endswith(" trainmaster-k3f9")
    assert driver_submission("trainmaster-k3f9-1", "k3f9", options(namespace="train"))["entrypoint"].endswith(" train")


@pytest.mark.parametrize("placement", list(Spread))
def test_placement_decides_how_several_nodes_are_distributed(placement: Spread) -> None:
    assert plan(launch_of(node_count=2), options(placement=placement))["strategy"] == placement
    assert plan(launch_of(), options(placement=placement))["strategy"] == "PACK"


def test_job_without_a_number_of_cores_takes_those_of_the_operator() -> None:
    assert bundle(needs(), options()) == {"CPU": 1}
    assert bundle(needs(), options(resources={"CPU": 0.5, "pool-a": 0.1})) == {"CPU": 0.5, "pool-a": 0.1}
    assert bundle(needs(cpu_cores=8), options(resources={"CPU": 0.5})) == {"CPU": 8}
    assert bundle(needs(gpus=1), options(resources={"CPU": 0})) == {"GPU": 1}


def test_resources_may_be_given_as_text() -> None:
    assert options(resources=" pool-a=0.01, CPU=2").resources == {"pool-a": 0.01, "CPU": 2}
    assert options(resources="").resources == {}
    for wrong in ("pool-a", "pool-a=much", "CPU=-1"):
        with pytest.raises(ValidationError, match="resources"):
            options(resources=wrong)


def test_capability_cannot_reduce_what_a_job_takes() -> None:
    assert bundle(needs(gpus=2, capabilities=("GPU", "CPU")), options()) == {"CPU": 1, "GPU": 2}


def test_capabilities_with_a_value_are_labels() -> None:
    assert labels(needs(capabilities=("region=eu", "disk=nvme", "infiniband"))) == {
        "ray.io/availability-region": "eu",
        "disk": "nvme",
    }


def test_job_without_gpus_gets_no_accelerator() -> None:
    assert accelerators(needs(gpu_type="H100")) == []
    assert accelerators(needs(gpus=1)) == []


def test_memory_that_no_gpu_has_is_asked_for_all_the_same() -> None:
    assert accelerators(needs(gpus=1, gpu_memory_min_mb=10**6)) == ["at-least-1000000-MB"]


@pytest.mark.parametrize("file", ["actor.py", "driver.py", "keeper.py"])
def test_programs_need_nothing_but_python_3_9_and_ray(file: str) -> None:
    tree = ast.parse(resources.files("trainmaster.backends.ray").joinpath(file).read_text(), feature_version=(3, 9))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names


def test_driver_and_server_mean_the_same_by_a_name() -> None:
    assert driver.words("NVIDIA_A100_80GB") == render.words("NVIDIA_A100_80GB")
