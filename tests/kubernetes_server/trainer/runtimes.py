"""Runtimes like those that Kubeflow installs; every image of theirs is this machine."""

from __future__ import annotations

from typing import Any

from kubernetes_server.objects import Object
from kubernetes_server.trainer.definitions import TRAINER

ANCESTOR = f"{TRAINER}/trainjob-ancestor-step"
FRAMEWORK = f"{TRAINER}/framework"
_IMAGE = "pytorch/pytorch:2.7.1-cuda12.8-cudnn9-runtime"
_INITIALIZER_IMAGE = "ghcr.io/kubeflow/trainer/{}:latest"


def _job(name: str, ancestor: str, container: Object, **fields: Any) -> Object:
    return {
        "name": name,
        **fields,
        "template": {
            "metadata": {"labels": {ANCESTOR: ancestor}},
            "spec": {"template": {"spec": {"containers": [{"name": name, **container}]}}},
        },
    }


def _runtime(name: str, framework: str, policy: Object, *jobs: Object) -> Object:
    return {
        "metadata": {"name": name, "labels": {FRAMEWORK: framework}},
        "spec": {"mlPolicy": {"numNodes": 1, **policy}, "template": {"spec": {"replicatedJobs": list(jobs)}}},
    }


def _initializer(name: str, uri: str, **fields: Any) -> Object:
    image = _INITIALIZER_IMAGE.format(name)
    return _job(name, name, {"image": image, "env": [{"name": "STORAGE_URI", "value": uri}]}, **fields)


def cluster_runtimes() -> list[Object]:
    tune = _job(
        "node",
        "trainer",
        {
            "image": "ghcr.io/kubeflow/trainer/torchtune-trainer:latest",
            "command": ["tune", "run"],
            "resources": {"limits": {"nvidia.com/gpu": 2}},
        },
        dependsOn=[
            {"name": "dataset-initializer", "status": "Complete"},
            {"name": "model-initializer", "status": "Complete"},
        ],
    )
    return [
        _runtime(
            "torch-distributed",
            "torch",
            {"torch": {"numProcPerNode": "auto"}},
            _job("node", "trainer", {"image": _IMAGE}),
        ),
        _runtime(
            "jax-distributed", "jax", {"jax": {}}, _job("node", "trainer", {"image": "nvcr.io/nvidia/jax:latest"})
        ),
        _runtime(
            "torchtune-llama3.2-1b",
            "torchtune",
            {"torch": {"numProcPerNode": "auto"}},
            _initializer("dataset-initializer", "hf://tatsu-lab/alpaca"),
            _initializer("model-initializer", "hf://meta-llama/Llama-3.2-1B-Instruct"),
            tune,
        ),
    ]
