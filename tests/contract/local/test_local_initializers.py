"""Initializers: what a job names is there before its ranks start, fetched once, and their secrets reach nobody else."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from local_servers import LocalServer, serving
from real_server import wait_for
from seaweed_server import KEY, SECRET, SeaweedServer
from training.data_servers import Hub
from training.data_servers import serving as answering
from trainmaster.jobs import objects

TOKEN = "canary-hub-token-71e0"
WRONG = "canary-wrong-key-2f9c"

SHOWS = """
import hashlib, json, os, pathlib
found = {}
for name in ("DATASET_PATH", "MODEL_PATH"):
    if name in os.environ:
        here = pathlib.Path(os.environ[name])
        files = sorted(path for path in here.rglob("*") if path.is_file())
        found[name] = {str(path.relative_to(here)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
secret = [name for name, value in os.environ.items() if "canary" in value or "INITIALIZER" in name]
print(json.dumps({"node": os.environ["NODE_RANK"], "found": found, "secret": secret}), flush=True)
"""

DATASET = {"README.md": b"about", "data/train.jsonl": b'{"text": "row"}\n' * 50, "data/big.bin": b"x" * 1000}
MODEL = {"config.json": b"{}", "model.safetensors": b"weights" * 300, "pytorch_model.bin": b"again" * 300}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    repositories = {
        "datasets/org/rows": DATASET,
        "datasets/org/broken": {"a.txt": b"first", "b.txt": b"second"},
        "datasets/org/shaky": {"a.txt": b"only"},
        "models/org/secret": MODEL,
    }
    with answering(
        Hub(repositories=repositories, gated={"models/org/secret", "datasets/org/broken"}, token=TOKEN)
    ) as hub:
        yield hub


@pytest.fixture(scope="module")
def shared_server(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    home = tmp_path_factory.mktemp("initializers")
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf")}
    with serving(home / "data", "files", "--data-root", str(home), **environment) as server:
        yield server


@pytest.fixture
def s3(seaweed: SeaweedServer) -> dict[str, str]:
    """What an initializer has to know of the store."""
    return {"endpoint": seaweed.url, "access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}


def submit(server: LocalServer, initializers: dict[str, Any], **document: Any) -> str:
    workload = {"argv": [sys.executable, "-c", SHOWS], "initializers": initializers}
    return server.submit_workload("command", workload, **document)


def seen(server: LocalServer, job_id: str) -> list[dict[str, Any]]:
    """What the ranks of a job saw, once it has completed."""
    assert server.until(job_id)["status"] == "COMPLETED"
    return [json.loads(line) for line in server.lines(job_id, step="main")]


def digests(files: dict[str, bytes], *names: str) -> dict[str, str]:
    return {name: hashlib.sha256(files[name]).hexdigest() for name in names}


def test_hub_dataset_and_model_are_fetched_once_by_two_nodes(server: LocalServer, hub: Hub) -> None:
    initializers = {
        "dataset": {"type": "huggingface", "storage_uri": "hf://org/rows/data@v1", "ignore_patterns": ["*.bin"]},
        "model": {"type": "huggingface", "storage_uri": "hf://org/secret", "access_token": TOKEN},
    }
    expected = {
        "DATASET_PATH": digests(DATASET, "data/train.jsonl"),
        "MODEL_PATH": digests(MODEL, "config.json", "model.safetensors"),
    }
    gang = {"resource_config": {"gpu_count": 0, "node_count": 2}}
    job_id = submit(server, initializers, **gang)
    ranks = seen(server, job_id)
    assert sorted(rank["node"] for rank in ranks) == ["0", "1"]
    assert [rank["found"] for rank in ranks] == [expected, expected]
    assert sorted(hub.downloads) == ["config.json", "data/train.jsonl", "model.safetensors"]
    assert [rank["secret"] for rank in ranks] == [[], []]
    # Each is a step that tells what it does, in a log of its own.
    assert "fetching hf://org/rows/data@v1" in server.lines(job_id, step="dataset-initializer", node=0)
    notes = [event["message"] for event in server.events(job_id) if "model-initializer: hf://org/secret" in str(event)]
    assert any("2 files" in note for note in notes)
    # Another job fetches nothing.
    assert seen(server, submit(server, initializers))[0]["found"] == expected
    assert len(hub.downloads) == 3
    shown = [server.ask("GET", f"/v1/jobs/{job_id}{what}").text for what in ("", "/events", "/logs")]
    assert '"access_token":"***"' in shown[0].replace(" ", "")
    assert not any(TOKEN in text for text in shown)
    assert_nowhere(server, TOKEN)


def test_objects_below_a_prefix_are_fetched(server: LocalServer, seaweed: SeaweedServer, s3: dict[str, str]) -> None:
    prefix = put(seaweed, {"part/a.txt": b"first", "b.txt": b"second", "c.bin": b"third"})
    dataset = {"type": "s3", "storage_uri": prefix, "ignore_patterns": ["*.bin"], **s3}
    model = {"type": "s3", "storage_uri": f"{prefix}/b.txt", **s3}
    (rank,) = seen(server, submit(server, {"dataset": dataset, "model": model}))
    files = {"part/a.txt": b"first", "b.txt": b"second"}
    assert rank["found"] == {"DATASET_PATH": digests(files, *files), "MODEL_PATH": digests(files, "b.txt")}
    assert rank["secret"] == []
    assert_nowhere(server, SECRET)


def test_what_cannot_be_had_names_the_step_and_the_remedy(
    server: LocalServer, seaweed: SeaweedServer, s3: dict[str, str]
) -> None:
    wrong = {"type": "s3", "storage_uri": seaweed.new_prefix(), **s3, "secret_access_key": WRONG}
    nowhere = {"type": "s3", "storage_uri": "s3://no-such-bucket/rows", **s3}
    refused = {"type": "huggingface", "storage_uri": "hf://org/secret", "access_token": WRONG}
    cases: list[tuple[dict[str, Any], str, str]] = [
        (
            {"dataset": wrong},
            "CREDENTIALS_REFUSED",
            "give access_key_id and secret_access_key in workload.initializers",
        ),
        ({"dataset": nowhere}, "BAD_INPUT", "check its name, and the store's endpoint"),
        ({"dataset": {"type": "huggingface", "storage_uri": "hf://org/none"}}, "BAD_INPUT", "check the name"),
        ({"model": refused}, "CREDENTIALS_REFUSED", "give a token in workload.initializers.model.access_token"),
        ({"dataset": {"type": "huggingface", "storage_uri": "hf://org/rows/none"}}, "BAD_INPUT", "no such file"),
    ]
    jobs = [submit(server, initializers) for initializers, _, _ in cases]
    for job_id, (initializers, reason, message) in zip(jobs, cases, strict=True):
        job = server.until(job_id)
        (part,) = initializers
        error = job["error"]
        assert (job["status"], error["error_type"]) == ("FAILED", reason), error
        assert error["error_message"].startswith(f"{part}-initializer: ")
        assert message in error["error_message"]
    assert_nowhere(server, WRONG)


def test_download_that_was_killed_goes_on_with_what_is_missing(server: LocalServer, hub: Hub) -> None:
    broken = {"dataset": {"type": "huggingface", "storage_uri": "hf://org/broken", "access_token": TOKEN}}
    hub.held["b.txt"] = threading.Event()
    hub.downloads.clear()
    killed = submit(server, broken)
    try:
        wait_for(lambda: {"a.txt", "b.txt"} <= set(hub.downloads), "the downloads")

        def first_file() -> bool:
            blobs = server.directory.rglob("datasets--org--broken/blobs/*")
            return any(path.suffix != ".incomplete" for path in blobs)

        wait_for(first_file, "the first file")
        server.control(killed, "cancel")
        assert server.until(killed)["status"] == "CANCELLED"
    finally:
        hub.held.pop("b.txt").set()
    # Its child has its token.
    (rank,) = seen(server, server.control(killed, "retry")["job_id"])
    assert set(rank["found"]["DATASET_PATH"]) == {"a.txt", "b.txt"}
    assert [hub.downloads.count(name) for name in ("a.txt", "b.txt")] == [1, 2]
    assert not list(server.directory.rglob("*.incomplete"))


def test_source_that_does_not_answer_is_asked_again(server: LocalServer, hub: Hub) -> None:
    hub.statuses += [520]  # one that the client itself does not try again
    job_id = submit(server, {"dataset": {"type": "huggingface", "storage_uri": "hf://org/shaky"}})
    (rank,) = seen(server, job_id)
    assert set(rank["found"]["DATASET_PATH"]) == {"a.txt"}
    lines = "\n".join(server.lines(job_id, step="dataset-initializer"))
    assert "trying again in 2 s" in lines


READS = """
from trainmaster.jobs import data_cache
print(sum(batch.num_rows for batch in data_cache.record_batches()), flush=True)
"""


def test_table_is_parted_for_ranks(server: LocalServer, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyiceberg.catalog.sql import SqlCatalog

    catalog = SqlCatalog("tests", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{server.directory.parent}")
    catalog.create_namespace("made")
    table = catalog.create_table("made.rows", schema=pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": list(range(101))}))
    catalog.close()
    cached = {"type": "cache", "storage_uri": "cache://made/rows", "metadata_loc": table.metadata_location}
    workload = {
        "argv": [sys.executable, "-c", READS],
        "ranks_per_node": 2,
        "initializers": {"dataset": {**cached, "num_data_nodes": 2, "worker_cpu": "1", "worker_mem": "4Gi"}},
    }
    job_id = server.submit_workload("command", workload)
    assert server.until(job_id)["status"] == "COMPLETED"
    assert sorted(server.lines(job_id, step="main")) == ["50", "51"]
    assert any("becomes 2 shards" in line for line in server.lines(job_id, step="dataset-initializer"))


def put(seaweed: SeaweedServer, files: dict[str, bytes]) -> str:
    """A prefix on the store with these objects below it."""
    prefix = seaweed.new_prefix()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in seaweed.environment.items():
            patch.setenv(name, value)
        place = objects.open_place(prefix)
        for name, content in files.items():
            objects.put(place, place.below(name), content)
    return prefix


def assert_nowhere(server: LocalServer, secret: str) -> None:
    """See that no file of the server, and no command line, holds a secret."""
    files = [path for path in server.directory.rglob("*") if path.is_file()]
    assert any(b"-initializer" in path.read_bytes() for path in files)
    assert not [path for path in (*files, server._log_path) if secret.encode() in path.read_bytes()]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            shown = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        assert secret.encode() not in shown


def test_hub_that_does_not_answer_is_told_while_the_job_prepares(server: LocalServer) -> None:
    nobody = "http://127.0.0.1:9"
    initializers = {"dataset": {"type": "huggingface", "storage_uri": "hf://squad"}}
    workload = {"argv": ["true"], "initializers": initializers, "environment": {"HF_ENDPOINT": nobody}}
    job_id = server.submit_workload("command", workload)

    def told() -> str | None:
        job = server.job(job_id)
        return str(job["status_message"]) if job["status"] == "PREPARING" and job["status_message"] else None

    message = wait_for(lambda: (said := told()) and "asked again" in said and said, "a word of the Hub")
    assert message.startswith(f"squad: the Hub at {nobody} does not answer; it is asked again, for up to 2 minutes")
    server.control(job_id, "cancel")


LOOKS = """
import json, os, sys
print(json.dumps({
    "argument": sys.argv[1],
    "variable": os.environ["ROWS"],
    "there": os.path.isdir("/workspace/dataset"),
    "rows": sorted(os.listdir(sys.argv[1])),
}), flush=True)
if not os.path.isdir("/workspace/dataset"):
    open("/workspace/dataset/README.md")
"""


def test_ranks_find_the_dataset_where_kubeflow_has_it(server: LocalServer) -> None:
    """As root in a mount namespace of the job's own; else words are changed, and a program's own path is told."""
    workload = {
        "argv": [sys.executable, "-c", LOOKS, "/workspace/dataset"],
        "environment": {"ROWS": "/workspace/dataset/data"},
        "initializers": {"dataset": {"type": "huggingface", "storage_uri": "hf://org/rows"}},
    }
    job = server.until(server.submit_workload("command", workload))
    (line,) = [json.loads(line) for line in server.lines(job["job_id"], step="main", stream="stdout")]
    assert line["rows"] == ["README.md", "data"]
    if line["there"]:
        assert job["status"] == "COMPLETED"
        assert (line["argument"], line["variable"]) == ("/workspace/dataset", "/workspace/dataset/data")
    else:
        assert line["argument"].endswith("/prepared/dataset")
        assert line["variable"].endswith("/prepared/dataset/data")
        assert "read os.environ['DATASET_PATH'] instead" in job["error"]["error_message"]
    assert not os.path.exists("/workspace/dataset")  # nobody else sees it
