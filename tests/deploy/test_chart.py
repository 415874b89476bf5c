"""What the Helm chart renders: valid documents that fit together, and settings that the server accepts."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import trainmaster
from helm_chart import CHART, IMAGE, ChartError, Object, of_kind, only, permissions_of, render
from tls_files import self_signed
from trainmaster.backends import CLUSTER_KINDS
from trainmaster.backends.cluster.kinds import parse_options
from trainmaster.backends.kubernetes import access
from trainmaster.server.http.routes.monitoring import METRICS_PATH, health_router
from trainmaster.server.process import problems
from trainmaster.server.settings.resolution import Resolved, resolve

OLDEST = "1.28"
"""The version of Kubernetes that the chart asks for; what is stable there is stable in later ones."""
ROOT = CHART.parents[2]
CLUSTER_SCOPED = ("ClusterRole", "ClusterRoleBinding")
SECRET_KEY = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
VALUES: dict[str, Object] = {
    "default": {},
    "one replica": {"replicas": 1, "storage": {"accessMode": "ReadWriteOnce", "storageClass": "fast", "size": "1Ti"}},
    "tls": {"tls": {"secret": "server-tls", "ca": True}, "service": {"type": "LoadBalancer", "port": 443}},
    "ingress": {
        "ingress": {"enabled": True, "className": "nginx", "host": "train.example.com", "tlsSecret": "train-tls"},
        "networkPolicy": {"from": [{"namespaceSelector": {"matchLabels": {"name": "ingress-nginx"}}}]},
        "metrics": {"open": True},
    },
    "clusters": {
        "clusters": {
            "k8s": {"namespace": "jobs"},
            "other": {"kind": "kubernetes", "namespace": "more-jobs", "image": "python:3.12"},
            "far": {"kind": "kubernetes", "kubeconfig": "/etc/far/config", "namespace": "elsewhere"},
            "hpc": {"kind": "slurm", "partition": "gpu", "exclusive": True, "extra_args": ["--mail-type=END"]},
            "pool": {"kind": "ray", "address": "http://ray:8265", "resources": {"CPU": 2, "pool-a": 0.5}},
        },
        "settings": {
            "backends": ["pool", "k8s"],
            "lease_s": 7,
            "max_blob_bytes": 4294967296,
            "rate_limit_per_s": 0.5,
            "queues": {"research": {"weight": 2, "quota_gpus": 8}},
            "nodes": {"gpu.box-1": {"labels": ["rack-3"]}},
        },
        "extraVolumes": [{"name": "far", "secret": {"secretName": "far"}}],
        "extraVolumeMounts": [{"name": "far", "mountPath": "/etc/far"}],
    },
    "without a cluster of its own": {"clusters": {"k8s": None, "hpc": {"kind": "slurm"}}},
    "of others": {
        "serviceAccount": {"create": False, "name": "trainmaster-runner"},
        "rbac": {"create": False},
        "storage": {"existingClaim": "shared"},
        "networkPolicy": {"enabled": False},
        "database": {"secret": "postgres-app", "key": "uri"},
        "keys": {"secret": "trainmaster-keys"},
        "podLabels": {"team": "vision"},
        "podAnnotations": {"sidecar.example.com/inject": "false"},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "important",
        "extraEnv": [{"name": "TRAINMASTER_LOG_LEVEL", "value": "debug"}],
        "image": {"repository": "r/tm", "tag": "main", "pullSecrets": ["registry"]},
    },
}


@pytest.fixture(scope="module", params=VALUES)
def documents(request: pytest.FixtureRequest) -> list[Object]:
    return render(VALUES[request.param])


def test_documents_are_valid_for_kubernetes(documents: list[Object]) -> None:
    for document in documents:
        kubernetes_validate.validate(document, OLDEST, strict=True)


def test_documents_have_names_of_their_own_and_a_namespace(documents: list[Object]) -> None:
    named = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in documents]
    assert len(named) == len(set(named))
    assert {kind for kind, namespace, _ in named if namespace is None} <= set(CLUSTER_SCOPED)


def test_selectors_match_the_pods_of_the_server_and_no_others(documents: list[Object]) -> None:
    deployment = only(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    tests = [each["metadata"]["labels"] for each in of_kind(documents, "Pod")]
    selectors = [deployment["spec"]["selector"]["matchLabels"], only(documents, "Service")["spec"]["selector"]]
    selectors += [each["spec"]["selector"]["matchLabels"] for each in of_kind(documents, "PodDisruptionBudget")]
    selectors += [
        each["spec"]["podSelector"]["matchLabels"]
        for each in of_kind(documents, "NetworkPolicy")
        if not each["metadata"]["name"].endswith("-jobs")
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not any(selector.items() <= other.items() for other in tests)


def test_everything_that_pods_name_is_there(request: pytest.FixtureRequest, documents: list[Object]) -> None:
    """Secrets, and what the values name, come from the operator."""
    values = VALUES[request.node.callspec.params["documents"]]
    given = {("Secret", name) for name in secrets_of(values)}
    given |= {("PersistentVolumeClaim", values.get("storage", {}).get("existingClaim"))}
    given |= {("ServiceAccount", values.get("serviceAccount", {}).get("name"))}
    there = {(each["kind"], each["metadata"]["name"]) for each in documents} | given
    for spec in pod_specs(documents):
        assert set(references_of(spec)) <= there
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_roles_are_bound_to_the_account_of_the_server(documents: list[Object]) -> None:
    account = only(documents, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    for kind in ("Role", "ClusterRole"):
        roles = {(each["metadata"].get("namespace"), each["metadata"]["name"]) for each in of_kind(documents, kind)}
        bindings = of_kind(documents, f"{kind}Binding")
        assert roles == {(each["metadata"].get("namespace"), each["roleRef"]["name"]) for each in bindings}
        for binding in bindings:
            assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "team"}]


def test_ports_and_paths_of_probes_are_those_of_the_server(documents: list[Object]) -> None:
    pod = only(documents, "Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    config = tomllib.loads(only(documents, "ConfigMap")["data"]["config.toml"])
    assert port["containerPort"] == config["port"]
    served = {route.path for route in health_router.routes}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        wanted = container[probe]["httpGet"]
        assert wanted["path"] in served
        assert wanted["port"] == port["name"]
        assert wanted["scheme"] == ("HTTPS" if "tls_cert" in config else "HTTP")
    (service_port,) = only(documents, "Service")["spec"]["ports"]
    assert service_port["targetPort"] == port["name"]
    assert config["advertise_url"].endswith(f".team.svc:{service_port['port']}")
    for ingress in of_kind(documents, "Ingress"):
        (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
        assert path["backend"]["service"] == {"name": "tm-trainmaster", "port": {"name": service_port["name"]}}
    annotations = pod["metadata"]["annotations"]
    if config["open_metrics"]:
        assert annotations["prometheus.io/path"] == METRICS_PATH
        assert annotations["prometheus.io/port"] == str(config["port"])
    else:
        assert "prometheus.io/scrape" not in annotations


def test_settings_are_accepted_by_the_server(documents: list[Object], tmp_path: Path) -> None:
    resolved = resolved_of(documents, tmp_path)
    assert problems(resolved.settings, resolved.declared) == []
    assert resolved.settings.backends[0] in resolved.declared.clusters
    for cluster in resolved.declared.clusters.values():
        parse_options(cluster.kind, cluster.options)
    assert not resolved.settings.database_file
    # The volume that all replicas share has all that must outlive a pod.
    for root in (resolved.settings.runs, resolved.settings.artifacts, resolved.settings.blobs):
        assert root.is_relative_to("/srv/trainmaster")


def test_settings_of_the_values_reach_the_server(tmp_path: Path) -> None:
    resolved = resolved_of(render(VALUES["clusters"]), tmp_path)
    settings, declared = resolved.settings, resolved.declared
    assert settings.backends == ("pool", "k8s")
    assert (settings.lease_s, settings.max_blob_bytes, settings.rate_limit_per_s) == (7.0, 4 << 30, 0.5)
    assert (declared.queues["research"].weight, declared.queues["research"].quota_gpus) == (2.0, 8)
    assert declared.nodes["gpu.box-1"].labels == ("rack-3",)
    assert declared.clusters["pool"].options == {
        "address": "http://ray:8265",
        "resources": {"CPU": 2, "pool-a": 0.5},
    }
    assert declared.clusters["hpc"].options["extra_args"] == ["--mail-type=END"]


def test_a_cluster_that_the_server_runs_in_gets_a_namespace_and_an_image(tmp_path: Path) -> None:
    clusters = resolved_of(render(VALUES["clusters"]), tmp_path).declared.clusters
    server_image = f"{IMAGE['image']['repository']}:{trainmaster.__version__}"
    assert clusters["k8s"].options == {"namespace": "jobs", "image": server_image}
    assert clusters["other"].options == {"namespace": "more-jobs", "image": "python:3.12"}
    assert clusters["far"].options == {"kubeconfig": "/etc/far/config", "namespace": "elsewhere"}
    assert resolved_of(render(), tmp_path).declared.clusters["k8s"].options["namespace"] == "team"


def test_roles_are_in_the_namespaces_of_jobs_and_nowhere_else() -> None:
    documents = render(VALUES["clusters"])
    assert [each["metadata"]["namespace"] for each in of_kind(documents, "Role")] == ["jobs", "more-jobs"]
    for document in render(VALUES["without a cluster of its own"]):
        assert document["kind"] not in ("Role", "RoleBinding", *CLUSTER_SCOPED)
        if document["kind"] == "Deployment":
            assert document["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def rules_of(*rules: access.Rule) -> set[tuple[str, str, str]]:
    return {(each.group, each.resource, verb) for each in rules for verb in each.verbs}


def useful(*, in_cluster: bool, of_trainer: bool) -> set[tuple[str, str, str]]:
    found = (each for each in access.USEFUL if (each.in_cluster, each.of_trainer) == (in_cluster, of_trainer))
    return rules_of(*(each.rule for each in found))


def test_server_may_do_what_its_backend_does_and_nothing_more() -> None:
    """`access` is what the server itself checks when somebody looks at the cluster."""
    documents = render({"rbac": {"trainJobs": False}})
    granted = set(permissions_of(only(documents, "Role")))
    assert granted == rules_of(*access.NEEDED) | useful(in_cluster=False, of_trainer=False)
    (seen,) = of_kind(documents, "ClusterRole")
    assert set(permissions_of(seen)) == useful(in_cluster=True, of_trainer=False)


def test_server_may_make_train_jobs_unless_the_values_forbid_it() -> None:
    granted = set(permissions_of(only(render(), "Role")))
    more = granted - set(permissions_of(only(render({"rbac": {"trainJobs": False}}), "Role")))
    assert more == rules_of(*access.OF_TRAINER) | useful(in_cluster=False, of_trainer=True)
    (runtimes,) = of_kind(render({"rbac": {"nodes": False}}), "ClusterRole")
    assert set(permissions_of(runtimes)) == useful(in_cluster=True, of_trainer=True)


def test_manifests_and_the_guide_have_the_permissions_that_the_server_checks() -> None:
    manifests = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "trainmaster.yaml").read_text()))
    everything = rules_of(*access.NEEDED, *access.OF_TRAINER, *(each.rule for each in access.USEFUL))
    roles = [role for kind in ("Role", "ClusterRole") for role in of_kind(manifests, kind)]
    assert {each for role in roles for each in permissions_of(role)} == everything
    guide = (ROOT / "docs" / "guides" / "kubernetes.md").read_text().partition("## Permissions")[2]
    listed = set()
    for names, verbs in re.findall(r"^\| (`[^|]*`) \| ([a-z, ]+) \|", guide.partition("\n## ")[0], re.MULTILINE):
        for name in re.findall(r"`([^`]*)`", names):
            resource, _, group = name.partition(".")
            listed |= {(group, resource, verb) for verb in verbs.split(", ")}
    assert listed == everything


def test_nodes_and_runtimes_are_shown_to_the_server_only_if_the_values_allow_it() -> None:
    assert len(of_kind(render(), "ClusterRole")) == len(of_kind(render(), "ClusterRoleBinding")) == 2
    assert of_kind(render({"rbac": {"nodes": False, "trainJobs": False}}), "ClusterRole") == []


def test_pods_of_jobs_and_of_the_chart_test_may_connect_to_the_server() -> None:
    documents = render(VALUES["clusters"])
    policies = {
        (each["metadata"]["namespace"], each["metadata"]["name"]): each for each in of_kind(documents, "NetworkPolicy")
    }
    assert set(policies) == {
        ("team", "tm-trainmaster"),
        ("jobs", "tm-trainmaster-jobs"),
        ("more-jobs", "tm-trainmaster-jobs"),
    }
    (rule,) = policies["team", "tm-trainmaster"]["spec"]["ingress"]
    namespaces = [each["namespaceSelector"]["matchLabels"] for each in rule["from"] if "namespaceSelector" in each]
    assert [each["kubernetes.io/metadata.name"] for each in namespaces] == ["jobs", "more-jobs"]
    (test,) = of_kind(documents, "Pod")
    assert any(
        each.get("podSelector", {}).get("matchLabels", {}).items() == test["metadata"]["labels"].items()
        for each in rule["from"]
    )
    # Workers are known by the label that the server's own policy selects.
    selected = [policies[key]["spec"]["podSelector"] for key in policies if key[0] != "team"]
    assert all(each["podSelector"] in selected for each in rule["from"] if "namespaceSelector" in each)


def test_one_replica_needs_neither_a_shared_volume_nor_a_budget() -> None:
    documents = render(VALUES["one replica"])
    assert of_kind(documents, "PodDisruptionBudget") == []
    assert only(documents, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert only(documents, "PersistentVolumeClaim")["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "1Ti"}},
    }


def test_pods_run_without_privileges() -> None:
    for spec in pod_specs(render()):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_pods_are_replaced_when_settings_change() -> None:
    def annotations(values: Object) -> Any:
        return only(render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]

    assert annotations({}) == annotations({})
    assert annotations({}) != annotations({"settings": {"lease_s": 9}})
    assert annotations({}) != annotations({"clusters": {"k8s": {"image": "python:3.12"}}})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": {"repository": ""}}, "image.repository: build deploy/Dockerfile"),
        ({"replicas": 0}, "replicas: Must be greater than or equal to 1"),
        ({"storage": {"accessMode": "ReadWriteOnce"}}, "storage.accessMode: ReadWriteOnce is for one pod"),
        ({"storage": {"size": "much"}}, "storage.size: Does not match pattern"),
        ({"tls": {"ca": True}}, "tls.ca: needs tls.secret"),
        ({"ingress": {"enabled": True}}, "ingress.host: String length must be greater"),
        ({"clusters": {"k8s": None}}, "clusters: Must have at least 1 properties"),
        ({"clusters": {"K8s": {"kind": "kubernetes"}}}, "clusters: Does not match pattern"),
        ({"clusters": {"hpc": {"kind": "pbs"}}}, "clusters.hpc.kind must be one of"),
        ({"clusters": {"hpc": {"partition": "gpu"}}}, "clusters.hpc: kind is required"),
        ({"replica": 3}, "Additional property replica is not allowed"),
        ({"settings": {"leases_s": 3}}, "settings: Additional property leases_s is not allowed"),
        ({"settings": {"lease_s": "3"}}, "settings.lease_s: Invalid type. Expected: number"),
        ({"settings": {"log_level": "loud"}}, "settings.log_level must be one of"),
        ({"settings": {"queues": {"a": {"gpus": 3}}}}, "settings.queues.a: Additional property gpus"),
        ({"settings": {"port": 80}}, "settings.port: the chart sets this itself; use service.port"),
        ({"settings": {"database_url": "x"}}, "settings.database_url: the chart sets this itself; use database.secret"),
    ],
)
def test_wrong_values_are_refused_with_their_place(values: Object, message: str) -> None:
    with pytest.raises(ChartError, match="Error: ") as caught:
        render(values)
    assert message in str(caught.value)


def test_every_value_is_in_the_schema() -> None:
    """A value without a schema would be accepted whatever it is."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}


