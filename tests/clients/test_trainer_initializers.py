"""Datasets and models that `TrainerClient` names: fetched before the function or the built-in trainer starts, once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_model import make_model
from real_server import PATIENCE_S, RealServer, running, wait_for
from seaweed_server import ASKER, ASKER_SECRET, KEY, ROLE, SECRET, SeaweedServer
from training.data_servers import Hub, serving
from trainmaster import TrainerClient
from trainmaster.trainer import (
    BuiltinTrainer,
    CustomTrainer,
    DataCacheInitializer,
    DataFormat,
    DataType,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    Loss,
    S3DatasetInitializer,
    S3ModelInitializer,
    ServerBackendConfig,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TrainJob,
)

TOKEN = "canary-hub-token-5d20"
ROWS = [{"question": "how many birds are there", "answer": "one red bird in that old tree"}] * 64
MODEL_OF_STORE = {"config.json": b"{}", "weights/model.safetensors": b"weights" * 300, "pytorch_model.bin": b"again"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The hub, with a model that can be trained and rows to train it with."""
    model = make_model(tmp_path_factory.mktemp("hub") / "tiny")
    repositories = {
        "models/org/tiny": {path.name: path.read_bytes() for path in model.iterdir()},
        "datasets/org/rows": {"train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode()},
    }
    with serving(Hub(repositories=repositories, gated={"datasets/org/rows"}, token=TOKEN)) as started:
        yield started


@pytest.fixture(scope="module")
def server(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    home = tmp_path_factory.mktemp("initializers")
    environment = {"HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1"}
    with running(home / "data", "--data-root", str(home), **environment) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[TrainerClient]:
    with TrainerClient(ServerBackendConfig(url=server.url, api_key=server.key)) as made:
        yield made


@pytest.fixture
def s3(seaweed: SeaweedServer) -> dict[str, str]:
    """What an initializer has to know of the store."""
    return {"endpoint": seaweed.url, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}


def look_around() -> dict[str, Any]:
    """What lies where the initializers put it, and whether its files are those of another job."""
    import os
    from pathlib import Path

    found: dict[str, Any] = {}
    for name in ("DATASET_PATH", "MODEL_PATH"):
        place = Path(os.environ[name]) if name in os.environ else None
        files = sorted(path for path in place.rglob("*") if path.is_file()) if place else []
        found[name] = {str(path.relative_to(place)): [path.stat().st_size, path.stat().st_ino] for path in files}
    found["secrets"] = [name for name, value in os.environ.items() if "canary" in value or "-secret" in value]
    print("looked", flush=True)
    return found


def count_rows() -> int:
    """The rows of the table that this rank has."""
    from trainmaster.jobs import data_cache

    return sum(batch.num_rows for batch in data_cache.record_batches())


def finished(client: TrainerClient, name: str) -> TrainJob:
    return client.wait_for_job_status(name, timeout=3 * PATIENCE_S, polling_interval=0.1)


def steps(job: TrainJob) -> dict[str, str | None]:
    return {step.name: step.status for step in job.steps}


def test_dataset_and_model_are_steps_and_come_once(
    client: TrainerClient, hub: Hub, seaweed: SeaweedServer, s3: dict[str, str]
) -> None:
    initializer = Initializer(
        dataset=HuggingFaceDatasetInitializer(storage_uri="hf://org/rows", access_token=TOKEN),
        model=S3ModelInitializer(storage_uri=seaweed.put(MODEL_OF_STORE), **s3),
    )
    hub.held["train.jsonl"] = threading.Event()
    try:
        name = client.train(initializer=initializer, trainer=CustomTrainer(func=look_around))
        lines = client.get_job_logs(name, step="dataset-initializer", follow=True)
        assert next(lines) == "fetching hf://org/rows"
        expected = {"dataset-initializer": "Running", "model-initializer": "Created", "node-0": "Created"}
        assert wait_for(lambda: steps(client.get_job(name)) == expected, "the first step")
    finally:
        hub.held.pop("train.jsonl").set()
    assert set(steps(finished(client, name)).values()) == {"Complete"}
    found = client.get_job_result(name)
    assert set(found["DATASET_PATH"]) == {"train.jsonl"}
    # By its default, a model comes without weights that would have to be unpickled.
    assert {path: size for path, (size, _) in found["MODEL_PATH"].items()} == {
        "config.json": 2,
        "weights/model.safetensors": 2100,
    }
    assert found["secrets"] == []
    assert list(client.get_job_logs(name)) == ["looked"]
    assert any(line.startswith("fetching s3://") for line in client.get_job_logs(name, step="model-initializer"))
    brought = [event.message for event in client.get_job_events(name) if "-initializer: " in event.message]
    assert [message.partition(":")[0] for message in brought] == ["dataset-initializer", "model-initializer"]

    again = client.train(initializer=initializer, trainer=CustomTrainer(func=look_around))
    finished(client, again)
    assert client.get_job_result(again) == found, "files of its own: it fetched them again"
    assert hub.downloads.count("train.jsonl") == 1


def test_store_is_read_in_a_role_and_refuses_whoever_has_not_that_one(
    client: TrainerClient, seaweed: SeaweedServer
) -> None:
    where = {"storage_uri": seaweed.put({"a.txt": b"first"}), "endpoint": seaweed.url, "region": "us-east-1"}
    asker = {"access_key_id": ASKER, "secret_access_key": ASKER_SECRET}
    cases = {"without": {}, "in it": {"role_arn": ROLE}, "in another": {"role_arn": f"{ROLE}-of-others"}}
    names = {
        case: client.train(
            initializer=Initializer(dataset=S3DatasetInitializer(**where, **asker, **role)),
            trainer=CustomTrainer(func=look_around),
        )
        for case, role in cases.items()
    }
    finished(client, names["in it"])
    assert set(client.get_job_result(names["in it"])["DATASET_PATH"]) == {"a.txt"}
    for case, says in (("without", "give access_key_id"), ("in another", "the role cannot be assumed: AccessDenied")):
        with pytest.raises(RuntimeError, match=rf"CREDENTIALS_REFUSED.*dataset-initializer: .*{says}"):
            finished(client, names[case])
        assert steps(client.get_job(names[case])) == {"dataset-initializer": "Failed", "node-0": "Created"}


@pytest.mark.long
def test_table_is_read_in_a_role(client: TrainerClient, seaweed: SeaweedServer, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    store = {"s3.endpoint": seaweed.url, "s3.access-key-id": KEY, "s3.secret-access-key": SECRET}
    place = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": seaweed.new_prefix()}
    catalog = SqlCatalog("tests", **place, **store, **{"s3.region": "us-east-1"})
    catalog.create_namespace("made")
    table = catalog.create_table("made.rows", schema=pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": list(range(101))}))
    catalog.close()
    name = client.train(
        initializer=Initializer(
            dataset=DataCacheInitializer(
                storage_uri="cache://made/rows",
                metadata_loc=table.metadata_location,
                num_data_nodes=2,
                head_cpu="1",
                worker_cpu="1",
                worker_mem="4Gi",
                iam_role=ROLE,
            )
        ),
        trainer=CustomTrainer(
            func=count_rows,
            env={
                "AWS_ENDPOINT_URL": seaweed.url,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": ASKER,
                "AWS_SECRET_ACCESS_KEY": ASKER_SECRET,
            },
        ),
    )
    finished(client, name)
    assert client.get_job_result(name) == 101
    assert any("becomes 2 shards" in line for line in client.get_job_logs(name, step="dataset-initializer"))


# tests/unit/trainer/test_compiling.py has the job that is made of it; tests/contract/training runs such jobs.
@pytest.mark.long
def test_built_in_trainer_fine_tunes_what_the_initializer_names(
    client: TrainerClient, server: RealServer, hub: Hub
) -> None:
    name = client.train(
        initializer=Initializer(
            dataset=HuggingFaceDatasetInitializer(storage_uri="hf://org/rows", access_token=TOKEN),
            model=HuggingFaceModelInitializer(storage_uri="hf://org/tiny"),
        ),
        trainer=BuiltinTrainer(
            config=TorchTuneConfig(
                dtype=DataType.FP32,
                batch_size=4,
                epochs=4,
                loss=Loss.CEWithChunkedOutputLoss,
                resources_per_node={"gpu": 0},
                peft_config=LoraConfig(lora_rank=4, lora_alpha=64, apply_lora_to_mlp=True),
                dataset_preprocess_config=TorchTuneInstructDataset(
                    source=DataFormat.JSON, split="train", column_map={"input": "question", "output": "answer"}
                ),
            )
        ),
    )
    job = finished(client, name)
    assert (job.runtime.name, steps(job)) == ("trainmaster-lora", {"prepare": "Complete", "node-0": "Complete"})
    assert (job.progress.step, job.progress.total_steps) == (64, 64)
    document = server.job(name)
    (series,) = server.data("GET", f"/v1/jobs/{name}/metrics?names=loss")["series"]
    losses = [value for _, _, value in series["points"]]
    assert losses[-1] < 0.8 * losses[0], losses
    output = server.directory / "artifacts" / document["job_id"] / "output"
    adapter = json.loads(next(output.rglob("adapter_config.json")).read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (4, 64)
    assert set(adapter["target_modules"]) == {"q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert next(output.rglob("adapter_model.safetensors")).stat().st_size > 0
