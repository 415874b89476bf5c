"""What of the machine a job may have mounted, and what a worker outside of a container does not do for it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.backends import ContainerDefaults
from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.container_spec import ImageFacts
from trainmaster.backends.container.plans import Plans
from trainmaster.backends.container.preflight import checked
from trainmaster.protocol.documents import write_document
from trainmaster.protocol.launch import BlobFile, Launch, LaunchStep, Lifetime, VolumeMount
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.server.coordinator.assembly import private_places
from trainmaster.server.settings.settings import Settings

IMAGE = ImageFacts(
    id="sha256:1", environment={}, entrypoint=(), command=("serve",), working_directory="/", python="python3"
)
FETCHING = LaunchStep(name="dataset", argv=("-m", "fetch"), python=True)


def request(*, confined: bool = False, nodes: int = 1, **launch: Any) -> AttemptRequest:
    return AttemptRequest(
        job_id="job-1",
        attempt=1,
        token="t",
        rank_token="r",
        launch=Launch(**{"kind": "command", "steps": (LaunchStep(name="main", argv=("train",)),), **launch}),
        nodes=(NodeAssignment(node_id="a"),) * nodes,
        checkpoint_dir="/c",
        output_dir="/a/job-1/output",
        owner_file="/o",
        confined=confined,
    )


@pytest.fixture
def defaults(tmp_path: Path) -> ContainerDefaults:
    """A home with the server's state in it, and a data root that the operator has set."""
    for name in ("home/state", "home/mine", "data/shared"):
        (tmp_path / name).mkdir(parents=True)
    root = (tmp_path / "data",)
    return ContainerDefaults(
        data_roots=(tmp_path / "home", *root), set_data_roots=root, private=(tmp_path / "home/state",)
    )


def mounted(defaults: ContainerDefaults, source: Path, *, confined: bool = False, read_only: bool = False) -> str:
    volumes = (VolumeMount(source=str(source), target="/x", read_only=read_only),)
    asked = request(confined=confined, volumes=volumes)
    return checked(asked, "image", IMAGE, defaults, engine="podman").launch.volumes[0].source


