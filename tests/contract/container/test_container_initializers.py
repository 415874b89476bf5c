"""Initializers in containers: images that fetch by their own command, and our own in the job's image."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import pytest

import relay
from container_engine import SITE, plain_image
from container_servers import PACKAGES, ContainerServer
from patience import PATIENCE_S
from process_signals import kill_claimant
from real_server import wait_for
from seaweed_server import KEY as STORE_KEY
from seaweed_server import SECRET as STORE_SECRET
from seaweed_server import SeaweedServer
from training.data_servers import Hub, serving
from trainmaster.protocol.processes import identity_of
from trainmaster.trainer import (
    ContainerBackendConfig,
    CustomTrainer,
    HuggingFaceDatasetInitializer,
    Initializer,
    TrainerClient,
)

TOKEN, KEY, SECRET = "canary-token-3c1e", "canary-key-77ab", "canary-secret-90d2"

FETCH = r"""
echo "fetching $STORAGE_URI"
env > "$OUTPUT_PATH/environment"
case $STORAGE_URI in
    */held*) while [ ! -e /gate/open ]; do sleep 0.05; done ;;
    */deaf*) trap '' TERM; while :; do sleep 1; done ;;
    */none*) echo "there is no such repository" >&2; exit 3 ;;
    */large*) rows=rows; while :; do rows=$rows$rows; done ;;
esac
echo "rows of $STORAGE_URI" > "/workspace/${OUTPUT_PATH##*/}/rows"
"""

SHOWS = """
import json, os, pathlib, time
found = {}
for name in ("DATASET_PATH", "MODEL_PATH"):
    if name in os.environ:
        here = pathlib.Path(os.environ[name])
        lines = (here / "environment").read_text().splitlines()
        found[name] = {"rows": (here / "rows").read_text().strip(), "given": dict(x.split("=", 1) for x in lines)}
        assert here.samefile("/workspace/" + name.split("_")[0].lower())  # where Kubeflow's ranks find it
