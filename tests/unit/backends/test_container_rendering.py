"""The documents that the engine gets: limits, devices, mounts and names, without an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from container_around import AROUND

from trainmaster.backends.container.container_spec import (
    OF_CLAIMED,
    OF_STEPS,
    ImageFacts,
    container_document,
    libpod_from,
    network_document,
    network_name,
    outside_document,
    volume_name,
)
from trainmaster.backends.worker_package import packed_worker
from trainmaster.protocol.launch import BlobFile, ContainerRequest, Launch, LaunchStep, Lifetime, VolumeMount
from trainmaster.protocol.request import CONFINED_CACHES, AttemptRequest, ContainerOverrides, NodeAssignment

IMAGE = ImageFacts(
    id="sha256:1",
    environment={"PYTHONPATH": "/theirs"},
    entrypoint=("tool",),
    command=("serve",),
    working_directory="/app",
    python="/usr/bin/python3",
)


def request(*nodes: NodeAssignment, **launch: Any) -> AttemptRequest:
    return AttemptRequest(
        job_id="job-1",
        attempt=2,
        token="secret-token",
        rank_token="rank-token",
        launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("train",)),), **launch),
        nodes=nodes or (NodeAssignment(node_id="a"),),
        checkpoint_dir="/srv/artifacts/job-1/checkpoints",
        output_dir="/srv/artifacts/job-1/output",
        owner_file="/srv/runs/job-1/owner.json",
        blob_dir="/srv/blobs/default",
        cache_dir="/srv/cache/team",
    )


def within(document: dict[str, Any]) -> ContainerOverrides:
    arguments = document["Cmd"]
    return ContainerOverrides.from_json(json.loads(arguments[arguments.index("--within") + 1]))


def test_what_is_booked_becomes_limits_and_what_is_not_stays_free() -> None:
    booked = NodeAssignment(node_id="a", cpu_cores=3, memory_mb=512)
    host = container_document(request(booked), 0, IMAGE, AROUND)["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["MemorySwap"]) == (3_000_000_000, 512 << 20, 512 << 20)
    assert host["ShmSize"] == 512 << 20
    free = container_document(request(), 0, IMAGE, AROUND)["HostConfig"]
    assert not {"NanoCpus", "Memory", "MemorySwap", "DeviceRequests"} & free.keys()
    assert free["ShmSize"] == 2048 << 20
    wished = container_document(request(container=ContainerRequest(shm_mb=64)), 0, IMAGE, AROUND)["HostConfig"]
    assert wished["ShmSize"] == 64 << 20


def test_gpus_are_handed_on_by_their_cdi_names_and_counted_anew_inside() -> None:
    asked = request(NodeAssignment(node_id="a", gpus=("2", "MIG-5", "7")))
    document = container_document(asked, 0, IMAGE, AROUND)
    names = ["nvidia.com/gpu=2", "nvidia.com/gpu=MIG-5", "nvidia.com/gpu=7"]
    assert document["HostConfig"]["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": names}]
    assert within(document).amend(asked, 0).nodes[0].gpus == ("0", "MIG-5", "2")
    own = libpod_from("name", document)
    assert own["devices"] == [{"path": name} for name in names]
    assert {tuple(mount["options"]) for mount in own["mounts"]} == {("bind", "ro"), ("rbind", "rw")}
    pretended = container_document(asked, 0, IMAGE, replace(AROUND, passes_gpus=False))
    assert "DeviceRequests" not in pretended["HostConfig"]
    assert within(pretended).amend(asked, 0).nodes[0].gpus == ("2", "MIG-5", "7")


def test_a_gang_has_a_network_of_its_own_parted_from_others() -> None:
    two = request(NodeAssignment(node_id="a"), NodeAssignment(node_id="a"))
    document = container_document(two, 1, IMAGE, AROUND)
    assert network_name(two) == document["HostConfig"]["NetworkMode"] == "tm-job-1.2"
    assert document["NetworkingConfig"]["EndpointsConfig"]["tm-job-1.2"]["Aliases"] == ["node-1"]
    assert within(document).amend(two, 1).nodes[1].address == "node-1"
    assert network_document(two, AROUND)["Options"] == {"isolate": "true"}
    assert network_name(request()) is None
    assert network_name(replace(request(), confined=True)) == "tm-job-1.2"


def test_a_service_is_published_on_the_loopback_address_alone() -> None:
    asked = request(lifetime=Lifetime.SERVICE)
    document = container_document(asked, 0, IMAGE, replace(AROUND, port=4321))
    host = document["HostConfig"]
    assert host["NetworkMode"] == network_name(asked) == "tm-job-1.2"
    assert host["PortBindings"] == {"4321/tcp": [{"HostIp": "127.0.0.1", "HostPort": "4321"}]}
    assert document["Labels"]["trainmaster.port"] == "4321"
    own = within(document).amend(asked, 0).nodes[0]
    assert (own.address, own.port) == ("node-0", 4321)
    assert libpod_from("name", {**document, "HostConfig": {**host, "DeviceRequests": []}})["portmappings"] == [
        {"container_port": 4321, "host_ip": "127.0.0.1", "host_port": 4321}
    ]


def test_root_in_a_container_is_less_than_root() -> None:
    asked = request(NodeAssignment(node_id="a", gpus=("0",)))
    document = container_document(asked, 0, IMAGE, AROUND)
    host, own = document["HostConfig"], libpod_from("name", document)
    assert host["CapDrop"] == own["cap_drop"] == ["ALL"]
    assert not {"SYS_ADMIN", "MKNOD", "NET_RAW", "SYS_PTRACE"} & {*host["CapAdd"], *own["cap_add"]}
    assert "no-new-privileges" in host["SecurityOpt"]
    assert own["no_new_privileges"] is True


def test_accounts_share_no_volume_whatever_they_are_called() -> None:
    asked = request()
    names = {
        volume_name(VolumeMount(source=source, target="/x"), replace(asked, cache_dir=f"/srv/cache/{account}"))
        for account, source in (("a", "b-x"), ("a-b", "x"), ("a-b", "b-x"))
    }
    assert len(names) == 3


def test_volumes_of_an_account_keep_their_names_wherever_its_cache_lies() -> None:
    volume = VolumeMount(source="kept", target="/x")
    caches = ("/srv/cache/team", f"/srv/cache/{CONFINED_CACHES}/team")
    assert len({volume_name(volume, replace(request(), cache_dir=cache)) for cache in caches}) == 1


def test_a_container_sees_its_own_job_and_nothing_else_of_the_server() -> None:
    volumes = (VolumeMount(source="/data/x", target="/x", read_only=True), VolumeMount(source="kept", target="/kept"))
    shipped = (BlobFile(sha256="0" * 64, path="train.py"),)
    asked = replace(request(volumes=volumes, blobs=shipped), resume_from="/srv/artifacts/job-0/checkpoints/step-3")
    mounts = container_document(asked, 0, IMAGE, AROUND)["HostConfig"]["Mounts"]
    writable = {mount["Source"] for mount in mounts if not mount["ReadOnly"]}
    assert writable == {
        "/dev/shm/trainmaster-0/tm-job-1.2-0",
        "/srv/runs/job-1/2/claims",
        "/srv/runs/job-1/2/nodes/0",
        "/srv/runs/job-1/2/work",
        "/srv/artifacts/job-1/checkpoints",
        "/srv/artifacts/job-1/output",
        "/srv/cache/team",
        volume_name(volumes[1], asked),
    }
    # Mounts below one that is read alone would be writable.
    is_alone = {mount["Source"]: mount.get("BindOptions") for mount in mounts}
    assert {source for source, options in is_alone.items() if options == {"NonRecursive": True}} == {
        "/srv/workers/worker.pyz",
        "/srv/runs/job-1",
        "/srv/blobs/default",
        "/srv/artifacts/job-0/checkpoints",
        "/data/x",
    }


def test_who_works_for_a_worker_outside_writes_nowhere_where_that_writes() -> None:
    def writes(document: dict[str, Any]) -> set[str]:
        sources = {mount["Source"] for mount in document["HostConfig"]["Mounts"] if not mount["ReadOnly"]}
        return {source for source in sources if source.startswith("/srv/runs")}

    work = "/srv/runs/job-1/2/work"
    asked = request()
    assert writes(outside_document(asked, 0, IMAGE, AROUND)) == {work}
    step = container_document(asked, 0, IMAGE, AROUND, writes=OF_STEPS)
    assert writes(step) == {work, "/srv/runs/job-1/2/nodes/0/prepared"}
    # The claim names the worker outside, whom the server kills by it.
    assert writes(container_document(asked, 0, IMAGE, AROUND, writes=OF_CLAIMED)) == {work, "/srv/runs/job-1/2/nodes/0"}


def test_no_token_and_no_secret_is_in_the_document() -> None:
    document = container_document(request(secrets={"TOKEN": "secret:env.TOKEN"}), 0, IMAGE, AROUND)
    assert "token" not in json.dumps(document).lower()
    assert document["Env"] == ["PYTHONPATH=/theirs:/trainmaster/worker.pyz"]


def test_an_empty_last_step_runs_the_images_own_command() -> None:
    asked = request()
    own = replace(asked, launch=replace(asked.launch, steps=(LaunchStep(name="node", argv=()),)))
    document = container_document(own, 0, IMAGE, AROUND)
    launch = within(document).amend(own, 0).launch
    assert (launch.steps[0].argv, launch.working_directory) == (("tool", "serve"), "/app")
    with_words = replace(
        asked, launch=replace(asked.launch, steps=(LaunchStep(name="node", argv=(), args=("--fast",)),))
    )
    launch = within(document).amend(with_words, 0).launch
    assert (launch.steps[0].argv, launch.working_directory) == (("tool", "--fast"), "/app")
    launch = within(document).amend(asked, 0).launch
    assert (launch.steps[0].argv, launch.working_directory) == (("train",), None)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return packed_worker(tmp_path / "workers")


def test_the_worker_is_packed_once_and_readable_by_all(packed: Path, tmp_path: Path) -> None:
    made = packed.stat()
    assert packed_worker(tmp_path / "workers") == packed
    assert packed.stat().st_mtime_ns == made.st_mtime_ns
    assert made.st_mode & 0o777 == 0o644
    assert [path.name for path in packed.parent.iterdir()] == [packed.name]


def test_the_archive_of_another_version_goes_when_ours_is_made(tmp_path: Path) -> None:
    (tmp_path / "worker-0123.pyz").touch()
    made = packed_worker(tmp_path)
    assert list(tmp_path.iterdir()) == [made]


def test_the_packed_worker_starts_from_compiled_modules_that_name_no_directory_of_the_server(packed: Path) -> None:
    code = "import trainmaster.worker.remote as it; print(it.__cached__, it.run_remote.__code__.co_filename)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(packed)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    compiled, source = done.stdout.split()
    assert compiled == f"{packed}/trainmaster/worker/remote.pyc", done.stderr
    assert source == "trainmaster/worker/remote.py"


def test_the_packed_worker_runs_in_a_python_without_any_package(packed: Path) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", packed, "run", "--help"], capture_output=True, text=True)
    assert "--within" in done.stdout, done.stderr
