"""Which server and which backend a client uses, and which files a directory sends along."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainmaster.client.types import Engine
from trainmaster.trainer import (
    ContainerBackendConfig,
    KubernetesBackendConfig,
    LocalProcessBackendConfig,
    ServerBackendConfig,
    TrainingRuntimeSource,
)
from trainmaster.trainer.functions import files_of
from trainmaster.trainer.server_choice import ChosenBackend, Surroundings, check_engine, choose

KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: team-a
clusters: [{name: c, cluster: {server: "https://10.0.0.1:6443"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: team-a, context: {cluster: c, user: u, namespace: a}}]
"""


def around(home: Path, **changes: Any) -> Surroundings:
    fields: dict[str, Any] = {"environment": {}, "home": home, "in_cluster": False, **changes}
    return Surroundings(**fields)


def test_configuration_that_is_given_is_what_is_used(tmp_path: Path) -> None:
    local = choose(LocalProcessBackendConfig(), around(tmp_path))
    assert (local.name, local.workload) == ("local", {"remove_working_directory": True})
    assert choose(LocalProcessBackendConfig(cleanup_venv=False), around(tmp_path)).workload == {}
    server = ServerBackendConfig(url="http://127.0.0.1:1")
    chosen = choose(server, around(tmp_path, in_cluster=True))
    assert (chosen.name, chosen.server) == (None, server)
    assert choose("http://127.0.0.1:1", around(tmp_path, in_cluster=True)).server == server
    assert choose(ServerBackendConfig(url="http://127.0.0.1:1", backend="hpc"), around(tmp_path)).name == "hpc"
    containers = choose(
        ContainerBackendConfig(
            pull_policy="never",  # type: ignore[arg-type]
            auto_remove=False,
            container_runtime="podman",
            container_host="unix:///run/podman/podman.sock",
            runtime_source=TrainingRuntimeSource(sources=["/srv/runtimes"]),
        ),
        around(tmp_path),
    )
    assert (containers.name, containers.runtime_sources) == ("container", ("/srv/runtimes",))
    assert containers.engine == {
        "container_host": "unix:///run/podman/podman.sock",
        "container_runtime": "podman",
    }
    assert choose(ContainerBackendConfig(), around(tmp_path)).engine == {}
    assert containers.workload == {"container": {"pull_policy": "Never", "auto_remove": False, "runtime": "podman"}}


def test_images_and_time_of_initializers_are_those_of_the_configuration(tmp_path: Path) -> None:
    plain = choose(ContainerBackendConfig(), around(tmp_path))
    assert plain.initializers == {"dataset": {"timeout_s": 600}, "model": {"timeout_s": 600}}
    config = ContainerBackendConfig(dataset_initializer_image="fetch:1", initializer_timeout=5)
    assert choose(config, around(tmp_path)).initializers == {
        "dataset": {"image": "fetch:1", "timeout_s": 5},
        "model": {"timeout_s": 5},
    }
    of_models = ContainerBackendConfig(model_initializer_image="fetch:2")
    assert choose(of_models, around(tmp_path)).initializers["model"] == {"image": "fetch:2", "timeout_s": 600}
    assert choose(LocalProcessBackendConfig(), around(tmp_path)).initializers == {}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (KubernetesBackendConfig(namespace="a"), "no kubeconfig with a current context"),
        (KubernetesBackendConfig(config_file="/absent"), "/absent cannot be read"),
        ("local", "not the URL of a server"),
        ({}, "not a dict"),
    ],
)
def test_configuration_that_cannot_be_used_is_refused(config: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        choose(config, around(tmp_path))


def test_engine_of_a_server_is_the_one_that_was_asked_for_or_refused(tmp_path: Path) -> None:
    socket, link = tmp_path / "podman.sock", tmp_path / "link.sock"
    link.symlink_to(socket)
    uses: Engine = {"name": "podman", "host": f"unix://{socket}", "problem": None}
    check_engine({}, None, {})
    for asked in ({}, {"container_runtime": "podman"}, {"container_host": f"unix://{link}"}):
        check_engine(asked, uses, {})
    check_engine({"container_host": str(socket)}, uses, {})
    with pytest.raises(ValueError, match=rf"container_host is unix:///other.sock.*podman at unix://{socket}"):
        check_engine({"container_host": "unix:///other.sock"}, uses, {})
    with pytest.raises(ValueError, match=r"container_runtime is docker.*podman at"):
        check_engine({"container_runtime": "docker"}, uses, {})
    away: Engine = {"name": None, "host": None, "problem": "no container engine answers; tried unix:///a.sock"}
    with pytest.raises(RuntimeError, match=r"tried unix:///a\.sock$"):
        check_engine({"container_host": "unix:///a.sock"}, away, {})
    for asked, environment in (({"container_host": "b.sock"}, {}), ({}, {"DOCKER_HOST": "b.sock"})):
        with pytest.raises(RuntimeError, match=r"a\.sock\. It did not try (container_host|DOCKER_HOST) b\.sock"):
            check_engine(asked, away, environment)


def test_without_a_configuration_the_configured_server_comes_first(tmp_path: Path) -> None:
    chosen = choose(None, around(tmp_path, environment={"TRAINMASTER_URL": "http://127.0.0.1:1"}, in_cluster=True))
    assert (chosen.name, chosen.server) == (None, None)
    assert "TRAINMASTER_URL" in str(ChosenBackend(url="http://127.0.0.1:1", name=chosen.name, why=chosen.why))
    assert chosen.workload == {}


def test_without_a_cluster_jobs_run_on_this_machine(tmp_path: Path) -> None:
    chosen = choose(None, around(tmp_path))
    assert "no Kubernetes cluster" in chosen.why
    assert chosen.workload == choose(LocalProcessBackendConfig(), around(tmp_path)).workload
    backend = ChosenBackend(url="http://127.0.0.1:1", name=chosen.name, why=chosen.why, this_machine=True)
    assert "of this machine, http://127.0.0.1:1 (as" in repr(backend)
    (tmp_path / ".kube").mkdir()
    for useless in ("", "current-context: ''", "a: [", "\0"):
        (tmp_path / ".kube" / "config").write_text(useless)
        assert "no Kubernetes cluster" in choose(None, around(tmp_path)).why


@pytest.mark.parametrize("where", ["home", "variable", "inside"])
def test_without_a_server_the_cluster_of_the_surroundings_is_used(where: str, tmp_path: Path) -> None:
    found = tmp_path / ".kube" / "config" if where == "home" else tmp_path / "named"
    found.parent.mkdir(exist_ok=True)
    found.write_text(KUBECONFIG)
    environment = {"KUBECONFIG": f"/absent:{found}"} if where == "variable" else {}
    chosen = choose(None, around(tmp_path, environment=environment, in_cluster=where == "inside"))
    assert chosen.cluster is not None
    says = "process runs in" if where == "inside" else f"context 'team-a' of {found}"
    assert says in chosen.why
    assert "LocalProcessBackendConfig" in chosen.remedy
    asked_for = choose(
        KubernetesBackendConfig(), around(tmp_path, environment=environment, in_cluster=where == "inside")
    )
    assert (asked_for.cluster, asked_for.remedy) == (chosen.cluster, "")
    server = {**environment, "TRAINMASTER_URL": "http://127.0.0.1:1"}
    assert choose(None, around(tmp_path, environment=server)).cluster is None
    assert choose(None, around(tmp_path, environment=environment, login="http://127.0.0.1:1")).cluster is None


def test_broken_kubeconfig_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("current-context: team-a\n")
    with pytest.raises(ValueError, match=r"no context 'team-a'; there are: none; .*LocalProcessBackendConfig"):
        choose(None, around(tmp_path, environment={"KUBECONFIG": str(tmp_path / "named")}))


def write(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


def test_files_of_a_work_tree_are_those_that_git_would_keep(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "lib/model.py", "new.py", "out/weights.bin", "secret.env", "deleted.py", "ü.py")
    (tmp_path / ".gitignore").write_text("out/\n*.env\n")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "train.py", "lib", "deleted.py", ".gitignore"], check=True)
    (tmp_path / "deleted.py").unlink()
    assert files_of(tmp_path) == [".gitignore", "lib/model.py", "new.py", "train.py", "ü.py"]
    assert files_of(tmp_path / "lib") == ["model.py"]


