"""What every scenario of `fireworks-ai` begins with."""

import os
from typing import Any

import fireworks.training.sdk as fireworks

URL = os.environ["FIREWORKS_BASE_URL"]
KEY = os.environ["FIREWORKS_API_KEY"]
MODEL = "accounts/fireworks/models/qwen3-8b"
JOB = "trained"
"""The trainer that most scenarios use."""
ADAM = fireworks.AdamParams(learning_rate=0.02)

manager = fireworks.TrainerJobManager(api_key=KEY, base_url=URL)


def started(job_id: str, **fields: Any) -> Any:
    config = fireworks.TrainerJobConfig(**{"base_model": MODEL, "requested_job_id": job_id, **fields})
    return manager.create_and_wait(config, poll_interval_s=0.2, timeout_s=300)


def base_url() -> str:
    """Where that trainer is."""
    return str(manager.wait_for_existing(JOB, poll_interval_s=0.2, timeout_s=300).base_url)


def service_at(base_url: str) -> Any:
    return fireworks.FiretitanServiceClient(base_url=base_url, api_key=KEY)


def trainer_at(base_url: str, **options: Any) -> Any:
    """A model on a trainer; two of the same options train alike."""
    return service_at(base_url).create_training_client(**{"base_model": MODEL, "lora_rank": 8, "seed": 1, **options})
