"""An API that knows a model and some training shapes, and its trainer jobs."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from api_world import VAULT, Served, World

from model_config import model_config
from patience import PATIENCE_S
from trainmaster.backends import capabilities_of
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.base_models import BaseModels
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.core.job import Job
from trainmaster.server.core.shapes import Shape, Shapes, ShapeVersion
from trainmaster.server.settings.settings import NamedPath
from trainmaster.server.storage import ARTIFACTS

MODEL = "accounts/fireworks/models/qwen3-8b"
ALIAS = "Qwen/Qwen3-8B"
SHAPES = Shapes(
    [
        Shape(
            name="gang",
            versions=(
                ShapeVersion(version="1", max_context_length=1024),
                ShapeVersion(
                    version="2",
                    region="eu-1",
                    accelerator_type="NVIDIA_H100_80GB",
                    accelerator_count=4,
                    node_count=2,
                    image_tag="trainer-7",
                    max_context_length=4096,
                    precision="bfloat16",
                    sampling_share=0.75,
                    deployment_shape="accounts/fireworks/deploymentShapes/d/versions/3",
                    deployment_image_tag="serving-2",
                ),
                ShapeVersion(version="3", validated=False, max_context_length=8192),
            ),
        ),
        Shape(name="frozen", versions=(ShapeVersion(version="1", trainer_mode="FORWARD_ONLY", max_context_length=9),)),
        Shape(
            name="whole", versions=(ShapeVersion(version="1", trainer_mode="POLICY_TRAINER", max_context_length=64),)
        ),
        Shape(
            name="split",
            versions=(ShapeVersion(version="1", max_context_length=64, sharding={"pipeline_parallelism": 2}),),
        ),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Door:
    """A client of the Fireworks door, with a key of one account."""

    http: httpx.Client
    world: World
    account_id: str
    key: str

    @property
    def jobs(self) -> str:
        return f"/v1/accounts/{self.account_id}/rlorTrainerJobs"

    def call(self, method: str, path: str, expect: int = 200, **options: Any) -> Any:
        """The body of an answer with the expected status; an error is checked for the form that clients read."""
        response = self.http.request(method, path, **options)
        assert response.status_code == expect, response.text
        document = response.json()
        if expect >= 400 and path.startswith("/v1/accounts/"):
            assert isinstance(document["code"], int)
            assert 0 < document["code"] <= 16
            [about] = document["details"]
            assert about["@type"] == "type.googleapis.com/google.rpc.ErrorInfo"
            assert about["reason"]
            assert document["message"]
        return document

    def create(self, job_id: str, expect: int = 200, *, query: dict[str, Any] | None = None, **fields: Any) -> Any:
        """Make a trainer by hand, as a bare TrainerJobConfig does; `trainingConfig` members begin with `config_`."""
        config = {name.removeprefix("config_"): value for name, value in fields.items() if name.startswith("config_")}
        rest = {name: value for name, value in fields.items() if not name.startswith("config_")}
        body = {
            "serviceMode": True,
            "keepAlive": False,
            "dataset": "",
            "trainingConfig": {"baseModel": MODEL, "loraRank": 8, "learningRate": 1e-5, **config},
            "useReservation": True,
            **rest,
        }
        params = {"skipValidations": "true"} if query is None else query
        return self.call("POST", self.jobs, expect, params={**params, "rlorTrainerJobId": job_id}, json=body)

    def get(self, job_id: str, expect: int = 200) -> Any:
        return self.call("GET", f"{self.jobs}/{job_id}", expect)

    def job(self, job_id: str) -> Job:
        """The record behind a trainer."""
        return self.world.job(self.http.get(f"/v1/jobs/{job_id}").json()["data"]["job_id"])

    def run(self, job_id: str, endpoint: str = "127.0.0.1:9") -> Job:
        """Have a trainer that was made run, and answer."""
        job = self.job(job_id)
        self.world.start(job.job_id)
        return self.world.see(job.job_id, endpoint=endpoint)

    def save(self, job: Job, kind: str, name: str, **attributes: Any) -> Path:
        """Have a running trainer register a checkpoint of a kind; returns its directory, with files of an adapter."""
        path = f"{job.job_id}/checkpoints/{kind}/{name}/1"
        directory = self.world.roots.path(ARTIFACTS, path)
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text(json.dumps({"r": 8, "target_modules": ["q_proj"]}))
        (directory / "adapter_model.safetensors").write_bytes(b"weights")
        (directory / "manifest.json").write_text("{}")
        said = {"base_model": MODEL, "is_lora": True, "lora_rank": 8, "model_id": "s:train:0", **attributes}
        record = {
            "type": "checkpoint",
            "checkpoint_id": f"{job.job_id}-{kind}-{name}",
            "step": 4,
            "size_bytes": 7,
            "root": ARTIFACTS,
            "path": path,
            "kind": kind,
            "name": name,
            "attributes": said,
        }
        self.world.see(job.job_id, record)
        return Path(directory)


class _Healthy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/v1/healthz" else 404)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")


@contextlib.contextmanager
def healthy() -> Iterator[str]:
    """Where somebody says that a trainer is well."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Healthy) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def knowing(world: World, directory: Path) -> Iterator[Served]:
    """The world's API, with a model under two names and shapes."""
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config()))
    aliases = [NamedPath(name, model) for name in (MODEL, ALIAS)]
    models = BaseModels(aliases, artifacts=world.roots.path(ARTIFACTS, ""))
    world.commands = Commands(
        world.database,
        admission=Admission(
            backends={"local": capabilities_of("local")}, default_backend="local", models=models, data_roots=[directory]
        ),
        vault=VAULT,
        hint=lambda subject: None,
    )
    with Served.serve(world.context(models=models, shapes=SHAPES)) as served:
        yield served


@contextlib.contextmanager
def door_of(world: World, served: Served, account_id: str) -> Iterator[Door]:
    key = world.key(account_id)
    with httpx.Client(base_url=served.url, headers={"X-Api-Key": key}, verify=False, timeout=PATIENCE_S) as http:
        yield Door(http=http, world=world, account_id=account_id, key=key)
