"""What a launch hands over: the secrets that were stored with the job, whoever launches it, and when."""

from __future__ import annotations

from pathlib import Path

from harness import Cluster
from sqlalchemy import Connection

from trainmaster.protocol.secrets import NO_SECRETS, Secrets
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.core.job import Job
from trainmaster.server.core.states import JobStatus
from trainmaster.server.settings.encryption import Sealer

WORKLOAD = {"kind": "command", "argv": ["true"], "environment": {"PASSWORD": "hunter2"}}
GIVEN = Secrets(environment={"PASSWORD": "hunter2"})


def test_launch_hands_over_what_was_sealed_with_the_job(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    job, plain = cluster.submit(workload=WORKLOAD), cluster.submit()
    cluster.until(lambda: all(one.status is JobStatus.COMPLETED for one in cluster.all_jobs()))
    assert cluster.world.given == {f"{job.job_id}.1": GIVEN, f"{plain.job_id}.1": NO_SECRETS}


def test_launch_by_another_server_than_took_the_job_opens_its_secrets(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    job = cluster.submit(workload=WORKLOAD)
    cluster.die()
    cluster.vault = JobSecrets(Sealer(b"n" * 32, [bytes(32)]))
    cluster.boot()
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.COMPLETED)
    assert cluster.world.given[f"{job.job_id}.1"] == GIVEN


def test_launch_without_the_key_starts_nothing_and_says_which_is_missing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    key_id = Sealer(bytes(32)).key_id
    job = cluster.submit(workload=WORKLOAD)
    cluster.die()
    cluster.vault = JobSecrets(Sealer(b"n" * 32))
    cluster.boot()
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.FAILED)
    assert cluster.world.started == []
    message = cluster.job(job.job_id).message
    assert message is not None
    assert key_id in message
    assert "hunter2" not in message


def test_launch_while_the_database_is_away_is_made_later(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    away = 2

    class Shaky(JobSecrets):
        def secrets_for(self, connection: Connection, job: Job) -> Secrets:
            nonlocal away
            away -= 1
            if away >= 0:
                raise StoreUnavailableError
            return super().secrets_for(connection, job)

    cluster.die()
    cluster.vault = Shaky(Sealer(bytes(32)))
    cluster.boot()
    job = cluster.submit(workload=WORKLOAD)
    cluster.until(lambda: cluster.job(job.job_id).status is JobStatus.COMPLETED)
    assert cluster.world.given == {f"{job.job_id}.1": GIVEN}
