"""Health checks, and Prometheus metrics of this process and of the cluster, which name no account."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from typing_extensions import TypedDict

from trainmaster import __version__
from trainmaster.protocol.documents import disk_is_full
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.states import JobStatus
from trainmaster.server.http.auth import guard, require
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import ErrorEnvelope, Ok, ok
from trainmaster.server.http.errors import UnhealthyError
from trainmaster.server.http.requests import METRICS_PATH
from trainmaster.server.http.router import Responses, StrictRoute, answers
from trainmaster.server.settings.telemetry import METERS, Histogram, Meters
from trainmaster.server.store import attempts, nodes, queues
from trainmaster.server.store.scope import Scope

_EVERYTHING = Scope.everything()
_process = ProcessCollector(registry=None)


class _Given(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _of_cluster(connection: Connection, now: float) -> list[Metric]:
    jobs = GaugeMetricFamily("trainmaster_jobs", "Jobs in the database.", labels=("status", "queue"))
    depths = GaugeMetricFamily("trainmaster_queue_depth", "Jobs that wait for room.", labels=("queue",))
    for (status, queue), count in sorted(queues.count_jobs(connection, _EVERYTHING).items()):
        jobs.add_metric((status, queue), count)
        if status == JobStatus.QUEUED:
            depths.add_metric((queue,), count)
    waits = {queue: max(0.0, now - since) for queue, since in queues.oldest_waiting(connection, _EVERYTHING).items()}
    found = nodes.all(connection, _EVERYTHING)
    gpus = {(node.node_id, gpu.index): gpu for node in found for gpu in node.gpus}
    shares = [each.share for each in attempts.all_allocations(connection, _EVERYTHING)]
    held = [gpus.get((share.node_id, index)) for share in shares for index in share.gpus]
    total = Counter(gpu.type for gpu in gpus.values())
    none = dict.fromkeys(total, 0)
    allocated = none | Counter(gpu.type for gpu in held if gpu is not None)
    unhealthy = none | Counter(gpu.type for gpu in gpus.values() if not gpu.healthy)
    return [
        jobs,
        depths,
        _gauges("trainmaster_queue_oldest_wait_seconds", "How long the oldest job of a queue waits.", "queue", waits),
        _gauges("trainmaster_nodes", "Nodes.", "state", Counter(str(node.state) for node in found)),
        _gauges("trainmaster_gpus", "GPUs.", "type", total),
        _gauges("trainmaster_gpus_allocated", "GPUs that jobs hold.", "type", allocated),
        _gauges("trainmaster_gpus_unhealthy", "GPUs that are not schedulable.", "type", unhealthy),
    ]


def _of_process(meters: Meters, *, leads: bool, lag_s: float) -> Iterator[Metric]:
    yield _gauges("trainmaster_info", "What runs here.", "version", {__version__: 1})
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
    histograms = {
        "trainmaster_pass_seconds": ("Passes of the coordinator: how long they took.", meters.passes_s),
        "trainmaster_commit_size": ("Commits: how many writes each of them had.", meters.commit_sizes),
    }
    for name, (meaning, histogram) in histograms.items():
        buckets, total = _buckets(histogram)
        yield HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=total)
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
_TEXT: Responses = {
    200: {"description": "The text format of Prometheus.", "content": {_PLAIN: {"schema": {"type": "string"}}}}
}
_LAG_SAMPLE_S = 0.02


@router.get(METRICS_PATH, **answers(None, also=_TEXT))
@guard
async def show_metrics(request: Request, context: Context) -> Response:
    """Show the server's numbers, in the text format of Prometheus."""
    if not context.settings.open_metrics:
        require(request, KeyScope.VIEW)
    clock = asyncio.get_running_loop().time
    began = clock()
    await asyncio.sleep(_LAG_SAMPLE_S)
    lag_s = max(0.0, clock() - began - _LAG_SAMPLE_S)
    now, leads = context.clock(), context.leads()

    def collect(connection: Connection) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Given([*_of_cluster(connection, now), *_of_process(METERS, leads=leads, lag_s=lag_s)]))
        registry.register(_process)
        return generate_latest(registry)

    return Response(await context.read(collect), media_type=_MEDIA_TYPE)


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
_UNAVAILABLE = "The server cannot do its work; the message says why."


@health_router.get("/healthz", response_model=Ok[Alive], openapi_extra=_OPEN)
async def alive() -> Response:
    """Whether the server answers at all."""
    return ok(Alive(alive=True, version=__version__))


@health_router.get(
    "/readyz",
    response_model=Ok[Ready],
    openapi_extra=_OPEN,
    responses={
        HTTPStatus.SERVICE_UNAVAILABLE: {"model": ErrorEnvelope, "description": _UNAVAILABLE},
    },
)
async def ready(context: Context) -> Response:
    """Whether the server can do its work: the part that runs jobs does, disks have space, the database takes writes."""
    if (problem := context.healthy()) is not None:
        raise UnhealthyError(problem)
    full = await run_in_threadpool(lambda: [what for what, path in context.disks.items() if disk_is_full(path)])
    if full:
        raise UnhealthyError(f"there is no space left for {' and '.join(full)}")
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(context.database.probe())), PROBE_PATIENCE_S)
    except (StoreUnavailableError, TimeoutError) as error:
        # Anybody may ask; the database's own words are for its operators.
        _log.warning("not ready: %s", str(error) or "a write was not committed in time")
        raise StoreUnavailableError("the database takes no writes; try again") from None
    return ok(Ready(ready=True, version=__version__))