def test_image_has_the_libraries_of_every_kind_of_cluster_and_of_the_database() -> None:
    (extras,) = re.findall(r'pip install .*"/src\[(.*)\]"', (ROOT / "deploy" / "Dockerfile").read_text())
    needed = {kind.extra for kind in CLUSTER_KINDS.values() if kind.library} | {"postgres"}
    assert needed <= set(extras.split(","))


def test_pages_that_files_of_deploy_name_are_there() -> None:
    named = {
        page
        for file in (ROOT / "deploy").rglob("*")
        if file.is_file()
        for page in re.findall(r"docs/[\w/-]+\.md", file.read_text())
    }
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (trainmaster.__version__, trainmaster.__version__)
    assert chart["kubeVersion"] == f">={OLDEST}.0-0"


def pod_specs(documents: list[Object]) -> list[Object]:
    return [
        only(documents, "Deployment")["spec"]["template"]["spec"],
        *(each["spec"] for each in of_kind(documents, "Pod")),
    ]


def secrets_of(values: Object) -> Iterator[str]:
    yield values.get("database", {}).get("secret", "trainmaster")
    yield values.get("keys", {}).get("secret", "trainmaster")
    yield values.get("tls", {}).get("secret", "")
    yield from values.get("image", {}).get("pullSecrets", ())
    yield from (each["secret"]["secretName"] for each in values.get("extraVolumes", ()))


