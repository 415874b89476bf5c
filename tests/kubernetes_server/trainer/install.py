"""Puts Trainer and JobSet on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubernetes_server.controllers.loop import Controller
from kubernetes_server.resources import CONFIG_MAPS, DEFINITIONS, NAMESPACES
from kubernetes_server.trainer.definitions import CLUSTER_RUNTIMES, definitions
from kubernetes_server.trainer.job_sets import JobSetController
from kubernetes_server.trainer.runtimes import cluster_runtimes
from kubernetes_server.trainer.train_jobs import TrainJobController
from kubernetes_server.trainer.webhooks import Webhooks

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

SYSTEM = "kubeflow-system"


def install(cluster: Cluster, version: str) -> list[Controller]:
    """Create the custom resources and the runtimes; returns the controllers, which are to be run."""
    operations = cluster.operations
    webhooks = Webhooks(cluster.store, version)
    operations.webhooks.append(webhooks.check)
    for definition in definitions(version):
        operations.create(DEFINITIONS, "", definition)
    for runtime in cluster_runtimes():
        operations.create(CLUSTER_RUNTIMES, "", runtime)
    operations.create(NAMESPACES, "", {"metadata": {"name": SYSTEM}})
    public = {"metadata": {"name": "kubeflow-trainer-public"}, "data": {"kubeflow_trainer_version": f"v{version}.0"}}
    operations.create(CONFIG_MAPS, SYSTEM, public)
    return [TrainJobController(cluster, webhooks), JobSetController(cluster)]
