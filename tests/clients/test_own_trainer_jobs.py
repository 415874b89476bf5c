"""Our own `TrainerJobManager` against a real server, with the public client that trains on what it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from client_model import FIREWORKS_NAME
from client_programs import Client, kill_trainer

from real_server import RealServer, wait_for
from trainmaster import TrainerJobConfig, TrainerJobManager
from trainmaster.sdk.fireworks import ResumeRefusedError, TrainerStoppedError, TrainingAPIError

pytestmark = pytest.mark.timeout(400)
POLL_S = 0.2


@pytest.fixture(scope="module")
def manager(service_server: RealServer) -> Iterator[TrainerJobManager]:
    with TrainerJobManager(api_key=service_server.key, base_url=service_server.url) as opened:
        yield opened


def test_jobs_live_from_creation_to_deletion(
    manager: TrainerJobManager, service_server: RealServer, client: Callable[[str], Client]
) -> None:
    profile = manager.resolve_training_profile("cpu")
    config = TrainerJobConfig(
        base_model=FIREWORKS_NAME,
        lora_rank=4,
        training_shape_ref=profile.training_shape_version,
        display_name="mine",
        requested_job_id="own",
    )
    endpoint = manager.create_and_wait(config, POLL_S)
    assert manager.create(config).job_id == endpoint.job_id
    job = manager.get("own")
    assert (job["state"], job["displayName"]) == ("JOB_STATE_RUNNING", "mine")
    assert manager.wait_for_existing("own", POLL_S) == endpoint

    kill_trainer(service_server, service_server.job("own")["job_id"])
    assert manager.reconnect_and_wait("own", POLL_S) == endpoint
    service_server.data("POST", "/v1/jobs/own/pause", {})
    wait_for(lambda: manager.get("own")["state"] == "JOB_STATE_PAUSED", "the job to be paused")
    assert manager.resume_and_wait("own", POLL_S) == endpoint

    assert manager.list_checkpoints("own") == []
    manager.delete("own")
    with pytest.raises(TrainerStoppedError):
        manager.wait_for_existing("own", POLL_S)
    with pytest.raises(TrainerStoppedError, match="was deleted"):
        manager.create(config)


def test_refusals_say_why(manager: TrainerJobManager) -> None:
    with pytest.raises(TrainingAPIError, match="nobodys"):
        manager.create(TrainerJobConfig(base_model="accounts/fireworks/models/nobodys"))
    with pytest.raises(ResumeRefusedError, match="nobodys"):
        manager.resume_and_wait("nobodys")
    with pytest.raises(TrainingAPIError, match="nobodys"):
        manager.get("nobodys")
    with pytest.raises(TrainingAPIError, match="nobodys"):
        manager.resolve_training_profile("nobodys")
