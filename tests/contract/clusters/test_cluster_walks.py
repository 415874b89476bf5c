"""What users do with a cluster, from end to end, on every real engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from client_model import HUB_NAME, make_hub, make_model
from client_programs import Client, facts
from cluster_engines import ENGINES
from cluster_servers import ClusterServer
from engine_under_test import EngineUnderTest, wait_until_nothing_is_left
from job_server import json_lines
from local_servers import quiet_port
from patience import PATIENCE_S
from real_server import COMMAND, wait_for
from tiny_trainings import EXAMPLES, document, finish, output, submit, weights_digest
from trainmaster import TrainerClient
from trainmaster.trainer import CustomTrainer, ServerBackendConfig
from wheel_index import ServedIndex

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * PATIENCE_S)]

DATA = EXAMPLES / "data" / "questions.jsonl"
STEPS = 40

LEARNS = """
import json, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)  # the ranks begin with different weights, and each has other data
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.randn(64, 4)
losses = []
for _ in range(30):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
told = {"rank": rank, "size": dist.get_world_size(), "master": os.environ["MASTER_ADDR"]}
print(json.dumps({**told, "losses": losses, "weights": model.module.weight.tolist()}), flush=True)
dist.destroy_process_group()
"""


def test_ranks_on_two_nodes_train_one_model_over_gloo(server: ClusterServer) -> None:
    job_id = server.submit_source(LEARNS, resource_config={"gpu_count": 0, "node_count": 2})
    job = server.until(job_id)
    assert job["status"] == "COMPLETED", (job["error"], server.lines(job_id)[-30:])
    first, second = sorted(json_lines(server.lines(job_id)), key=lambda told: int(told["rank"]))
    assert [(told["rank"], told["size"]) for told in (first, second)] == [(0, 2), (1, 2)]
    assert first["master"] == second["master"] != ""
    assert first["weights"] == second["weights"]
    assert all(told["losses"][-1] < told["losses"][0] / 2 for told in (first, second))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the examples, on a path that all nodes have."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, EXAMPLES / "make_tiny_model.py", directory], check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.fixture(scope="session")
def undisturbed() -> dict[str, str]:
    """Engine -> the digest of what a training leaves there that nobody disturbs."""
    return {}


def lora(model: Path, **changes: Any) -> dict[str, Any]:
    hyperparameters = {"max_steps": str(STEPS), "learning_rate": "1e-3", "logging_steps": "1", "lora_dropout": "0.1"}
    training = {"hyperparameters": hyperparameters, **changes.pop("training_config", {})}
    return document(model, DATA, "LORA", resource_config={"gpu_count": 1}, training_config=training, **changes)


def digest_of_undisturbed(server: ClusterServer, model: Path, known: dict[str, str]) -> str:
    (kind,) = {engine.kind for engine in list(server.engines.values())[:1]}
    if kind not in known:
        job_id = submit(server, lora(model))
        finish(server, job_id)
        known[kind] = weights_digest(output(server, job_id))
    return known[kind]


def reached(server: ClusterServer, job_id: str, step: int) -> None:
    wait_for(lambda: (server.job(job_id)["progress"]["step"] or 0) >= step, f"step {step} of {job_id}")


def test_lora_that_is_preempted_ends_with_the_weights_of_one_that_is_not(
    server: ClusterServer, engine: EngineUnderTest, tiny_model: Path, undisturbed: dict[str, str]
) -> None:
    expected = digest_of_undisturbed(server, tiny_model, undisturbed)
    again = {"priority": 2, "preemptible": True, "max_retries": 1}
    job_id = submit(server, lora(tiny_model, scheduling_config=again))
    reached(server, job_id, 7)
    # It needs the GPUs of all nodes.
    everything = {"gpu_count": 2 * engine.gpus, "node_count": 2}
    urgent = server.submit("true", resource_config=everything, scheduling_config={"priority": 9})
    assert server.until(urgent)["status"] == "COMPLETED"
    job = finish(server, job_id)
    assert [attempt["reason"] for attempt in job["attempts"]] == ["PREEMPTED", "SUCCEEDED"]
    (resumed,) = server.events_of(job_id, "resumed")
    assert "from checkpoint" in resumed["message"]
    assert weights_digest(output(server, job_id)) == expected


def test_function_of_trainer_client_has_its_packages(
    server: ClusterServer, engine: EngineUnderTest, tmp_path: Path
) -> None:
    index = ServedIndex(tmp_path / "index", engine.address)
    index.add("gamma", "1.0", requires=["delta>=2"])
    index.add("delta", "2.5")
    try:
        with TrainerClient(ServerBackendConfig(url=server.url, api_key=server.key)) as client:
            trainer = CustomTrainer(
                func=add_versions,
                func_args={"more": "and 1"},
                packages_to_install=["gamma>=1"],
                pip_index_urls=[index.url],
                num_nodes=2,
            )
            name = client.train(trainer=trainer)
            client.wait_for_job_status(name, timeout=int(PATIENCE_S))
            assert client.get_job_result(name) == "1.0 and 2.5 and 1"
    finally:
        index.close()


def add_versions(more: str) -> str:
    import delta  # type: ignore[import-not-found]
    import gamma  # type: ignore[import-not-found]

    return f"{gamma.VERSION} and {delta.VERSION} {more}"


@pytest.fixture
def tinker_server(engine: EngineUnderTest, tmp_path: Path) -> Iterator[ClusterServer]:
    """A server that knows a model under the name that a public client asks for."""
    make_model(tmp_path / "model")
    make_hub(tmp_path / "hub")
    model = ("--data-root", str(tmp_path), "--model-alias", f"{HUB_NAME}={tmp_path / 'model'}")
    server = ClusterServer(tmp_path / "data", quiet_port(), {engine.kind: engine}, *model)
    try:
        yield server.start()
        server.end_all_jobs()
    finally:
        server.clean_up()


def test_tinker_client_trains_through_the_gateway_while_the_server_is_killed(
    engine: EngineUnderTest, tinker_server: ClusterServer, tmp_path: Path
) -> None:
    server = tinker_server

    def restart(_: dict[str, Any]) -> None:
        server.kill()
        server.start()

    client = Client("tinker", server, tmp_path / "hub")
    results = client.scenarios(
        "tinker_client.py", "restarted", "save_and_resume", asked={"restart the server": restart}
    )
    found = facts(results, "restarted")
    # The three passes see the same weights, as the step comes after them.
    assert len(set(found["during"])) == 1
    assert found["before"][-1] > found["during"][0] > found["after"][-1]
    saved = facts(results, "save_and_resume")
    assert saved["resumed"] == saved["went_on"]
    (job,) = server.data("GET", "/v1/jobs")["jobs"]
    assert (job["backend"], job["status"], job["attempt"]) == (engine.kind, "TRAINING", 1)
    assert engine.left(job["job_id"])


KINDS = list(ENGINES)


@pytest.mark.parametrize(("source", "target"), list(zip(KINDS, [*KINDS[1:], KINDS[0]], strict=True)))
def test_training_moves_to_another_engine_and_ends_with_the_same_weights(
    source: str,
    target: str,
    running_engines: Callable[[str], EngineUnderTest],
    tiny_model: Path,
    undisturbed: dict[str, str],
    tmp_path: Path,
) -> None:
    engines = {kind: running_engines(kind) for kind in (source, target)}
    roots = ("--data-root", str(tiny_model.parent), "--data-root", str(EXAMPLES))
    server = ClusterServer(tmp_path / "data", quiet_port(), engines, *roots)
    try:
        server.start()
        expected = digest_of_undisturbed(server, tiny_model, undisturbed)
        first = submit(server, lora(tiny_model))
        reached(server, first, 7)
        server.control(first, "cancel")
        ended = server.until(first, "CANCELLED")
        wait_until_nothing_is_left(engines[source], first)
        changes = (f"backend={target}", f"training_config.resume_from_checkpoint={ended['latest_checkpoint_id']}")
        second = clone(server, first, *changes)
        job = finish(server, second)
        assert (job["backend"], job["attempts"][0]["resume_checkpoint_id"]) == (target, ended["latest_checkpoint_id"])
        assert ended["progress"]["step"] < STEPS == job["progress"]["step"]
        assert weights_digest(output(server, second)) == expected
        server.end_all_jobs()
    finally:
        server.clean_up()


def clone(server: ClusterServer, job_id: str, *changes: str) -> str:
    """What `trainmaster clone` makes of a job."""
    settings = [word for change in changes for word in ("--set", change)]
    done = subprocess.run(
        [COMMAND, "clone", job_id, *settings, "--json"],
        env={**os.environ, "TRAINMASTER_URL": server.url, "TRAINMASTER_API_KEY": server.key},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["job_id"])
