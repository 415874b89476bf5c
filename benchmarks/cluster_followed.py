"""What ten thousand jobs in the queue of a Kubernetes cluster cost the server: every pod waits, and a few change.

The cluster is the one of the tests, with nodes that only pretend to run pods. All jobs come in by HTTP and are handed
to the cluster by the server; a job stays there as a Job, a Secret and a pod that waits on its node.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.apart import apart
from benchmarks.cluster_engine import TESTS, Engine
from benchmarks.report import Figure, Progress, WrongResultError
from benchmarks.server import (
    Client,
    Server,
    command_job,
    cpu_s,
    environment,
    resident_mb,
    running_server,
    wait_for,
)

JOBS = 10_000
NODES = 100
CLIENTS = 2
CHANGES_PER_S = 5
MEASURED_S = 60.0
SETTLING_S = 30.0
MEMORY_TARGET_MB = 250.0
SHARE_TARGET = 10.0
_HANDED_OVER_S = 1800.0
_NAMESPACE = "default"


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Memory and processor share of the server while a few pods change each second."""
    with _running_cluster(directory) as engine, _following(engine, directory) as server:
        client = Client(server)
        wait_for(lambda: client.call("GET", "/v1/nodes")["nodes"] or None, "the server sees the cluster's nodes")
        bare_mb = resident_mb(server.pid)
        progress(f"submitting {JOBS:,} jobs")
        apart(submit_many, [(server.data_dir, server.port, JOBS // CLIENTS)] * CLIENTS)
        progress("waiting until all of them are in the cluster's queue")
        kubeconfig = str(engine.options["kubeconfig"])
        wait_for(lambda: _waiting_pods(kubeconfig) >= JOBS or None, "every job has a pod", _HANDED_OVER_S, every_s=10)
        time.sleep(SETTLING_S)
        progress(f"looking for {MEASURED_S:.0f} s, while {CHANGES_PER_S} pods a second change")
        before_s, began = cpu_s(server.pid), time.monotonic()
        apart(change_pods, [(kubeconfig, MEASURED_S)])
        used_s, took_s = cpu_s(server.pid) - before_s, time.monotonic() - began
        memory_mb = resident_mb(server.pid)
        if (waiting := client.count("SCHEDULING")) != JOBS:
            raise WrongResultError(f"{waiting} jobs wait on the cluster, and not {JOBS}")
        client.close()
    note = f"{JOBS:,} jobs in the cluster's queue, {CHANGES_PER_S} of their pods change a second"
    return [
        Figure(
            name="10,000 jobs followed on Kubernetes, memory",
            measured=memory_mb,
            unit="MB",
            target=MEMORY_TARGET_MB,
            note=f"{note}; {bare_mb:.0f} MB without",
        ),
        Figure(
            name="10,000 jobs followed on Kubernetes, share of a core",
            measured=used_s / took_s * 100,
            unit="%",
            target=SHARE_TARGET,
            note=note,
        ),
    ]


@contextlib.contextmanager
def _running_cluster(directory: Path) -> Iterator[Engine]:
    kubeconfig = directory / "kubeconfig"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kubernetes_server", "--fake", "--with-parent", "--real-timing"),
            *("--kubeconfig", str(kubeconfig), "--directory", str(directory / "cluster")),
            *("--nodes", str(NODES), "--cpu", "64", "--memory", "256Gi"),
        ],
        stdin=subprocess.PIPE,
        env={**environment(), "PYTHONPATH": str(TESTS)},
    )
    try:
        wait_for(lambda: kubeconfig.exists() or None, "the cluster is there")
        waits = {"metadata": {"annotations": {"test.kubernetes.io/phase": "Pending"}}}
        options = {
            "kubeconfig": str(kubeconfig),
            "namespace": _NAMESPACE,
            "image": "localhost/python:test",
            "pod_template": json.dumps(waits),
        }
        yield Engine(kind="kubernetes", missing="", options=options, environment={})
    finally:
        process.communicate()


@contextlib.contextmanager
def _following(engine: Engine, directory: Path) -> Iterator[Server]:
    with running_server(directory, *engine.server_options(directory)) as server:
        yield server


def submit_many(data_dir: Path, port: int, count: int) -> None:
    """Submit jobs that the cluster will queue."""
    server = Server(data_dir)
    server.port = port
    client = Client(server)
    for _ in range(count):
        client.submit(command_job("true", name="queued"))
    client.close()


def change_pods(kubeconfig: str, seconds: float) -> None:
    """Have the words change with which pods wait, one pod after another."""
    from trainmaster.backends.kubernetes.connection import KubernetesConnection
    from trainmaster.backends.kubernetes.options import KubernetesOptions

    api = KubernetesConnection(KubernetesOptions(kubeconfig=kubeconfig))
    path = f"/api/v1/namespaces/{_NAMESPACE}/pods"
    names = [pod["metadata"]["name"] for items, _ in api.pages(path) for pod in items]
    ends_at, turn = time.monotonic() + seconds, 0
    while (now := time.monotonic()) < ends_at:
        waiting = {"reason": "ImagePullBackOff", "message": f"Back-off pulling image, for the {turn}th time"}
        state = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
        api.patch(
            f"{path}/{names[turn % len(names)]}/status",
            {"status": {"containerStatuses": [{**state, "state": {"waiting": waiting}}]}},
        )
        turn += 1
        time.sleep(max(0.0, now + 1 / CHANGES_PER_S - time.monotonic()))
    api.close()


def _waiting_pods(kubeconfig: str) -> int:
    from trainmaster.backends.kubernetes.connection import KubernetesConnection
    from trainmaster.backends.kubernetes.options import KubernetesOptions

    api = KubernetesConnection(KubernetesOptions(kubeconfig=kubeconfig))
    head = api.get(f"/api/v1/namespaces/{_NAMESPACE}/pods", limit=1)
    api.close()
    return len(head["items"]) + int((head.get("metadata") or {}).get("remainingItemCount") or 0)
