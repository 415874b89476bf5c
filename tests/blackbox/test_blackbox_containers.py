"""The cases in real containers, with the real kubeflow package and with ours: each comes to what `outcomes.py` says."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import outcomes
import pytest
from case_programs import CASES, Run, kubeflow_python, make_index

from container_engine import Engine, missing, python_image, running_engine
from container_servers import ContainerServer
from wheel_index import WheelIndex

LOOKED_AT = [case for case in CASES if outcomes.ROWS[case].container is not None]
"""The cases that kubeflow's containers can tell something about: they reach no package index of this machine."""
RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata:
  name: torch-distributed
  labels:
    trainer.kubeflow.org/framework: torch
spec:
  mlPolicy:
    numNodes: 1
    torch: {{}}
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels:
                trainer.kubeflow.org/trainjob-ancestor-step: trainer
            spec:
              template:
                spec:
                  containers:
                    - name: node
                      image: {image}
"""


@dataclasses.dataclass
class World:
    """An engine with an image, and what the programs of both clients are told of it."""

    ground: Path
    engine: Engine
    image: str
    index: WheelIndex
    variables: dict[str, str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    ground = tmp_path_factory.mktemp("blackbox-containers")
    index = make_index(ground / "index")
    with running_engine() as engine:
        image = python_image(engine)
        runtime = ground / "runtime.yaml"
        runtime.write_text(RUNTIME.format(image=image))
        variables = {"BLACKBOX_RUNTIME": runtime.as_uri(), "BLACKBOX_INDEX": str(index.directory)}
        yield World(ground, engine, image, index, variables)


def _clear(engine: Engine, ground: Path) -> None:
    """Remove what kubeflow leaves: networks of jobs that it could not start, and what is still on them."""
    label = "label=trainer.kubeflow.org/workdir"
    for network in engine.podman("network", "ls", "--filter", label, "--format", "{{.Name}}").split():
        if str(ground) in engine.podman("network", "inspect", network):
            engine.podman("network", "rm", "--force", network)


@pytest.fixture(scope="module")
def kubeflow(world: World) -> Iterator[dict[str, str]]:
    variables = {**world.variables, "BLACKBOX_ENGINE": world.engine.host}
    with contextlib.ExitStack() as stack:
        stack.callback(_clear, world.engine, world.ground)
        run = Run(kubeflow_python(), "kubeflow", "container", world.ground / "kubeflow", world.index, **variables)
        stack.callback(run.close)
        yield run.outcomes()


@pytest.fixture(scope="module")
def trainmaster(world: World) -> Iterator[dict[str, str]]:
    with contextlib.ExitStack() as stack:
        server = ContainerServer(world.ground, world.engine, world.image)
        stack.callback(server.clean_up)
        server.start()
        at = {"TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key, **world.variables}
        home = world.ground / "trainmaster"
        run = Run(Path(sys.executable), "trainmaster", "container", home, world.index, **at)
        stack.callback(run.close)
        yield run.outcomes()


@pytest.mark.long  # as processes in test_blackbox.py; what is of containers alone in tests/contract
@pytest.mark.parametrize("case", CASES)
def test_ours_comes_to_what_the_table_says_in_containers(trainmaster: dict[str, str], case: str) -> None:
    row = outcomes.ROWS[case]
    assert trainmaster[case] == (row.in_containers or row.ours)


@pytest.mark.long
@pytest.mark.parametrize("case", LOOKED_AT)
def test_kubeflow_comes_to_what_the_table_says_in_containers(kubeflow: dict[str, str], case: str) -> None:
    assert kubeflow[case] == outcomes.ROWS[case].container
