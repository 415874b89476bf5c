"""Health checks, and Prometheus metrics of this process and of the cluster, which name no account."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from trainmaster.protocol.documents import disk_is_full
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.resources import Node
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import guard, require
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.envelope import ErrorEnvelope, Ok, ok
from trainmaster.server.http.errors import UnhealthyError
from trainmaster.server.http.requests import METRICS_PATH
from trainmaster.server.http.router import StrictRoute, answers
from trainmaster.server.settings.telemetry import METERS, Histogram, Meters
from trainmaster.server.store import attempts, nodes, queues
from trainmaster.server.store.scope import Scope

_EVERYTHING = Scope.everything()
_process = ProcessCollector(registry=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Numbers of the cluster in the database, over all accounts."""

    jobs: Mapping[tuple[str, str], int]
    """By status and queue."""
    waiting_since: Mapping[str, float]
    """When the oldest waiting job was queued, by queue."""
    nodes: Mapping[str, int]
    """By state."""
    gpus: Mapping[str, int]
    """By type, as `gpus_allocated` and `gpus_unhealthy`."""
    gpus_allocated: Mapping[str, int]
    gpus_unhealthy: Mapping[str, int]


def take_snapshot(connection: Connection) -> ClusterSnapshot:
    found = nodes.all(connection, _EVERYTHING)
    every = [(gpu.type, gpu.healthy) for node in found for gpu in node.gpus]
    return ClusterSnapshot(
        jobs=queues.count_jobs(connection, _EVERYTHING),
        waiting_since=queues.oldest_waiting(connection, _EVERYTHING),
        nodes=Counter(str(node.state) for node in found),
        gpus=Counter(kind for kind, _ in every),
        gpus_allocated=_allocated(connection, found),
        gpus_unhealthy=Counter(kind for kind, healthy in every if not healthy),
    )


def _allocated(connection: Connection, found: list[Node]) -> Mapping[str, int]:
    types = {(node.node_id, gpu.index): gpu.type for node in found for gpu in node.gpus}
    held = attempts.all_allocations(connection, _EVERYTHING)
    return Counter(
        types[each.share.node_id, index]
        for each in held
        for index in each.share.gpus
        if (each.share.node_id, index) in types
    )


def exposition(
    snapshot: ClusterSnapshot, meters: Meters, *, now: float, version: str, leads: bool, lag_s: float
) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Given([*_of_cluster(snapshot, now), *_of_process(meters, version, leads, lag_s)]))
    registry.register(_process)
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _of_cluster(snapshot: ClusterSnapshot, now: float) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("trainmaster_jobs", "Jobs in the database.", labels=("status", "queue"))
    depths = GaugeMetricFamily("trainmaster_queue_depth", "Jobs that wait for room.", labels=("queue",))
    for (status, queue), count in sorted(snapshot.jobs.items()):
        jobs.add_metric((status, queue), count)
        if status == JobStatus.QUEUED:
            depths.add_metric((queue,), count)
    yield jobs
    yield depths
    waits = {queue: max(0.0, now - since) for queue, since in snapshot.waiting_since.items()}
    yield _gauges("trainmaster_queue_oldest_wait_seconds", "How long the oldest job of a queue waits.", "queue", waits)
    yield _gauges("trainmaster_nodes", "Nodes.", "state", snapshot.nodes)
    yield _gauges("trainmaster_gpus", "GPUs.", "type", snapshot.gpus)
    allocated = {kind: snapshot.gpus_allocated.get(kind, 0) for kind in snapshot.gpus}
    yield _gauges("trainmaster_gpus_allocated", "GPUs that jobs hold.", "type", allocated)
    unhealthy = {kind: snapshot.gpus_unhealthy.get(kind, 0) for kind in snapshot.gpus}
    yield _gauges("trainmaster_gpus_unhealthy", "GPUs that are out of the pool.", "type", unhealthy)


