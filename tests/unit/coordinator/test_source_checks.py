"""The source of a submitted function: what is refused, and that a costly one holds nobody up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from trainmaster.server.coordinator.admission_checks import TOO_MUCH, SourceChecks
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads.function_source import problem_of

COSTLY = "def train():\n    return f'" + "{x}" * 43_000 + "'\n"
"""Takes this Python a second and more to parse."""


def function(**workload: Any) -> SubmitJobRequest:
    source = "def train(): ...\n"
    return parse_submit({"name": "n", "workload": {"kind": "function", "source": source, "name": "train", **workload}})


def refusal(request: SubmitJobRequest) -> tuple[str, str]:
    with pytest.raises(SpecError) as caught:
        asyncio.run(SourceChecks().check(request, "a"))
    (problem,) = caught.value.problems
    return problem.field, problem.message


@pytest.mark.parametrize(
    "source",
    [
        "async def train(): ...",
        "class train: ...",
        "train = print",
        "(train, other) = print, 1",
        "from somewhere import train",
        "import elsewhere as train",
        "from somewhere import *",
        "try:\n    import torch\nexcept ImportError:\n    pass\nelse:\n    def train(): ...",
        "if True:\n    with open('x') as train: ...",
        "x = " + " + ".join(["1"] * 500) + "\ndef train(): ...",
    ],
)
def test_source_that_defines_the_function_somehow_is_accepted(source: str) -> None:
    assert problem_of(source, "train", newer_python=False) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def train(:", "is no Python: line 1: "),
        ("x = 1\n  def train(): ...", "is no Python: line 2: unexpected indent"),
        ("def tain(): ...", "does not define 'train'"),
        ("def other():\n    train = 1", "does not define 'train'"),
        ("class Other:\n    def train(self): ...", "does not define 'train'"),
        ("train()", "does not define 'train'"),
        ("(" * 5000, "is no Python: line 1: too many nested parentheses"),
    ],
)
def test_source_that_does_not_define_the_function_is_refused(source: str, message: str) -> None:
    assert (problem_of(source, "train", newer_python=False) or "").startswith(message)


def test_check_passes_a_good_source_and_refuses_others_at_their_field() -> None:
    asyncio.run(SourceChecks().check(function(), "a"))
    assert refusal(function(source="def tain(): ...")) == ("workload.source", "does not define 'train'")
    assert refusal(function(source="def train(:"))[1].startswith("is no Python: line 1: ")


def test_source_for_an_image_may_be_of_a_newer_python() -> None:
    newer = "def train[T](of: T) -> T: ..."
    asyncio.run(SourceChecks().check(function(source=newer, image="python:3.14"), "a"))
    assert refusal(function(source="def tain(): ...", image="python:3.14"))[0] == "workload.source"


def test_costly_source_is_parsed_while_the_event_loop_goes_on() -> None:
    async def turns_of_the_loop() -> int:
        async def check() -> None:
            await SourceChecks().check(function(source=COSTLY), "a")

        checking = asyncio.ensure_future(check())
        turns = 0
        while not checking.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    assert asyncio.run(turns_of_the_loop()) > 5


def test_source_beyond_the_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.server.coordinator.admission_checks.SOURCE_CHECK_TIMEOUT_S", 0.001)
    assert refusal(function(source=COSTLY)) == ("workload.source", TOO_MUCH)


def test_one_account_cannot_take_the_turns_of_others() -> None:
    async def answered_first() -> str:
        checks = SourceChecks()
        flood = [asyncio.ensure_future(checks.check(function(source=COSTLY), "flooding")) for _ in range(6)]
        other = asyncio.ensure_future(checks.check(function(), "other"))
        await asyncio.wait({*flood, other}, return_when=asyncio.FIRST_COMPLETED)
        first = "other" if other.done() else "flooding"
        for task in (*flood, other):
            task.cancel()
        await asyncio.gather(*flood, other, return_exceptions=True)
        return first

    assert asyncio.run(answered_first()) == "other"
