"""Which worker runs which tests: a suite whose fixtures cost much goes to one of them, other files go one by one."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

SUITES = (
    # One container engine with its images, and one server for each backend.
    (
        "contract/container",
        "contract/backends",
        "blackbox/test_blackbox_containers.py",
        "clients/test_trainer_containers.py",
        "clients/test_trainer_fresh_machine.py",
    ),
    # One cluster each.
    ("contract/slurm",),
    ("contract/ray",),
    ("contract/clusters",),
    # One process that has imported the trainers.
    ("training",),
    # One process that has imported the trainer service.
    ("trainer_service",),
    # One server for each transport.
    ("contract/local",),
    ("contract/training",),
)
"""Suites that stay together, as places below tests/. They take longest and come first, so that nobody waits for one."""
LAST = ("unit", "api", "fields")
"""Many short tests, which fill the workers up evenly at the end."""


def unit_of(path: str) -> str:
    """What a test file, named from tests/ on, is run together with."""
    below = PurePosixPath(path)
    return next((suite[0] for suite in SUITES for place in suite if below.is_relative_to(place)), path)


def place_of(path: str) -> int:
    """Where in the queue a test file stands."""
    places = [suite[0] for suite in SUITES]
    if (unit := unit_of(path)) in places:
        return places.index(unit)
    if path == "clients/test_readme.py":
        return len(places)
    return len(places) + (2 if PurePosixPath(path).parts[0] in LAST else 1)


class SuiteScheduling(LoadScopeScheduling):
    """Hands out whole suites and whole files, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid.partition("::")[0].removeprefix("tests/"))