secret = [name for name, value in os.environ.items() if "canary" in value]
print(json.dumps({"rank": os.environ["RANK"], "found": found, "secret": secret}), flush=True)
"""

DATASET = {"type": "huggingface", "storage_uri": "hf://org/rows"}


@pytest.fixture(scope="module")
def fetcher(container_server: ContainerServer) -> Iterator[str]:
    """An image that fetches, in a way, and knows nothing of us."""
    recipe = container_server.home / "fetcher"
    recipe.mkdir()
    (recipe / "fetch.sh").write_text(FETCH)
    (recipe / "Dockerfile").write_text(
        f'FROM {plain_image(container_server.engine)}\nCOPY fetch.sh /fetch.sh\nENTRYPOINT ["sh"]\nCMD ["/fetch.sh"]\n'
    )
    with built(container_server, recipe) as name:
        yield name


@contextlib.contextmanager
def built(server: ContainerServer, recipe: Path) -> Iterator[str]:
    """The image of a recipe, by a name that nobody else has; what others made of the same stays."""
    name = f"localhost/trainmaster-test:{uuid.uuid4().hex[:12]}"
    server.engine.podman("build", "--quiet", "--tag", name, str(recipe))
    try:
        yield name
    finally:
        with contextlib.suppress(AssertionError):  # somebody has a container of the very same image
            server.engine.podman("rmi", "--ignore", name)


@pytest.fixture
def gate(container_server: ContainerServer, tmp_path: Path) -> Path:
    """A directory that a held initializer sees, and waits in until there is a file `open`."""
    directory = container_server.home / tmp_path.name
    directory.mkdir()
    return directory


def held(gate: Path, fetcher: str) -> dict[str, Any]:
    """What a workload says that is to be held."""
    return {
        "initializers": {"dataset": {**DATASET, "storage_uri": "hf://org/held", "image": fetcher}},
        "volumes": [volume(gate, "/gate")],
    }


def volume(source: Path, target: str) -> dict[str, Any]:
    return {"source": str(source), "target": target, "read_only": True}


def seen(server: ContainerServer, job_id: str) -> list[dict[str, Any]]:
    """What the ranks saw, once the job has completed."""
    job = server.until(job_id)
    assert job["status"] == "COMPLETED", [job["error"], server.lines(job_id)]
    return [json.loads(line) for line in server.lines(job_id, step="main")]


def test_images_fetch_as_kubeflows_do_and_their_secrets_reach_nobody_else(
    container_server: ContainerServer, fetcher: str
) -> None:
    server = container_server
    dataset = {**DATASET, "ignore_patterns": ["*.bin", "*.pt"], "access_token": TOKEN, "image": fetcher}
    keys = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "here", "role_arn": "role"}
    model = {"type": "s3", "storage_uri": "s3://bucket/model", "endpoint": "http://store:1", **keys, "image": fetcher}
    workload = {"initializers": {"dataset": dataset, "model": model}, "ranks_per_node": 2}
    job_id = server.run("python3", "-c", SHOWS, workload={**workload, "environment": {"OWN": "word"}})
    ranks = sorted(seen(server, job_id), key=lambda rank: str(rank["rank"]))
    assert [rank["rank"] for rank in ranks] == ["0", "1"]
    assert [rank["secret"] for rank in ranks] == [[], []]
    found = ranks[0]["found"]
    assert [found[name]["rows"] for name in found] == ["rows of hf://org/rows", "rows of s3://bucket/model"]
    given = {name: found[name]["given"] for name in found}
    asked = {
        "DATASET_PATH": {
            "STORAGE_URI": "hf://org/rows",
            "OUTPUT_PATH": "/workspace/dataset",
            "IGNORE_PATTERNS": "*.bin,*.pt",
            "ACCESS_TOKEN": TOKEN,
        },
        "MODEL_PATH": {
            "STORAGE_URI": "s3://bucket/model",
            "OUTPUT_PATH": "/workspace/model",
            "ENDPOINT": "http://store:1",
            "REGION": "here",
            "ROLE_ARN": "role",
            "ACCESS_KEY_ID": KEY,
            "SECRET_ACCESS_KEY": SECRET,
            "IGNORE_PATTERNS": "*.msgpack,*.h5,*.bin,*.pt,*.pth",
        },
    }
    for name, expected in asked.items():
        assert expected.items() <= given[name].items()
        assert given[name]["OWN"] == "word"
        assert not [variable for variable in given[name] if variable.startswith(("TRAINMASTER_", "KUBEFLOW_"))]
    assert TOKEN not in given["MODEL_PATH"].values()
    assert not {KEY, SECRET} & set(given["DATASET_PATH"].values())
    assert server.lines(job_id, step="dataset-initializer") == ["fetching hf://org/rows"]
    steps = [record["step"] for record in records(server, job_id) if record["type"] == "step_started"]
    assert steps == ["dataset-initializer", "model-initializer", "main"]
    assert [record["type"] for record in records(server, job_id)].count("claimed") == 1
    server.wait_until_cleared(job_id)


@pytest.mark.long
def test_function_of_a_client_finds_what_its_image_fetched(
    container_server: ContainerServer, fetcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = container_server

    def train() -> dict[str, Any]:
        import os
        import pathlib

        from trainmaster.trainer import update_trainjob_status

        told = update_trainjob_status(50, metrics={"loss": 0.5})
        return {"told": told, "rows": pathlib.Path(os.environ["DATASET_PATH"], "rows").read_text().strip()}

    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.key)
    config = ContainerBackendConfig(
        pull_policy="Never", dataset_initializer_image=fetcher, initializer_timeout=300, container_runtime="podman"
    )
    with TrainerClient(config) as client:
        name = client.train(
            runtime="python",
            trainer=CustomTrainer(func=train, image=server.image),
            initializer=Initializer(dataset=HuggingFaceDatasetInitializer("hf://org/rows")),
        )
        client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.2)
        assert client.get_job_result(name) == {"told": True, "rows": "rows of hf://org/rows"}
        assert list(client.get_job_logs(name, step="dataset-initializer")) == ["fetching hf://org/rows"]
        job_id = server.data("GET", f"/v1/jobs/{name}")["job_id"]
    written = json.loads((server.directory / "runs" / job_id / "1" / "request.json").read_text())
    assert [(step["image"], step["timeout_s"]) for step in written["launch"]["steps"]] == [(fetcher, 300), (None, None)]
    server.wait_until_cleared(job_id)


@pytest.mark.long  # each half of it is proven by others
def test_nodes_without_python_fetch_each_for_itself(container_server: ContainerServer, fetcher: str) -> None:
    server = container_server
    script = 'cat "$DATASET_PATH/rows"; echo "node $NODE_RANK of $WORLD_SIZE"'
    workload = {"image": plain_image(server.engine), "initializers": {"dataset": {**DATASET, "image": fetcher}}}
    job_id = server.run("sh", "-c", script, workload=workload, resources={"node_count": 2})
    job = server.until(job_id, timeout_s=PATIENCE_S)
    assert job["status"] == "COMPLETED", [job["error"], server.lines(job_id)]
    rows = "rows of hf://org/rows"
    assert sorted(server.lines(job_id, step="main")) == ["node 0 of 2", "node 1 of 2", rows, rows]
    assert server.lines(job_id, step="dataset-initializer") == ["fetching hf://org/rows"] * 2
    server.wait_until_cleared(job_id)


def test_initializer_that_fails_says_how_and_nothing_is_left(container_server: ContainerServer, fetcher: str) -> None:
    server = container_server

    def submit(uri: str, resources: Any = None, **spec: Any) -> str:
        initializers = {"dataset": {**DATASET, "storage_uri": uri, "image": fetcher, **spec}}
        return server.run("true", workload={"initializers": initializers}, resources=resources)

    missing = submit("hf://org/none")
    deaf = submit("hf://org/deaf", timeout_s=2)
    large = submit("hf://org/large", resources={"ram_min_mb": 128})
    absent = submit("hf://org/rows", image="localhost/there-is-none:1")
    cases = {
        missing: ("EXITED_NONZERO", "step dataset-initializer exited with code 3"),
        deaf: ("STORAGE_UNAVAILABLE", "step dataset-initializer took longer than 2 s, and was ended"),
        large: ("OUT_OF_MEMORY", "out of memory"),
        absent: ("LAUNCH_REFUSED", "there is no image localhost/there-is-none:1"),
    }
    for job_id, (reason, message) in cases.items():
        job = server.until(job_id)
        error = job["error"]
        assert (job["status"], error["error_type"]) == ("FAILED", reason), error
        assert message in error["error_message"]
        server.wait_until_cleared(job_id)
    written = server.run_directory(missing).document("nodes/0/exit.json")
    assert written is not None
    assert (written["step"], written["exit_code"]) == ("dataset-initializer", 3)
    assert written["evidence"]["last_lines"] == ["fetching hf://org/none", "there is no such repository"]


@pytest.mark.long  # the killed worker below leaves none, either
def test_cancelled_initializer_is_ended_with_its_container(
    container_server: ContainerServer, fetcher: str, gate: Path
) -> None:
    server = container_server
    job_id = server.run("true", workload=held(gate, fetcher))
    server.wait_for_line(job_id, "fetching", step="dataset-initializer")
    (name,) = server.containers(job_id)
    assert name.endswith("-0-dataset-initializer")
    server.until(job_id, "PREPARING")
    server.control(job_id, "cancel")
    assert server.until(job_id)["status"] == "CANCELLED"
    server.wait_until_cleared(job_id)


@pytest.mark.long
def test_initializer_goes_on_without_a_server_and_so_does_what_comes_after(
    container_server: ContainerServer, fetcher: str, gate: Path
) -> None:
    server = container_server
    workload = {**held(gate, fetcher), "environment": {"WORD": "kept"}}
    show = "import os; print(open(os.environ['DATASET_PATH'] + '/rows').read().strip(), os.environ['WORD'])"
    job_id = server.run("python3", "-c", show, workload=workload)
    server.wait_for_line(job_id, "fetching", step="dataset-initializer")
    worker = claimant(server, job_id)
    server.kill()
    try:
        (gate / "open").touch()
        wait_for(lambda: server.run_directory(job_id).document("nodes/0/exit.json"), "the node's end")
        wait_for(lambda: identity_of(worker) is None, "the end of its worker")
    finally:
        server.start()
    job = server.until(job_id)
    assert (job["status"], len(job["attempts"])) == ("COMPLETED", 1)
    assert server.lines(job_id, step="main") == ["rows of hf://org/held kept"]
    server.wait_until_cleared(job_id)


@pytest.mark.long
def test_node_whose_container_cannot_be_made_after_its_initializers_says_why(
    container_server: ContainerServer, fetcher: str, gate: Path
) -> None:
    server = container_server
    (gate / "Dockerfile").write_text(f"FROM {server.image}\nLABEL made={gate}\n")
    with built(server, gate) as image:
        job_id = server.run("true", workload={**held(gate, fetcher), "image": image})
        server.wait_for_line(job_id, "fetching", step="dataset-initializer")
    (gate / "open").touch()
    job = server.until(job_id)
    assert (job["status"], job["error"]["error_type"]) == ("FAILED", "LAUNCH_REFUSED"), job["error"]
    assert "no such image" in job["error"]["error_message"].lower()
    server.wait_until_cleared(job_id)


def test_worker_that_is_killed_leaves_no_container_before_or_after_it_has_handed_over(
    container_server: ContainerServer, fetcher: str, gate: Path
) -> None:
    server = container_server
    fetching = server.run("true", workload=held(gate, fetcher))
    done = {"initializers": {"dataset": {**DATASET, "image": fetcher}}}
    training = server.run("python3", "-c", "import time; print('up', flush=True); time.sleep(600)", workload=done)
    server.wait_for_line(fetching, "fetching", step="dataset-initializer")
    server.wait_for_line(training, "up")
    (name,) = server.containers(training)
    assert name.endswith(".1-0")
    for job_id in (fetching, training):
        kill_claimant(server.run_directory(job_id).claimant(0))
    for job_id in (fetching, training):
        job = server.until(job_id)
        assert (job["status"], job["error"]["error_type"]) == ("FAILED", "WORKER_LOST")
        server.wait_until_cleared(job_id)


def test_initializers_of_ours_fetch_in_the_image_of_the_job(
    container_server: ContainerServer, seaweed: SeaweedServer, tmp_path: Path
) -> None:
    server = container_server
    (tmp_path / "packages.pth").write_text("/packages\n")
    shutil.copy(certifi.where(), tmp_path / "authorities.pem")
    copies = {
        "packages.pth": f"{SITE}/",
        "authorities.pem": "/etc/ssl/certs/ca-certificates.crt",  # without any, the client of the store does not start
    }
    lines = [f"FROM {server.image}", *(f"COPY {name} {place}" for name, place in copies.items())]
    (tmp_path / "Dockerfile").write_text("\n".join(lines))
    rows = {"datasets/org/rows": {"train.jsonl": b"{}\n" * 50, "other.bin": b"x"}}
    show = (
        "import json, os\n"
        "paths = [os.environ[name] for name in ('DATASET_PATH', 'MODEL_PATH')]\n"
        "print(json.dumps([sorted(os.listdir(path)) for path in paths]))\n"
        "assert os.listdir('/workspace/dataset') == os.listdir(paths[0])\n"
        "print([name for name, value in os.environ.items() if 'canary' in value or value == 'tests-secret'])\n"
    )
    model = seaweed.put({"config.json": b"{}", "model.safetensors": b"weights" * 300, "model.bin": b"again"})
    with (
        built(server, tmp_path) as image,
        serving(Hub(repositories=rows, gated={"datasets/org/rows"}, token=TOKEN)) as hub,
        reached_from_containers(server, hub.url, seaweed.url) as (hub_url, store_url),
    ):
        keys = {"access_key_id": STORE_KEY, "secret_access_key": STORE_SECRET, "region": "us-east-1"}
        dataset = {**DATASET, "ignore_patterns": ["*.bin"], "access_token": TOKEN, "timeout_s": 120}
        workload = {
            "image": image,
            "initializers": {
                "dataset": dataset,
                "model": {"type": "s3", "storage_uri": model, "endpoint": store_url, **keys},
            },
            "environment": {"HF_ENDPOINT": hub_url},
            "volumes": [volume(PACKAGES, "/packages")],
        }
        job_id = server.run("python3", "-c", show, workload=workload)
        job = server.until(job_id)
        assert job["status"] == "COMPLETED", [job["error"], server.lines(job_id)]
        assert hub.downloads == ["train.jsonl"]
        server.wait_until_cleared(job_id)
    assert server.lines(job_id, step="main") == ['[["train.jsonl"], ["config.json", "model.safetensors"]]', "[]"]
    assert "fetching hf://org/rows" in server.lines(job_id, step="dataset-initializer")
    assert [event for event in server.events(job_id) if "dataset-initializer: hf://org/rows: 1 file" in str(event)]


@contextlib.contextmanager
def reached_from_containers(server: ContainerServer, *urls: str) -> Iterator[list[str]]:
    """Where containers reach servers that listen on this machine's loopback address."""
    name, mounts = f"relay-{uuid.uuid4().hex[:8]}", ["--volume", f"{Path(relay.__file__)}:/relay.py:ro"]
    with tempfile.TemporaryDirectory(prefix="tm-relay-", dir="/tmp") as directory, contextlib.ExitStack() as stack:
        inside = []
        for index, url in enumerate(urls):
            command = [sys.executable, relay.__file__, f"unix:{directory}/{index}", f"tcp:{urlsplit(url).netloc}"]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
            inside.append(f"python3 /relay.py tcp:0.0.0.0:{8001 + index} unix:/relay/{index} &")
            wait_for(lambda socket=Path(directory, str(index)): socket.exists(), "the relay")
        mounts += ["--volume", f"{directory}:/relay"]
        podman = server.engine.podman
        podman("run", "--detach", "--name", name, *mounts, server.image, "sh", "-c", f"{' '.join(inside)} wait")
        stack.callback(podman, "rm", "--force", "--time", "0", name)
        address = podman("inspect", "--format", "{{.NetworkSettings.IPAddress}}", name)
        yield [f"http://{address}:{8001 + index}" for index in range(len(urls))]


def claimant(server: ContainerServer, job_id: str) -> int:
    """The process that has the first node, on this machine."""
    claim = server.run_directory(job_id).claimant(0)
    assert claim is not None
    return int(claim["pid"])


def records(server: ContainerServer, job_id: str) -> list[dict[str, Any]]:
    """What the worker wrote down of the first node."""
    text = (server.directory / "runs" / job_id / "1" / "nodes" / "0" / "worker.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