def test_files_of_any_directory_are_all_but_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no git
    write(tmp_path, "train.py", "lib/model.py", "lib/__pycache__/model.pyc", "env/pyvenv.cfg", "env/bin/python")
    assert files_of(tmp_path) == ["lib/model.py", "train.py"]


IGNORING = {
    ".gitignore": ".env\n*.log\n/data/\nraw/*\n!raw/kept.txt\n**/cache\n# a note\n!\n\\#odd\nüb*\n"
    "/deep/**\n!/deep/b\na/**/z\n[ab]?.t[!x]t\n*.q[\nspaced\\  \nend   \n",
    "lib/.gitignore": "!kept.log\n/only_here\n*\n!*/\n!*.py\n!.gitignore\n",
    "named/.gitignore": "*.bin\n",
}
"""What counts where: nested files, negation, what is anchored, and lines that say nothing."""
LYING_THERE = (
    *("train.py", ".env", "lib/.env", "a.log", "lib/kept.log", "lib/only_here", "lib/deep/only_here", "lib/deep/m.py"),
    *(
        "data/x",
        "lib/data/x.py",
        "raw/kept.txt",
        "raw/other.txt",
        "raw/in/kept.txt",
        "x/cache/y",
        "x/z",
        "#odd",
        "übel",
    ),
    *(
        "deep/b/c",
        "deep/d",
        "a/z",
        "a/b/c/z",
        "b/a/z",
        "a1.txt",
        "b2.txt",
        "a1.txxt",
        "c1.txt",
        "f.q[",
        "spaced ",
        "end",
    ),
    *("named/a.txt", "named/b.bin", "named/.env"),
)


@pytest.mark.parametrize("excluded", ["", "named/\nx/z\n"])
def test_ignore_files_mean_without_git_what_they_mean_with_it(
    excluded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *LYING_THERE)
    for name, text in IGNORING.items():
        (tmp_path / name).write_text(text)
    without_work_tree = files_of(tmp_path)
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    (tmp_path / ".git" / "info" / "exclude").write_text(excluded)
    places = [tmp_path, tmp_path / "lib", tmp_path / "named"]
    by_git = [files_of(each) for each in places]
    with monkeypatch.context() as patched:
        patched.setenv("PATH", "")
        assert [files_of(each) for each in places] == by_git
    assert "train.py" in by_git[0]
    assert not {".env", "lib/.env", "data/x", "named/.env"} & {*by_git[0], *without_work_tree}
    assert excluded or without_work_tree == by_git[0]
    # One that is ignored itself was named on purpose.
    assert by_git[2] == ([".env", ".gitignore", "a.txt"] if excluded else [".gitignore", "a.txt"])


def test_ignore_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (tmp_path / ".gitignore").symlink_to(".gitignore")
    with pytest.raises(ValueError, match="cannot read"):
        files_of(tmp_path)


def test_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing in"):
        files_of(tmp_path)
    with pytest.raises(ValueError, match="no directory"):
        files_of(tmp_path / "absent")
