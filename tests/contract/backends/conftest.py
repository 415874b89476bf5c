"""The suite that every backend passes: one server for each of them, shared by all tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from backends_under_test import BACKENDS_UNDER_TEST, MISSING, PARAMS, BackendUnderTest

from job_server import JobServer


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], BackendUnderTest]]:
    """Starts a backend's server when it is first wanted; all of them end with the session."""
    running: dict[str, BackendUnderTest] = {}
    with contextlib.ExitStack() as stack:

        def start(name: str) -> BackendUnderTest:
            if name not in running:
                running[name] = stack.enter_context(BACKENDS_UNDER_TEST[name](tmp_path_factory.mktemp(name)))
            return running[name]

        yield start


@pytest.fixture(scope="module", params=PARAMS)
def backend(request: pytest.FixtureRequest, started: Callable[[str], BackendUnderTest]) -> BackendUnderTest:
    """One backend after the other."""
    if (reason := MISSING.get(request.param, lambda: None)()) is not None:
        pytest.skip(reason)
    return started(request.param)


@pytest.fixture
def server(backend: BackendUnderTest) -> Iterator[JobServer]:
    """The backend's server; after each test nothing of its jobs is left."""
    yield backend.server
    backend.end_all_jobs()
