"""What becomes of an attempt, and of an image, when the engine refuses or an image does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from trainmaster.backends import BackendContext, ContainerDefaults
from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.backends.container import make
from trainmaster.backends.container.engine import (
    ContainerEngine,
    NoSuchCommandError,
    NoSuchImageError,
    TookTooLongError,
)
from trainmaster.backends.container.images import Images
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, NodeAssignment
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import Liveness

GANG = AttemptRequest(
    job_id="job-1",
    attempt=1,
    token="t",
    rank_token="r",
    launch=Launch(kind="command", image="image:1", steps=(LaunchStep(name="main", argv=("true",)),)),
    nodes=(NodeAssignment(node_id="a"), NodeAssignment(node_id="a")),
    checkpoint_dir="",
    output_dir="",
    owner_file="",
)


class FakeEngine(ContainerEngine):
    """Has one image, whose Python does as it is told; or none."""

    name = "podman"

    def __init__(self, *probes: Exception | str) -> None:
        super().__init__("unix:///nowhere")
        self.probes = list(probes)
        self.removed: list[str] = []

    def find_image(self, image: str) -> Mapping[str, Any]:
        if not self.probes:
            raise NoSuchImageError(image)
        return {"Id": "sha256:1"}

    def create(self, name: str, document: Mapping[str, Any]) -> None:
        self.created = document

    def start(self, name: str) -> None:
        if isinstance(self.probes[0], NoSuchCommandError):
            raise self.probes.pop(0)

    def wait(self, name: str, timeout_s: float | None = None) -> int:
        if isinstance(self.probes[0], Exception):
            raise self.probes.pop(0)
        return 0

    def output(self, name: str, *, lines: int = 20) -> str:
        return str(self.probes[0])

    def remove(self, name: str) -> None:
        self.removed.append(name)


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_refusal_ends_an_attempt_that_has_not_begun_and_breaks_a_gang_that_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int
) -> None:
    engine = FakeEngine()  # the image was here, and somebody has removed it
    monkeypatch.setattr("trainmaster.backends.container.engine_of", lambda _: engine)
    directory = RunDirectory(tmp_path / "runs" / "job-1" / "1")
    directory.create(GANG)
    context = BackendContext(
        data_dir=tmp_path,
        run_directory=lambda _: directory,
        runs=tmp_path / "runs",
        container=ContainerDefaults(pull_policy="Always" if claimed else "Never"),
    )
    backend = make(context)
    for node in range(claimed):
        directory.claim(node, {"nonce": "n"})
    if claimed:
        assert backend.submit(GANG, Secrets()) is not None
    else:
        with pytest.raises(LaunchError, match="there is no image") as refused:
            backend.submit(GANG, Secrets())
        assert refused.value.reason is Reason.LAUNCH_REFUSED
    alive = [alive is Liveness.REVOKED for alive in backend.observe(GANG)]
    assert alive == [node >= claimed for node in range(2)]
    assert len(engine.removed) == 2 - claimed


PYTHON = '["/usr/bin/python3", [3, 12]]'
NOT_FOUND = NoSuchCommandError('exec: "python3": executable file not found in $PATH')


@pytest.mark.parametrize(
    ("first", "lacks", "then"),
    [
        (TookTooLongError("x"), "its python3 did not answer in 60 s", "/usr/bin/python3"),
        (NoSuchCommandError('exec: "python3": permission denied'), "its python3 does not start", "/usr/bin/python3"),
        (NOT_FOUND, "it has no python3", None),
    ],
)
def test_an_image_is_known_to_have_no_python_only_where_the_engine_said_so(
    tmp_path: Path, first: Exception, lacks: str, then: str | None
) -> None:
    images = Images(FakeEngine(first, PYTHON), tmp_path)

    def facts() -> Any:
        try:
            return images.facts("image:1", policy="Never", attempt_id="a.1")
        except NotYetError as not_yet:
            wait([not_yet.until], 10)
            return images.facts("image:1", policy="Never", attempt_id="a.1")

    found = facts()
    assert (found.python, found.lacks[: len(lacks)]) == (None, lacks)
    assert facts().python == then