def references_of(spec: Object) -> Iterator[tuple[str, str]]:
    """Kinds and names of all that a pod needs."""
    if "serviceAccountName" in spec:
        yield "ServiceAccount", spec["serviceAccountName"]
    yield from (("Secret", each["name"]) for each in spec.get("imagePullSecrets", ()))
    for volume in spec["volumes"]:
        match volume:
            case {"secret": {"secretName": name}}:
                yield "Secret", name
            case {"configMap": {"name": name}}:
                yield "ConfigMap", name
            case {"persistentVolumeClaim": {"claimName": name}}:
                yield "PersistentVolumeClaim", name
            case _:
                assert "emptyDir" in volume
    for container in spec["containers"]:
        for variable in container["env"]:
            if "valueFrom" in variable:
                yield "Secret", variable["valueFrom"]["secretKeyRef"]["name"]


def resolved_of(documents: list[Object], directory: Path) -> Resolved:
    """The settings of a server whose pod has the rendered file and variables, with real certificates."""
    files = self_signed(directory)
    text = only(documents, "ConfigMap")["data"]["config.toml"]
    for mounted, file in (("tls.crt", files.cert), ("tls.key", files.key), ("ca.crt", files.cert)):
        text = text.replace(f"/etc/trainmaster/tls/{mounted}", str(file))
    (directory / "config.toml").write_text(text)
    (container,) = only(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    secrets = {"TRAINMASTER_DATABASE_URL": "postgresql://tm@db/tm", "TRAINMASTER_SECRET_KEY": SECRET_KEY}
    environment = {each["name"]: each.get("value", secrets.get(each["name"], "")) for each in container["env"]}
    assert secrets.keys() <= environment.keys()
    return resolve(config=directory / "config.toml", environment=environment)
