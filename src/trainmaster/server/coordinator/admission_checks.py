"""What admission checks of a new job: the source of its function, its backend, and whether any node could hold it."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from trainmaster.backends.base import Capabilities, ImageFeature
from trainmaster.protocol.launch import KUBERNETES, ContainerRequest, KubernetesRequest
from trainmaster.server.core.errors import Problem, RefusedError, SpecError
from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Needs, Node
from trainmaster.server.core.spec.submit import CompiledJob, SubmitJobRequest
from trainmaster.server.core.workloads import function_source
from trainmaster.server.core.workloads.base import initializers_of
from trainmaster.server.core.workloads.function import FunctionSpec
from trainmaster.server.core.workloads.programs import ContainerSpec
from trainmaster.server.scheduling.shortage import needs_in_words, restored_pool, why_never
from trainmaster.server.store import nodes
from trainmaster.server.store.scope import Scope

RUNTIME_FIELD = "scheduling_config.max_runtime_seconds"
WAITING_FIELD = "scheduling_config.allow_waiting_for_nodes"
FRESH_S = 10.0
"""How long the nodes that were read are used: reading thousands of them for every job would take too long."""
_EVERYTHING = Scope.everything()


class Capacity:
    """Refuses jobs that the known nodes could never hold, as of the last read of the nodes. Not thread-safe."""

    def __init__(self, *, autoscaling: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """With `autoscaling`, nodes are added for jobs that wait, so that no request is refused."""
        self._autoscaling = autoscaling
        self._clock = clock
        self._remember([])

    def require(self, connection: Connection, job: Job, *, apart: bool = False) -> None:
        """See that some nodes could hold a job if nothing else ran; drained and offline nodes count, free disk space
        does not, as it changes. While a backend has no known nodes, as before a cluster first answers, nothing is
        refused. `apart`: every node of the job needs another node of the cluster."""
        if self._autoscaling or job.waits_for_nodes:
            return
        needs = replace(job.needs, storage_mb=0) if job.needs.storage_mb else job.needs
        if self._clock() - self._looked_at < FRESH_S and self._could_hold(job.host_backend, needs, apart=apart):
            return
        # Nodes may have come or gone since the last look.
        self._remember(nodes.all(connection, _EVERYTHING))
        here = [node for node in self._nodes if node.backend == job.host_backend]
        if not here or self._could_hold(job.host_backend, needs, apart=apart):
            return
        raise RefusedError.because([self._problem(job.host_backend, needs, here)])

    def require_time(self, connection: Connection, job: Job) -> None:
        """See that the engine of a job's backend lets jobs run for as long as it may."""
        asked_s = job.max_runtime_s
        if asked_s is None:
            return
        if self._clock() - self._looked_at >= FRESH_S or asked_s > self._longest_s(job.host_backend):
            self._remember(nodes.all(connection, _EVERYTHING))
        if asked_s > (longest_s := self._longest_s(job.host_backend)):
            message = (
                f"the backend {job.backend} lets no job run for longer than {longest_s:.0f} s: lower it, or use "
                "another backend"
            )
            raise RefusedError.because([Problem(field=RUNTIME_FIELD, message=message)])

    def _longest_s(self, backend: str) -> float:
        return self._longest.get(backend, math.inf)

    def _remember(self, found: Sequence[Node]) -> None:
        self._nodes = found
        self._longest: dict[str, float] = {}
        for node in found:
            limit_s = math.inf if node.time_limit_s is None else node.time_limit_s
            self._longest[node.backend] = max(limit_s, self._longest.get(node.backend, limit_s))
        self._looked_at = self._clock()
        self._pool = restored_pool(found)

    def _could_hold(self, backend: str, needs: Needs, *, apart: bool) -> bool:
        demand = self._pool.demand(backend, needs)
        return demand.possible and (not apart or self._pool.hosts(demand) >= needs.node_count)

    def _problem(self, backend: str, needs: Needs, here: Sequence[Node]) -> Problem:
        """Why the nodes of a backend could never hold a job, and what to do."""
        demand = self._pool.demand(backend, needs)
        wanted = needs_in_words(needs, demand.gpus)
        if demand.possible:
            most = _nodes(self._pool.hosts(demand))
            field, less = "resource_config.node_count", f"at most {most}"
            why = f"each of them runs on a node of its own, and {backend} has {most} that could hold one"
            message = f"{backend} could never hold {wanted}: {why}"
        else:
            field, less = "resource_config", "less"
            why, _ = why_never(needs, here, backend)
            message = f"no node could ever hold {wanted}: {why}"
        remedy = (
            f"Ask for {less}; or, if such nodes will be added, set {WAITING_FIELD} to true, and the job waits for them"
        )
        return Problem(field=field, message=f"{message}. {remedy}")


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def why_unreachable(connection: Connection, backend: str, server_url: str) -> str:
    """Why workers on a cluster cannot reach the server there, and what to do: its address is for this machine only, and
    the cluster has nodes elsewhere. Empty: nothing is known to keep them from it."""
    if not _is_loopback(urlsplit(server_url).hostname or ""):
        return ""
    elsewhere = next((node for node in nodes.all(connection, _EVERYTHING) if _is_elsewhere(node, backend)), None)
    if elsewhere is None:
        return ""
    return (
        f"workers on node {elsewhere.node_id} cannot reach this server at {server_url}: set the setting "
        f"advertise_url, or the option server_url of {backend}, to an address that the cluster can reach"
    )


