"""Which failures of a pull are final, how long the others are waited for, and that nothing is waited for forever."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from patience import PATIENCE_S
from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.backends.container import images
from trainmaster.backends.container.engine import ContainerEngine, ContainerEngineError
from trainmaster.backends.container.images import Pulls
from trainmaster.protocol.reasons import Reason

IMAGE = "registry.example/team/image:1"


class ScriptedEngine(ContainerEngine):
    """Says of every pull what it is told to."""

    name = "podman"

    def __init__(self, *lines: Mapping[str, Any] | Exception) -> None:
        super().__init__()
        self.lines = lines
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.pulls = 0

    def pull(self, image: str) -> Iterator[Mapping[str, Any]]:
        self.pulls += 1
        for line in self.lines:
            if isinstance(line, Exception):
                raise line
            yield line
        self.goes_on.wait(PATIENCE_S)


def fetch(pulls: Pulls, attempt_id: str, image: str = IMAGE) -> None:
    """Ask until there is an answer."""
    try:
        pulls.fetch(image, policy="IfNotPresent", attempt_id=attempt_id)
    except NotYetError as wait:
        wait.until.result(PATIENCE_S)
        pulls.fetch(image, policy="IfNotPresent", attempt_id=attempt_id)


@pytest.mark.parametrize(
    "said",
    [
        "initializing source docker://r/x:1: reading manifest 1 in r/x: manifest unknown",
        "pull access denied for x, repository does not exist or may require 'docker login'",
        "manifest for r/x:1 not found: manifest unknown: manifest unknown",
        "reading manifest 1 in r/x: unauthorized: authentication required",
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
        'short-name "x:1" did not resolve to an alias and no unqualified-search registries are defined',
        "invalid reference format: repository name must be lowercase",
    ],
)
def test_an_answer_that_will_not_change_is_final_and_names_what_to_do(said: str) -> None:
    with pytest.raises(LaunchError, match=r"podman build") as refused:
        fetch(Pulls(ScriptedEngine({"error": said})), "job.1")
    assert refused.value.reason is Reason.LAUNCH_REFUSED
    assert all(words in str(refused.value) for words in (IMAGE, "IfNotPresent", said))


@pytest.mark.parametrize(
    "said",
    [
        {"error": "received unexpected HTTP status: 503 Service Unavailable"},
        {"error": "dial tcp 10.0.0.1:443: connect: connection refused"},
        {"error": "dial tcp: lookup registry.example on 10.0.0.53:53: no such host"},
        {"error": "net/http: TLS handshake timeout"},
        {"error": "toomanyrequests: You have reached your pull rate limit"},
        ContainerEngineError("the container engine does not answer"),
        RuntimeError("something nobody thought of"),
    ],
)
def test_whatever_may_be_better_next_time_is_tried_again_later_and_later(said: Mapping[str, Any] | Exception) -> None:
    engine = ScriptedEngine(said)
    pulls = Pulls(engine)
    waits = []
    for number in range(1, 8):
        with pytest.raises(LaunchError, match="could not be fetched from its registry yet") as failed:
            fetch(pulls, f"job.{number}")
        assert failed.value.reason is Reason.ENGINE_UNAVAILABLE
        waits.append(failed.value.again_in_s)
    assert waits == [5, 10, 20, 40, 80, 120, 120]
    engine.lines = ()
    fetch(pulls, "job.8")
    engine.lines = (said,)
    with pytest.raises(LaunchError) as failed:
        fetch(pulls, "job.9")
    assert failed.value.again_in_s == 5


def test_what_was_built_on_this_machine_is_asked_of_no_registry_twice() -> None:
    engine = ScriptedEngine({"error": "pinging container registry localhost: connection refused"})
    with pytest.raises(LaunchError) as refused:
        fetch(Pulls(engine), "job.1", "localhost/mine:1")
    assert refused.value.reason is Reason.LAUNCH_REFUSED
    assert "login" not in str(refused.value)


def test_attempts_share_a_pull_while_it_runs_and_later_ones_have_their_own() -> None:
    engine = ScriptedEngine(
        {"status": "Pulling from team/image", "id": "1"},
        {"status": "Pulling fs layer", "id": "aa"},
        {"status": "Pulling fs layer", "id": "bb"},
        {"status": "Downloading", "id": "aa"},
        {"status": "Download complete", "id": "aa"},
        {"status": "Extracting", "id": "aa"},
    )
    engine.goes_on.clear()
    pulls = Pulls(engine)
    waits = []
    for attempt_id in ("a.1", "b.1", "a.1"):
        with pytest.raises(NotYetError) as told:
            pulls.fetch(IMAGE, policy="Always", attempt_id=attempt_id)
        waits.append(told.value)
    engine.goes_on.set()
    waits[-1].until.result(PATIENCE_S)
    for attempt_id in ("a.1", "b.1"):
        pulls.fetch(IMAGE, policy="Always", attempt_id=attempt_id)
    assert engine.pulls == 1
    fetch(pulls, "c.1")
    fetch(pulls, "c.1", "registry.example/team/other:1")
    assert engine.pulls == 3


def test_a_pull_tells_how_many_of_its_layers_are_here() -> None:
    pull = images._Pull(IMAGE)
    assert pull.progress() == f"pulling {IMAGE}"
    for line in (
        {"status": "Pulling from team/image", "id": "1"},
        {"status": "Pulling fs layer", "id": "aa"},
        {"status": "Already exists", "id": "bb"},
        {"status": "Download complete", "id": "aa"},
        {"status": "Extracting", "id": "aa"},
        {"status": "Pulling fs layer", "id": "cc"},
        {"status": "Status: Downloaded newer image"},
    ):
        pull.take(line)
    assert pull.progress() == f"pulling {IMAGE}: 2 of 3 layers"


def test_whoever_is_told_of_the_end_may_ask_at_once() -> None:
    engine = ScriptedEngine()
    engine.goes_on.clear()
    pulls = Pulls(engine)
    with pytest.raises(NotYetError) as wait:
        pulls.fetch(IMAGE, policy="Always", attempt_id="a.1")
    done = threading.Event()

    def ask(_: object) -> None:
        fetch(pulls, "a.1")
        done.set()

    wait.value.until.add_done_callback(ask)
    engine.goes_on.set()
    assert done.wait(PATIENCE_S)
