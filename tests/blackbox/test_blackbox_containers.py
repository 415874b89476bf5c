"""The cases in real containers, with the real kubeflow package and with ours: each comes to what `outcomes.py` says."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import outcomes
import pytest
from case_programs import CASES, Run, kubeflow_python, make_index

from container_engine import Engine, missing, python_image, running_engine
from container_servers import ContainerServer

pytestmark = pytest.mark.timeout(300)

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Both clients at once, each in its environment."""
    if (reason := missing()) is not None:
        pytest.skip(reason)
    ground = tmp_path_factory.mktemp("blackbox-containers")
    index = make_index(ground / "index")
    with running_engine() as engine, contextlib.ExitStack() as stack:
        image = python_image(engine)
        runtime = ground / "runtime.yaml"
        runtime.write_text(RUNTIME.format(image=image))
        around = {"BLACKBOX_RUNTIME": runtime.as_uri(), "BLACKBOX_INDEX": str(index.directory)}
        server = ContainerServer(ground, engine, image)
        stack.callback(server.clean_up)
        server.start()
        at = {"TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key, **around}
        ours = Run(Path(sys.executable), "trainmaster", "container", ground / "trainmaster", index, **at)
        stack.callback(ours.close)
        stack.callback(_clear, engine, ground)
        around["BLACKBOX_ENGINE"] = engine.host
        theirs = Run(kubeflow_python(), "kubeflow", "container", ground / "kubeflow", index, **around)
        stack.callback(theirs.close)
        yield {"kubeflow": theirs, "trainmaster": ours}


def _clear(engine: Engine, ground: Path) -> None:
    """Remove what kubeflow leaves: networks of jobs that it could not start, and what is still on them."""
    label = "label=trainer.kubeflow.org/workdir"
    for network in engine.podman("network", "ls", "--filter", label, "--format", "{{.Name}}").split():
        if str(ground) in engine.podman("network", "inspect", network):
            engine.podman("network", "rm", "--force", network)


@pytest.fixture(scope="module")
def kubeflow(runs: dict[str, Run]) -> dict[str, str]:
    return runs["kubeflow"].outcomes()


@pytest.fixture(scope="module")
def trainmaster(runs: dict[str, Run]) -> dict[str, str]:
    return runs["trainmaster"].outcomes()


@pytest.mark.parametrize("case", CASES)
def test_ours_comes_to_what_the_table_says_in_containers(trainmaster: dict[str, str], case: str) -> None:
    row = outcomes.ROWS[case]
    assert trainmaster[case] == (row.in_containers or row.ours)


@pytest.mark.parametrize("case", LOOKED_AT)
def test_kubeflow_comes_to_what_the_table_says_in_containers(kubeflow: dict[str, str], case: str) -> None:
    assert kubeflow[case] == outcomes.ROWS[case].container