def _is_elsewhere(node: Node, backend: str) -> bool:
    return node.backend == backend and not _is_loopback(node.address) and not _is_own(node.address)


@functools.lru_cache(maxsize=1024)
def _is_own(address: str) -> bool:
    """Whether it is an address of this machine: nothing can listen on any other."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "")


def check_backend(compiled: CompiledJob, name: str, backends: Mapping[str, Capabilities]) -> None:
    """Raise RefusedError when a backend lacks what a job needs."""
    launch, capable = compiled.launch, backends[name]
    initializers = initializers_of(compiled.workload)
    wanted = {
        "image": launch.image is not None,
        "volumes": bool(launch.volumes),
        "container": launch.container != ContainerRequest(),
    }
    for part, spec in initializers.named() if initializers else ():
        wanted[f"initializers.{part}.image"] = spec.image is not None
    first = next((field for field, given in wanted.items() if given), None)
    if first is not None and not capable.images:
        remedy = _remedy(other for other, each in backends.items() if each.images)
        without = "" if isinstance(compiled.workload, ContainerSpec) else f", or leave {first} out"
        message = f"the backend {name} runs no containers; {remedy}{without}"
        raise RefusedError.because([Problem(field=f"workload.{first}", message=message)])
    if capable.images:
        lacking = ((field, each) for field, each in _image_features(compiled) if each not in capable.image_features)
        for field, feature in lacking:
            message = f"the backend {name} does not support {feature}; {_WITHOUT[feature]}"
            raise RefusedError.because([Problem(field=f"workload.{field}", message=message)])
    if launch.kubernetes != KubernetesRequest() and KUBERNETES not in capable.fields:
        remedy = _remedy(other for other, each in backends.items() if KUBERNETES in each.fields)
        message = f"the backend {name} is no Kubernetes cluster; {remedy}, or leave {KUBERNETES} out"
        raise RefusedError.because([Problem(field=f"workload.{KUBERNETES}", message=message)])
    if capable.images and not (launch.image or capable.own_image or capable.image_optional):
        message = (
            f"the backend {name} runs a job in an image, and this one names none: name it here (with TrainerClient: "
            "CustomTrainer(image=...), or a runtime that has one)"
        )
        if capable.image_setting:
            message += f", or have the operator set {capable.image_setting}"
        elif not capable.runs_here:
            message += f", or have the operator set the option image of {name}"
        raise RefusedError.because([Problem(field="workload.image", message=message)])
    resources = compiled.request.resource_config
    for field in sorted(capable.cannot_choose_by):
        if getattr(resources, field):
            remedy = _remedy(other for other, each in backends.items() if field not in each.cannot_choose_by)
            message = f"the engine of the backend {name} cannot choose nodes by it; leave it out, or {remedy}"
            raise RefusedError.because([Problem(field=f"resource_config.{field}", message=message)])
    if launch.lifetime not in capable.lifetimes:
        remedy = _remedy(other for other, each in backends.items() if launch.lifetime in each.lifetimes)
        message = f"the backend {name} cannot run a {launch.lifetime} workload; {remedy}"
        raise RefusedError.because([Problem(field="backend", message=message)])


def _image_features(compiled: CompiledJob) -> Iterator[tuple[str, ImageFeature]]:
    """What a job asks of the containers that it runs in, by the field that says so."""
    launch = compiled.launch
    initializers = initializers_of(compiled.workload)
    if launch.volumes:
        yield "volumes", ImageFeature.VOLUMES
    if launch.container.pull_policy is not None:
        yield "container.pull_policy", ImageFeature.PULL_POLICY
    if launch.container.shm_mb is not None:
        yield "container.shm_mb", ImageFeature.SHARED_MEMORY
    for part, spec in initializers.named() if initializers else ():
        if spec.image is not None:
            yield f"initializers.{part}.image", ImageFeature.INITIALIZER_IMAGES
    if not launch.steps[-1].argv:
        yield "argv", ImageFeature.OWN_COMMAND
    if not launch.container.auto_remove:
        yield "container.auto_remove", ImageFeature.KEPT_CONTAINERS
    if launch.container.pids is not None:
        yield "container.pids", ImageFeature.PROCESS_LIMIT
    if launch.container.runtime is not None:
        yield "container.runtime", ImageFeature.ENGINE_CHOICE


_WITHOUT: Mapping[ImageFeature, str] = {
    ImageFeature.PULL_POLICY: "leave it out",
    ImageFeature.SHARED_MEMORY: "leave it out",
    ImageFeature.VOLUMES: "have the operator mount them into every job of it",
    ImageFeature.INITIALIZER_IMAGES: "leave the image out, and the initializer runs in the job's own",
    ImageFeature.OWN_COMMAND: "say in argv what to run",
    ImageFeature.KEPT_CONTAINERS: "leave it out: logs and results are kept in any case",
    ImageFeature.PROCESS_LIMIT: "leave it out",
    ImageFeature.ENGINE_CHOICE: "leave it out",
}
"""What to do on a backend that lacks a feature."""


def _remedy(able: Iterable[str]) -> str:
    names = ", ".join(able)
    return f"use one of: {names}" if names else "this server has none that does"


SOURCE_CHECKS_AT_ONCE = 2
"""Processes of all accounts; one account has one at a time, so that it cannot keep others waiting."""
SOURCE_CHECK_TIMEOUT_S = 30.0
"""For a process that gets no CPU. One that computes ends by its own limit, long before."""
TOO_MUCH = "takes too much time or memory to parse; put most of it into files that you ship with the job"


class SourceChecks:
    """Checks the source of functions in a process with limits (`core.workloads.function_source`). Used on one loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SOURCE_CHECKS_AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, request: SubmitJobRequest, account_id: str) -> None:
        """Raise SpecError when the source is not Python, does not define the function, or costs too much to parse."""
        spec = request.workload
        if not isinstance(spec, FunctionSpec):
            return
        turn = self._turns.setdefault(account_id, asyncio.Lock())
        async with turn, self._slots:
            problem = await asyncio.to_thread(_problem_of, spec)
        if problem is not None:
            raise SpecError([Problem(field="workload.source", message=problem)])


def _problem_of(spec: FunctionSpec) -> str | None:
    # The Python of an image may be newer than the server's.
    asked = {"source": spec.source, "name": spec.name, "newer_python": spec.image is not None}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", function_source.__file__],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env={},
            cwd="/",
            timeout=SOURCE_CHECK_TIMEOUT_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return TOO_MUCH
    problem: str | None = json.loads(done.stdout)
    return problem
