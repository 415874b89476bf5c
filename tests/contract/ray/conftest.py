"""One Ray cluster for the tests of the Ray client."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ray_cluster import RayCluster, missing, running_ray
from trainmaster.backends.ray.client import RayEngine
from trainmaster.backends.ray.options import RayOptions


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    if reason := missing():
        pytest.skip(reason)
    with running_ray() as started:
        yield started


@pytest.fixture
def instance() -> str:
    return uuid.uuid4().hex[:8]


@pytest.fixture
def make_engine(cluster: RayCluster, instance: str) -> Iterator[Callable[..., RayEngine]]:
    """Makes clients of the cluster; at the end, the jobs of the test's instance are ended and removed."""
    with contextlib.ExitStack() as stack:

        def make(instance: str = instance, **options: Any) -> RayEngine:
            given = {"address": cluster.address, **options}
            engine = RayEngine("ray", instance, RayOptions(**given))
            stack.callback(engine.close)
            return engine

        yield make
        engine = make()
        for name in engine.jobs():
            engine.cancel(name)


@pytest.fixture
def engine(make_engine: Callable[..., RayEngine]) -> RayEngine:
    return make_engine()
