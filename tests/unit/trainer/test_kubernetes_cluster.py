"""The cluster of a kubeconfig, and how a server learns of it: once, and never with more than it needs."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client as official

from trainmaster import client as api
from trainmaster.trainer.kubernetes_cluster import WantedCluster, cluster_of_configuration, declare, find_cluster


def kubeconfig(path: Path, *contexts: str, current: str = "", **user: Any) -> Path:
    """A file with a cluster for each context, and one user."""
    document = {
        "current-context": current,
        "clusters": [
            {"name": each, "cluster": {"server": f"https://{each}", "certificate-authority": "ca.pem"}}
            for each in contexts
        ],
        "users": [{"name": "me", "user": user or {"token": "sesame"}}],
        "contexts": [
            {"name": each, "context": {"cluster": each, "user": "me", "namespace": f"of-{each}"}} for each in contexts
        ],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(document))
    (path.parent / "ca.pem").write_text("CA")
    return path


def found(home: Path, variable: str = "", *, in_cluster: bool = False, **asked: Any) -> WantedCluster:
    environment = {"KUBECONFIG": variable} if variable else {}
    cluster = find_cluster(environment=environment, home=home, in_cluster=in_cluster, **asked)
    assert cluster is not None
    return cluster


def sent(cluster: WantedCluster) -> Any:
    """The kubeconfig that a server elsewhere gets."""
    return json.loads(cluster.options(here=False)["kubeconfig_content"])


def test_context_and_namespace_are_those_that_were_asked_for(tmp_path: Path) -> None:
    file = kubeconfig(tmp_path / "config", "a", "b", current="a")
    first = found(tmp_path, config_file=str(file))
    assert first.options(here=True) == {"namespace": "of-a", "kubeconfig": str(file), "context": "a"}
    second = found(tmp_path, config_file=str(file), context="b", namespace="mine")
    assert second.options(here=True) == {"namespace": "mine", "kubeconfig": str(file), "context": "b"}
    names = {each.name for each in (first, second, found(tmp_path, config_file=str(file), namespace="mine"))}
    assert len(names) == 3
    assert all(len(name) <= 32 for name in names)
    assert found(tmp_path, str(file)).name == first.name
    with pytest.raises(ValueError, match="no context 'c'; there are: a, b"):
        found(tmp_path, config_file=str(file), context="c")
    with pytest.raises(ValueError, match="no current-context"):
        found(tmp_path, config_file=str(kubeconfig(tmp_path / "none", "a")))


def test_server_elsewhere_gets_the_credentials_of_one_context_alone(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    cluster = found(
        tmp_path, config_file=str(kubeconfig(tmp_path / "config", "a", "b", current="a", tokenFile="token"))
    )
    document = sent(cluster)
    assert [each["cluster"]["server"] for each in document["clusters"]] == ["https://a"]
    authority = document["clusters"][0]["cluster"]["certificate-authority-data"]
    assert base64.b64decode(authority) == b"CA"
    assert document["users"] == [{"name": "a", "user": {"token": "sesame"}}]
    program = kubeconfig(tmp_path / "exec", "a", current="a", exec={"command": "aws"})
    with pytest.raises(ValueError, match=r"come from a program \(exec\)"):
        found(tmp_path, config_file=str(program)).options(here=False)
    assert found(tmp_path, config_file=str(program)).options(here=True)["kubeconfig"] == str(program)


def test_several_files_are_one_kubeconfig(tmp_path: Path) -> None:
    own = kubeconfig(tmp_path / "one" / "config", "a", current="a")
    other = kubeconfig(tmp_path / "two" / "config", "b", current="b")
    assert found(tmp_path, f"{own}:{other}").context == "a"
    chosen = found(tmp_path, f"{own}:{other}", context="b")
    # The user of that name in the first file counts.
    assert chosen.file is None
    assert sent(chosen) == json.loads(chosen.options(here=True)["kubeconfig_content"])


def test_pod_uses_its_own_cluster_and_cannot_pass_it_on(tmp_path: Path) -> None:
    own = found(tmp_path, in_cluster=True, namespace="team")
    assert own.options(here=True) == {"namespace": "team"}
    with pytest.raises(ValueError, match="service account of this pod"):
        own.options(here=False)
    file = kubeconfig(tmp_path / "config", "a", current="a")
    assert found(tmp_path, in_cluster=True, config_file=str(file)).context == "a"


def test_configuration_of_the_official_client_becomes_a_kubeconfig(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(name)
    given = official.Configuration(host="https://a:6443/")
    given.ssl_ca_cert, given.cert_file, given.key_file = (str(tmp_path / name) for name in ("ca", "cert", "key"))
    given.api_key = {"authorization": "Bearer sesame"}
    cluster = cluster_of_configuration(given, None)
    (entry,), (user,) = sent(cluster)["clusters"], sent(cluster)["users"]
    assert entry["cluster"] == {"server": "https://a:6443", "certificate-authority-data": "Y2E="}
    assert user["user"] == {"token": "sesame", "client-certificate-data": "Y2VydA==", "client-key-data": "a2V5"}
    assert cluster.options(here=False)["namespace"] == "default"


class Clusters:
    """What a server answers about its backends."""

    def __init__(self, *known: dict[str, Any], problem: str | None = None, is_admin: bool = True) -> None:
        self.known = {each["name"]: each for each in known}
        self.problem = problem
        self.is_admin = is_admin
        self.puts: list[tuple[str, Mapping[str, Any]]] = []

    def backends(self) -> list[dict[str, Any]]:
        return list(self.known.values())

    def backend(self, name: str) -> dict[str, Any]:
        return {**self.known[name], "engine": {"problem": self.problem}}

    def put_backend(self, name: str, *, kind: str, options: Mapping[str, Any]) -> None:
        if not self.is_admin:
            raise api.ForbiddenError(403, "FORBIDDEN", "no")
        self.puts.append((name, options))
        self.known[name] = backend(name, kind=kind, **options)

    def remove_backend(self, name: str) -> None:
        del self.known[name]


class Server:
    def __init__(self, cluster: Clusters, url: str) -> None:
        self.cluster = cluster
        self.url = url


def backend(name: str, *, kind: str = "kubernetes", **options: Any) -> dict[str, Any]:
    shown = {name: "***" if name == "kubeconfig_content" else value for name, value in options.items()}
    return {"name": name, "kind": kind, "options": shown}


def declared(cluster: WantedCluster, clusters: Clusters, *, here: bool = False, url: str = "http://127.0.0.1:1") -> str:
    return declare(Server(clusters, url), cluster, here=here)  # type: ignore[arg-type]


@pytest.fixture
def wanted(tmp_path: Path) -> WantedCluster:
    return found(tmp_path, config_file=str(kubeconfig(tmp_path / "config", "a", current="a")))


def test_cluster_is_declared_once(wanted: WantedCluster) -> None:
    clusters = Clusters(backend("hpc", kind="slurm"))
    assert [declared(wanted, clusters) for _ in range(2)] == [wanted.name, wanted.name]
    assert [name for name, _ in clusters.puts] == [wanted.name]


def test_cluster_that_does_not_answer_is_not_left_with_the_server(wanted: WantedCluster) -> None:
    clusters = Clusters(problem="https://a: ConnectError")
    with pytest.raises(RuntimeError, match=r"context 'a' of .*: https://a: ConnectError"):
        declared(wanted, clusters)
    assert not clusters.known


def test_cluster_that_an_operator_declared_is_used(wanted: WantedCluster) -> None:
    same = {"kubeconfig": str(wanted.file), "context": "", "namespace": "of-a"}
    assert declared(wanted, Clusters(backend("k8s", **same)), here=True) == "k8s"
    assert declared(wanted, Clusters(backend("k8s", **same)), here=False) == wanted.name
    for other in ({"namespace": "b"}, {"context": "b"}, {"kubeconfig": "/other"}, {"token": "***"}):
        assert declared(wanted, Clusters(backend("k8s", **{**same, **other})), here=True) == wanted.name


def test_new_credentials_take_the_place_of_old_ones_and_nothing_else_does(wanted: WantedCluster) -> None:
    before = backend(wanted.name, kubeconfig_content="old", namespace="of-a", image="python:3.12", token=None)
    clusters = Clusters(before, problem="the API server does not accept our credentials")
    with pytest.raises(RuntimeError, match="does not accept our credentials"):
        declared(wanted, clusters)
    ((_, options),) = clusters.puts
    assert options == {**wanted.options(here=False), "image": "python:3.12"}


def test_who_may_not_declare_clusters_is_told_what_to_do(wanted: WantedCluster) -> None:
    with pytest.raises(ValueError, match=r"operator add it.*ServerBackendConfig\(url=\.\.\., backend=NAME\)"):
        declared(wanted, Clusters(is_admin=False))


def test_credentials_go_where_nobody_else_reads_them(wanted: WantedCluster) -> None:
    assert "sesame" not in repr(wanted)
    assert declared(wanted, Clusters(), url="https://server.test") == wanted.name
    assert declared(wanted, Clusters(), url="http://localhost:7070") == wanted.name
    for url in ("http://server.test", "http://10.0.0.1:7070"):
        with pytest.raises(ValueError, match="not sent to http://"):
            declared(wanted, Clusters(), url=url)
    # Where the server knows the cluster, nothing is sent.
    assert declared(wanted, Clusters(backend(wanted.name)), url="http://server.test") == wanted.name
