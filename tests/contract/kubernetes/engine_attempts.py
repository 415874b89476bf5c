"""What the tests of the Kubernetes client wait for, and the programs that their workers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kubernetes_client import KubernetesClient, Object, wait_for
from trainmaster.backends.cluster.engine import EngineJob, EngineLaunch, EnginePhase
from trainmaster.backends.kubernetes.client import KubernetesEngine

PREPARING, QUEUED, RUNNING, ENDED = EnginePhase
FOREVER = "echo up; while :; do sleep 0.1; done"
SAVES = "trap 'echo TERM; sleep 1; echo saved; exit 0' TERM; " + FOREVER

MakeEngine = Callable[..., KubernetesEngine]
Launch = Callable[..., EngineLaunch]


def until(engine: KubernetesEngine, name: str, holds: Callable[[EngineJob], Any]) -> EngineJob:
    """The attempt, once something is true of it; every state on the way has been looked at."""
    seen: list[EngineJob] = []

    def found() -> EngineJob | None:
        engine.wait(0.2)
        job = engine.jobs().get(name)
        if job is not None and job not in seen:
            seen.append(job)
        return job if job is not None and holds(job) else None

    try:
        job: EngineJob = wait_for(found, name)
    except AssertionError:
        raise AssertionError(f"{name} was {seen}") from None
    return job


def until_phase(engine: KubernetesEngine, name: str, phase: EnginePhase) -> EngineJob:
    return until(engine, name, lambda job: job.phase is phase)


def pods_up(api: KubernetesClient, launch: EngineLaunch) -> list[Object]:
    """Its pods, once all of them say `up`."""

    def all_up() -> list[Object] | None:
        pods = api.pods_of(launch.name, launch.node_count)
        run = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        is_up = len(run) == launch.node_count and all("up" in api.log(pod["metadata"]["name"]) for pod in run)
        return run if is_up else None

    pods: list[Object] = wait_for(all_up, f"the workers of {launch.name}")
    return pods
