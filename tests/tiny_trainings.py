"""Job documents of small trainings, and looks into what they leave."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from job_server import JobServer
from patience import PATIENCE_S

EXAMPLES = Path(__file__).parents[1] / "examples"
SUFFIXES_OF_PICKLES = {".pt", ".pth", ".bin", ".pkl", ".pickle"}


def document(model: Path, data: Path, training_type: str = "LORA", **changes: Any) -> dict[str, Any]:
    """A training of a few dozen steps on the CPU that saves every five."""
    training = {
        "training_type": training_type,
        "base_model": {"model_id": str(model)},
        "hyperparameters": {"max_steps": "24", "learning_rate": "1e-3", "logging_steps": "1", "lora_dropout": "0.1"},
        **changes.pop("training_config", {}),
    }
    if training_type != "LORA":
        training["hyperparameters"].pop("lora_dropout", None)
    return {
        "name": f"tiny-{training_type.lower()}",
        "training_config": training,
        "data_config": {
            "sources": [{"path": str(data)}],
            "max_seq_length": 64,
            "batch_size": 8,
            "seed": 11,
            **changes.pop("data_config", {}),
        },
        "resource_config": {"gpu_count": 0, **changes.pop("resource_config", {})},
        "output_config": {"checkpoint": {"save_steps": 5}, **changes.pop("output_config", {})},
        **changes,
    }


def submit(server: JobServer, job: dict[str, Any]) -> str:
    """Submit it; its id."""
    return str(server.data("POST", "/v1/jobs", job)["job_id"])


def finish(server: JobServer, job_id: str) -> dict[str, Any]:
    """Wait for its end, which must be a success."""
    job: dict[str, Any] = server.until(job_id, "COMPLETED", "FAILED", "PREEMPTED", "CANCELLED", timeout_s=PATIENCE_S)
    assert job["status"] == "COMPLETED", (job["error_message"], server.lines(job_id)[-30:])
    return job


def output(server: JobServer, job_id: str) -> Path:
    """Where its results lie."""
    return server.directory / "artifacts" / job_id / "output"


def weights_digest(directory: Path) -> str:
    """Of all weights in a directory."""
    files = sorted(directory.rglob("*.safetensors"))
    assert files, f"no weights in {directory}"
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def pickles(directory: Path) -> list[Path]:
    """Files that would have to be unpickled."""
    return [path for path in directory.rglob("*") if path.suffix in SUFFIXES_OF_PICKLES]


def series(server: JobServer, job_id: str, name: str) -> list[tuple[int, float]]:
    """The points of a metric."""
    found = server.data("GET", f"/v1/jobs/{job_id}/metrics?names={name}")["series"]
    return [(int(step), float(value)) for one in found if one["name"] == name for step, _, value in one["points"]]


def statuses(server: JobServer, job_id: str) -> list[str]:
    """What it went through."""
    return [event["to"] for event in server.events_of(job_id, "status")]


def rows(path: Path) -> list[Any]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
