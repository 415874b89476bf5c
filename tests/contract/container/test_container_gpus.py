"""GPUs reach a container by their CDI names, on an engine whose docker API does not take them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from container_engine import Engine, python_image
from trainmaster.backends.container.engine import ContainerEngine as Client
from trainmaster.backends.container.engine import RefusedByEngineError

SPECS = (Path("/etc/cdi"), Path("/var/run/cdi"))


@pytest.fixture
def pretended_gpu() -> Iterator[None]:
    """A device `nvidia.com/gpu=0` that is /dev/null with a variable."""
    if any("nvidia.com/gpu" in path.read_text() for place in SPECS if place.is_dir() for path in place.iterdir()):
        pytest.skip("this machine has real GPUs in its CDI specifications")
    edits = {"env": ["GPU_SEEN=yes"], "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/null"}]}
    device = {"name": "0", "containerEdits": edits}
    path = SPECS[1] / "trainmaster-test.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [device]}))
    yield
    path.unlink()


def test_a_gpu_is_seen_in_its_container_with_all_else_that_was_asked_for(
    engine: Engine, pretended_gpu: None, tmp_path: Path
) -> None:
    client = Client(engine.host, "podman")
    (tmp_path / "file").write_text("mounted")
    script = (
        "import os, pathlib\n"
        "print(os.environ['GPU_SEEN'], pathlib.Path('/dev/nvidia0').is_char_device(), os.environ['A'])\n"
        "print(pathlib.Path('/x/file').read_text(), os.access('/x/file', os.W_OK), os.getcwd())\n"
        "print(os.statvfs('/dev/shm').f_blocks * os.statvfs('/dev/shm').f_frsize >> 20)"
    )
    document = {
        "Image": client.find_image(python_image(engine))["Id"],
        "Entrypoint": ["python3"],
        "Cmd": ["-c", script],
        "Env": ["A=b=c"],
        "User": "0:0",
        "WorkingDir": "/usr",
        "Labels": {"trainmaster.test": "gpu"},
        "HostConfig": {
            "NetworkMode": "bridge",
            "Mounts": [{"Type": "bind", "Source": str(tmp_path), "Target": "/x", "ReadOnly": True}],
            "SecurityOpt": [],
            "CapDrop": [],
            "CapAdd": [],
            "ShmSize": 32 << 20,
            "Memory": 256 << 20,
            "MemorySwap": 256 << 20,
            "NanoCpus": 500_000_000,
            "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]}],
        },
    }
    name = "tm-test-gpu"
    try:
        client.create(name, document)
        limits = json.loads(engine.podman("inspect", "--format", "{{json .HostConfig}}", name))
        client.start(name)
        assert client.wait(name, 60) == 0, client.output(name)
        assert client.output(name).splitlines() == ["yes True b=c", "mounted False /usr", "32"]
        assert (limits["Memory"], limits["CpuQuota"] / limits["CpuPeriod"]) == (256 << 20, 0.5)
        assert [each.name for each in client.containers("trainmaster.test=gpu")] == [name]
    finally:
        client.remove(name)
        client.close()


def test_a_gpu_that_the_engine_does_not_know_is_refused_with_the_remedy(engine: Engine) -> None:
    client = Client(engine.host, "podman")
    document = {
        "Image": client.find_image(python_image(engine))["Id"],
        "Entrypoint": ["python3"],
        "Cmd": ["--version"],
        "Env": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": {"trainmaster.test": "gpu"},
        "HostConfig": {
            "NetworkMode": "bridge",
            "Mounts": [],
            "SecurityOpt": [],
            "CapDrop": [],
            "CapAdd": [],
            "ShmSize": 1 << 20,
            "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=no-such-one"]}],
        },
    }
    name = "tm-test-no-gpu"
    try:
        client.create(name, document)
        with pytest.raises(RefusedByEngineError, match="nvidia-ctk cdi generate"):
            client.start(name)
    finally:
        client.remove(name)
        client.close()
