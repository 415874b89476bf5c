"""Training runtimes for tests with Kubeflow Trainer."""

from __future__ import annotations

import pytest

from kubernetes_client import KubernetesClient
from kubernetes_launches import IMAGE

RUNTIME = "plain"


def make_runtime(api: KubernetesClient) -> None:
    """Make a runtime in the client's namespace that starts functions without a launcher; skips without Trainer."""
    if "trainer.kubeflow.org" not in {group["name"] for group in api.ask("GET", "/apis")["groups"]}:
        pytest.skip("Kubeflow Trainer is not installed on this cluster")
    container = {"name": "node", "image": IMAGE, "imagePullPolicy": "IfNotPresent"}
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 2, "containers": [container]}
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": step}, "spec": {"backoffLimit": 0, "template": {"spec": pod}}}
    jobs = [{"name": "node", "template": template}]
    spec = {"mlPolicy": {"numNodes": 1, "jax": {}}, "template": {"spec": {"replicatedJobs": jobs}}}
    head = {"name": RUNTIME, "labels": {"trainer.kubeflow.org/framework": "jax"}}
    api.create({"kind": "TrainingRuntime", "metadata": head, "spec": spec})
