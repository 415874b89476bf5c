"""Which backends a server has where nobody named any, and that those are not paid for before a job needs them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from patience import PATIENCE_S
from scripted_backend import ScriptedBackend, ScriptedWorld
from trainmaster.backends import BACKENDS, check_names, missing, names_from
from trainmaster.backends.stand_ins import DeferredBackend
from trainmaster.protocol.launch import CONTAINER, LOCAL, Launch, LaunchStep
from trainmaster.protocol.request import AttemptRequest, Control, NodeAssignment
from trainmaster.server.core.resources import Node, host_backend

ATTEMPT = AttemptRequest(
    job_id="job-1",
    attempt=1,
    token="",
    rank_token="",
    launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("true",)),)),
    nodes=(NodeAssignment(node_id="a"),),
    checkpoint_dir="",
    output_dir="",
    owner_file="",
)


class Opened(ScriptedBackend):
    """Counts how often one was made, and opened."""

    made = opened = 0

    def __init__(self) -> None:
        super().__init__(ScriptedWorld(lambda _: pytest.fail("nobody looks there")), ())
        Opened.made += 1

    def open(self) -> None:
        Opened.opened += 1


@pytest.fixture
def without_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", nothing)


def test_backends_that_are_installed_are_there_unless_the_settings_say_otherwise() -> None:
    assert names_from(()) == (LOCAL, CONTAINER)
    assert names_from((CONTAINER,)) == (CONTAINER,)
    assert "setting `backends`" in missing(CONTAINER, {LOCAL})
    assert missing("slurm", {LOCAL}) == "backend 'slurm' is not available on this server; it has: local"
    with pytest.raises(ValueError, match="there is no backend 'slurm'"):
        check_names(["slurm"])


@pytest.mark.usefixtures("without_docker")
def test_backend_without_its_library_is_told_with_what_installs_it() -> None:
    assert names_from(()) == (LOCAL,)
    assert "pip install 'trainmaster[containers]'" in missing(CONTAINER, {LOCAL})


def test_backend_that_nobody_named_is_made_on_first_use_and_from_the_start_ever_after(tmp_path: Path) -> None:
    def deferred() -> DeferredBackend:
        return DeferredBackend(
            CONTAINER, BACKENDS[CONTAINER].capabilities, Opened, used=tmp_path / "used", leaves_something=lambda: left
        )

    left = True
    Opened.made = Opened.opened = 0
    first = deferred()
    first.open()
    assert (list(first.inventory()), first.capabilities.images, Opened.made) == ([], True, 0)
    first.close()
    assert first.engine() is None  # asked, and so made
    unused = deferred()
    unused.open()
    assert (Opened.made, Opened.opened) == (1, 0)
    for _ in range(2):
        first.stop(ATTEMPT, Control(seq=1))
    assert (Opened.made, Opened.opened) == (1, 1)
    first.close()
    second = deferred()
    second.open()
    assert (Opened.made, Opened.opened) == (2, 2)
    left = False
    second.close()
    deferred().open()
    assert (Opened.made, Opened.opened) == (2, 2)


def test_deferred_backend_reports_its_nodes_unless_they_are_of_another(tmp_path: Path) -> None:
    node = Node(node_id="n", backend="own", hostname="n", cpu_cores=1, ram_mb=1, storage_mb=1)
    made = ScriptedBackend(ScriptedWorld(lambda _: pytest.fail("nobody looks there")), [node])
    for nodes_of, expected in (("", [node]), (LOCAL, [])):
        capabilities = replace(made.capabilities, nodes_of=nodes_of)
        backend = DeferredBackend(
            "own", capabilities, lambda: made, used=tmp_path / "used", leaves_something=lambda: False
        )
        assert list(backend.inventory()) == expected


def test_jobs_in_containers_are_placed_on_the_local_nodes() -> None:
    assert {name: host_backend(name) for name in (LOCAL, CONTAINER, "other")} == {
        LOCAL: LOCAL,
        CONTAINER: LOCAL,
        "other": "other",
    }


def test_server_starts_without_the_library_of_a_backend_that_nobody_named(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import trainmaster.server.process\n"
        "from trainmaster.backends import BackendContext, make_backends\n"
        f"made = make_backends((), BackendContext(data_dir=Path({str(tmp_path)!r}), run_directory=None))\n"
        "for backend in made.values(): backend.open(); backend.inventory(); backend.close()\n"
        "print(*made, 'docker' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.split() == [LOCAL, CONTAINER, "False"]
