"""Servers whose default backend is a Kubernetes cluster."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from job_server import JobServer, processes_marked, shown_of
from kubernetes_client import ApiError, KubernetesClient, Object
from real_server import ENDED, wait_for

IMAGE = "localhost/python:test"
"""The image of jobs. The test server takes any name for this machine; a real cluster has to have it."""
KINDS = ("Job", "Pod", "Secret", "Service")


class KubernetesServer(JobServer):
    """A server with a cluster, which it declares in its settings file."""

    def __init__(self, directory: Path, api: KubernetesClient, port: int, **options: Any) -> None:
        directory.mkdir(parents=True)
        given = {
            "kind": "kubernetes",
            "kubeconfig": str(api.kubeconfig),
            "namespace": api.namespace,
            "image": IMAGE,
            "poll_s": 0.2,
            **options,
        }
        lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
        (directory / "config.toml").write_text('backends = ["k8s"]\n\n[clusters.k8s]\n' + "\n".join(lines) + "\n")
        # Workers know one address: it has to stay the same when the server is started again.
        super().__init__(directory, "--port", str(port))
        self.api = api

    def objects(self, job_id: str = "") -> list[str]:
        """The names of everything in the namespace that was made for a job."""
        return [
            f"{kind}/{name}"
            for kind in KINDS
            for each in self.api.list(kind)
            if (name := each["metadata"]["name"]).startswith("tm-") and job_id in name
        ]

    def pods(self, job_id: str) -> list[Object]:
        found = [pod for pod in self.api.list("Pod") if job_id in pod["metadata"]["name"]]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def job_object(self, job_id: str) -> Object:
        """The last Job of a job, once it is there."""

        def found() -> list[Object]:
            return [job for job in self.api.list("Job") if job_id in job["metadata"]["name"]]

        return sorted(wait_for(found, f"the Job of {job_id}"), key=lambda job: str(job["metadata"]["name"]))[-1]

    def kill_worker(self, job_id: str, node: int = 0) -> None:
        """Kill the worker of a node of the first attempt; its claim has its number inside of its pod."""

        def found() -> list[int]:
            own = processes_marked(f"{job_id}-1-{node}")  # the name of its host
            return [pid for pid in own if shown_of(pid, "cmdline").endswith(b".pyz\0remote\0")]

        for pid in wait_for(found, f"the worker of {job_id}"):
            os.kill(pid, signal.SIGKILL)

    def end_all_jobs(self) -> None:
        """Cancel what still runs; nothing of it may be left on the cluster."""
        listed = self.data("GET", "/v1/jobs?page_size=100")["jobs"]
        live = [job["job_id"] for job in listed if job["status"] not in (*ENDED, "PAUSED")]
        for job_id in live:
            self.ask("POST", f"/v1/jobs/{job_id}/cancel")
        for job_id in live:
            self.until(job_id, *ENDED, "PAUSED")
        wait_for(lambda: not self.objects(), "the end of all that was made on the cluster")


@contextlib.contextmanager
def own_namespace(cluster: KubernetesClient) -> Iterator[KubernetesClient]:
    """A client in a namespace that is deleted in the end."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.create({"kind": "Namespace", "metadata": {"name": name}})
    client = cluster.within(name)

    def has_account() -> bool:
        try:
            return bool(client.get("ServiceAccount", "default"))
        except ApiError:
            return False

    try:
        wait_for(has_account, "the default service account")
        yield client
    finally:
        client.close()
        cluster.delete("Namespace", name)