def _of_process(meters: Meters, version: str, leads: bool, lag_s: float) -> Iterator[Metric]:
    yield _gauges("trainmaster_info", "What runs here.", "version", {version: 1})
    yield GaugeMetricFamily("trainmaster_leader", "1 on the server that leads.", value=int(leads))
    yield GaugeMetricFamily(
        "trainmaster_event_loop_lag_seconds", "How late the loop that answers requests is, now.", value=lag_s
    )
    counters = {
        "trainmaster_submissions": ("Jobs that were stored here.", meters.submissions),
        "trainmaster_placements": ("Attempts that this server opened.", meters.placements),
        "trainmaster_preemptions": ("Attempts that this server asked to make room.", meters.preemptions),
        "trainmaster_webhooks_delivered": ("Deliveries that were answered well.", meters.webhooks_delivered),
        "trainmaster_webhooks_failed": ("Deliveries that have to be tried again.", meters.webhooks_failed),
    }
    for name, (meaning, value) in counters.items():
        yield CounterMetricFamily(name, meaning, value=value)
    passes = HistogramMetricFamily("trainmaster_pass_seconds", "Passes of the coordinator: how long they took.")
    passes.add_metric((), *_buckets(meters.passes_s))
    yield passes
    groups = HistogramMetricFamily("trainmaster_commit_size", "Commits: how many writes each of them had.")
    groups.add_metric((), *_buckets(meters.commit_sizes))
    yield groups
    requests = CounterMetricFamily(
        "trainmaster_http_requests", "Requests that were answered.", labels=("method", "route", "status")
    )
    for (method, route, status), count in sorted(meters.requests.items()):
        requests.add_metric((method, route, str(status)), count)
    yield requests
    latencies = HistogramMetricFamily(
        "trainmaster_http_request_seconds", "How long it took until an answer began.", labels=("method", "route")
    )
    for (method, route), histogram in sorted(meters.latencies_s.items()):
        latencies.add_metric((method, route), *_buckets(histogram))
    yield latencies


def _gauges(name: str, meaning: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=(label,))
    for value, number in sorted(values.items()):
        family.add_metric((value,), number)
    return family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    counts = list(histogram.counts)
    names = [str(bound) for bound in histogram.bounds] + ["+Inf"]
    return [(name, sum(counts[: index + 1])) for index, name in enumerate(names)], histogram.total


router = APIRouter(route_class=StrictRoute, tags=["metrics"])

_PLAIN = "text/plain"
_MEDIA_TYPE = f"{_PLAIN}; version=0.0.4; charset=utf-8"
_TEXT: dict[int | str, dict[str, Any]] = {
    HTTPStatus.OK: {
        "description": "The text format of Prometheus.",
        "content": {_PLAIN: {"schema": {"type": "string"}}},
    }
}
_LAG_SAMPLE_S = 0.02


@router.get(METRICS_PATH, **answers(None, also=_TEXT))
@guard
async def show_metrics(request: Request, context: Context) -> Response:
    """Show the server's numbers, in the text format of Prometheus."""
    if not context.open_metrics:
        require(request, KeyScope.VIEW)
    lag_s = await _lag_s()
    snapshot = await context.read(take_snapshot)
    body = await run_in_threadpool(
        exposition,
        snapshot,
        METERS,
        now=context.clock(),
        version=context.version,
        leads=context.leads(),
        lag_s=lag_s,
    )
    return Response(body, media_type=_MEDIA_TYPE)


async def _lag_s() -> float:
    """How late a short sleep ends."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.sleep(_LAG_SAMPLE_S)
    return max(0.0, clock() - began - _LAG_SAMPLE_S)


class Alive(TypedDict):
    """The server answers."""

    alive: Literal[True]
    version: str


class Ready(TypedDict):
    """The server can do its work."""

    ready: Literal[True]
    version: str


health_router = APIRouter(tags=["health"])
_OPEN: dict[str, Any] = {"security": []}

_log = logging.getLogger(__name__)

PROBE_PATIENCE_S = 10.0


@health_router.get("/healthz", response_model=Ok[Alive], openapi_extra=_OPEN)
async def alive(context: Context) -> Response:
    """Whether the server answers at all."""
    return ok(Alive(alive=True, version=context.version))


@health_router.get(
    "/readyz",
    response_model=Ok[Ready],
    openapi_extra=_OPEN,
    responses={
        HTTPStatus.SERVICE_UNAVAILABLE: {
            "model": ErrorEnvelope,
            "description": "The server cannot do its work; the message says why.",
        }
    },
)
async def ready(context: Context) -> Response:
    """Whether the server can do its work: the part that runs jobs does, disks have space, the database takes writes."""
    if (problem := context.healthy()) is not None:
        raise UnhealthyError(problem)
    if full := await run_in_threadpool(_full_disks, context):
        raise UnhealthyError(f"there is no space left for {' and '.join(full)}")
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(context.database.probe())), PROBE_PATIENCE_S)
    except (StoreUnavailableError, TimeoutError) as error:
        # Anybody may ask; the database's own words are for its operators.
        _log.warning("not ready: %s", str(error) or "a write was not committed in time")
        raise StoreUnavailableError("the database takes no writes; try again") from None
    return ok(Ready(ready=True, version=context.version))


def _full_disks(context: ApiContext) -> list[str]:
    return [what for what, path in context.disks.items() if disk_is_full(path)]