def test_what_is_mounted_is_the_directory_that_was_looked_at(tmp_path: Path, defaults: ContainerDefaults) -> None:
    (tmp_path / "data/link").symlink_to(tmp_path / "data/shared")
    assert mounted(defaults, tmp_path / "data/link") == str(tmp_path / "data/shared")
    (tmp_path / "data/out").symlink_to("/etc")
    with pytest.raises(LaunchError, match="outside the server's data roots"):
        mounted(defaults, tmp_path / "data/out")
    for private in ("home", "home/state"):
        with pytest.raises(LaunchError, match="keeps its own state"):
            mounted(defaults, tmp_path / private, read_only=True)
    (tmp_path / "data/file").touch()
    (tmp_path / "data/loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "data/engine.sock"))
    for name in ("nowhere", "file", "engine.sock", "loop"):
        with pytest.raises(LaunchError, match="no such directory"):
            mounted(defaults, tmp_path / "data" / name, read_only=True)


def test_what_others_could_pass_for_the_server_with_is_mounted_by_nobody(tmp_path: Path) -> None:
    for name in ("state", "keys", "tls", "config", "data"):
        (tmp_path / name).mkdir()
    settings = Settings(
        data_dir=tmp_path / "state", database_url=f"sqlite:///{tmp_path}/keys/tm.db", tls_key=tmp_path / "tls/key.pem"
    )
    private = private_places(settings, tmp_path / "config/config.toml")
    defaults = ContainerDefaults(data_roots=(tmp_path,), set_data_roots=(tmp_path,), private=private)
    for name in ("", "state", "keys", "tls", "config"):
        with pytest.raises(LaunchError, match="keeps its own state"):
            mounted(defaults, tmp_path / name, read_only=True)
    assert mounted(defaults, tmp_path / "data") == str(tmp_path / "data")


def test_a_home_that_no_operator_has_named_can_only_be_read(tmp_path: Path, defaults: ContainerDefaults) -> None:
    with pytest.raises(LaunchError, match="read_only"):
        mounted(defaults, tmp_path / "home/mine")
    assert mounted(defaults, tmp_path / "home/mine", read_only=True) == str(tmp_path / "home/mine")


def test_an_account_that_stays_in_containers_writes_to_no_directory(
    tmp_path: Path, defaults: ContainerDefaults
) -> None:
    with pytest.raises(LaunchError, match="not for this account"):
        mounted(defaults, tmp_path / "home/mine", confined=True, read_only=True)
    with pytest.raises(LaunchError, match="can only be read by jobs of this account"):
        mounted(defaults, tmp_path / "data/shared", confined=True)
    assert mounted(defaults, tmp_path / "data/shared", confined=True, read_only=True) == str(tmp_path / "data/shared")


@pytest.mark.parametrize(("uid", "mode", "safe"), [(0, 0o755, True), (0, 0o777, False), (61001, 0o755, False)])
@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_an_account_that_stays_in_containers_mounts_nothing_that_users_could_exchange(
    tmp_path: Path, defaults: ContainerDefaults, uid: int, mode: int, safe: bool
) -> None:
    """The engine looks the path up again: a link to / in its place would show the whole machine."""
    above = tmp_path / "data/theirs"
    (above / "inner").mkdir(parents=True)
    os.chown(above, uid, uid)
    above.chmod(mode)
    assert mounted(defaults, above, confined=True, read_only=True) == str(above)
    if safe:
        assert mounted(defaults, above / "inner", confined=True, read_only=True) == str(above / "inner")
    else:
        with pytest.raises(LaunchError, match=f"mount {above} itself"):
            mounted(defaults, above / "inner", confined=True, read_only=True)
    assert mounted(defaults, above / "inner") == str(above / "inner")  # of an account that runs as the server does


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (request(steps=(LaunchStep(name="main", argv=("x.py",), python=True),)), "has no usable Python"),
        (request(lifetime=Lifetime.SERVICE, nodes=2), "one rank"),
        (request(working_directory="/app", blobs=(BlobFile(sha256="0" * 64, path="x"),)), "leave working_directory"),
        (request(confined=True, nodes=2, blobs=(BlobFile(sha256="0" * 64, path="x"),)), "several nodes"),
        (request(confined=True, steps=(FETCHING, LaunchStep(name="main", argv=("train",)))), "on the machine itself"),
    ],
)
def test_a_worker_on_the_machine_does_not_do_everything(asked: AttemptRequest, why: str) -> None:
    checked(asked, "image", IMAGE, ContainerDefaults(), engine="podman")
    with pytest.raises(LaunchError, match=why):
        checked(asked, "image", replace(IMAGE, python=None), ContainerDefaults(), engine="podman")


def test_an_account_that_stays_in_containers_has_initializers_with_images(tmp_path: Path) -> None:
    steps = (replace(FETCHING, image="fetcher"), LaunchStep(name="main", argv=("train",)))
    asked = request(confined=True, steps=steps)
    assert checked(asked, "image", replace(IMAGE, python=None), ContainerDefaults(), engine="podman") == asked


def test_plans_go_when_their_nodes_have_ended(tmp_path: Path) -> None:
    plans, asked = Plans(tmp_path / "plans"), request()
    running, ended, gone = (RunDirectory(tmp_path / name) for name in ("running", "ended", "gone"))
    for node, directory in enumerate((running, ended, gone)):
        (directory.path / f"nodes/{node}").mkdir(parents=True)
        plans.write(asked, node, {"containers": {}}, directory)
    write_document(ended.path / exit_document(1), {"reason": "SUCCEEDED"})
    (gone.path / "nodes/2").rmdir()
    (gone.path / "nodes").rmdir()
    gone.path.rmdir()
    plans.clear()
    assert [plans.read(asked, node) is not None for node in range(3)] == [True, False, False]
    plans.remove(asked, 0)
    assert plans.read(asked, 0) is None
