"""Runtime documents for tests, in the shape of Kubeflow's."""

from __future__ import annotations

from typing import Any

from trainmaster.plain_yaml import dump_yaml


def container(**fields: Any) -> dict[str, Any]:
    return {"name": "node", **fields}


def job(name: str = "node", step: str | None = None, containers: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": step} if step else {}
    pods = {"spec": {"template": {"spec": {"containers": [container()] if containers is None else containers}}}}
    return {"name": name, "template": {"metadata": {"labels": labels}, **pods}}


def runtime(
    name: str = "mine",
    *,
    kind: str = "TrainingRuntime",
    framework: str = "torch",
    policy: dict[str, Any] | None = None,
    annotations: dict[str, str] | None = None,
    jobs: list[dict[str, Any]] | None = None,
    **node: Any,
) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": kind,
        "metadata": {
            "name": name,
            "labels": {"trainer.kubeflow.org/framework": framework},
            "annotations": annotations or {},
        },
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}} if policy is None else policy,
            "template": {"spec": {"replicatedJobs": [job(containers=[container(**node)])] if jobs is None else jobs}},
        },
    }


def text_of(*documents: object) -> str:
    return "---\n".join(dump_yaml(document) for document in documents)
