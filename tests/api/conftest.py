"""One served API for the tests of a module; each test has an account of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import httpx
import pytest
from api_world import Api, Served, World
from tinker_world import Client, StandIn, TinkerWorld

from patience import PATIENCE_S


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World.open(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(scope="module")
def served(world: World) -> Iterator[Served]:
    with Served.serve(world.context()) as served:
        yield served


@pytest.fixture
def api(world: World, served: Served) -> Iterator[Api]:
    """A client with a new account."""
    account_id = f"account-{secrets.token_hex(4)}"
    key = world.key(account_id)
    # Loading the system's certificates takes longer than most requests; this server speaks plain HTTP.
    with httpx.Client(
        base_url=served.url, headers={"Authorization": f"Bearer {key}"}, verify=False, timeout=PATIENCE_S
    ) as http:
        yield Api(http=http, world=world, account_id=account_id, key=key)


@pytest.fixture(scope="module")
def tinker_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerWorld]:
    """A world whose server knows base models by name, and looks more often than others whether a trainer is ready."""
    with (
        pytest.MonkeyPatch.context() as patch,
        TinkerWorld.open(tmp_path_factory.mktemp("world")) as world,
    ):
        patch.setattr("trainmaster.server.doors.tinker.model_creation.LOOK_EVERY_S", 0.02)
        yield world


@pytest.fixture(scope="module")
def tinker_served(tinker_world: TinkerWorld) -> Iterator[Served]:
    with Served.serve(tinker_world.context()) as served:
        yield served


@pytest.fixture
def client(tinker_world: TinkerWorld, tinker_served: Served) -> Iterator[Client]:
    """A Tinker client with a new account."""
    with Client.of(tinker_served, tinker_world) as client:
        yield client


@pytest.fixture
def stranger(tinker_world: TinkerWorld, tinker_served: Served) -> Iterator[Client]:
    """One of another account."""
    with Client.of(tinker_served, tinker_world) as client:
        yield client


@pytest.fixture
def trainer() -> Iterator[StandIn]:
    """What stands in for a trainer."""
    with StandIn().serving() as trainer:
        yield trainer
