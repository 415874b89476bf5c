"""The secrets of jobs: sealed before they are stored, opened when an attempt is launched."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection

from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.job import Job
from trainmaster.server.core.spec.documents import load_stored, redacted, unsealed_values, with_secrets_of
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.store import job_inputs
from trainmaster.server.store.job_inputs import SealedSecret
from trainmaster.server.store.scope import Scope


class Vault:
    """Seals and opens the secrets of jobs. Each is bound to its job: it does not open in the row of another."""

    def __init__(self, sealer: Sealer) -> None:
        self.sealer = sealer

    def seal(self, job: Job, values: Mapping[str, str], *, until_end: bool = False) -> list[SealedSecret]:
        return [
            SealedSecret(name=name, sealed=self.sealer.seal(value, about=_row(job, name)), until_end=until_end)
            for name, value in values.items()
        ]

    def open(self, connection: Connection, job: Job, *, until_end: bool = True) -> dict[str, str]:
        """The values of a job's secrets by name; without `until_end`, only those that a child inherits.

        Raises:
            SealError: one does not open with the keys that this server has.
        """
        stored = job_inputs.secrets_of_job(connection, Scope(account_id=job.account_id), job.job_id)
        return {
            **unsealed_values(job.spec_version, job.spec),
            **{
                secret.name: self.sealer.open(secret.sealed, about=_row(job, secret.name))
                for secret in stored
                if until_end or not secret.until_end
            },
        }

    def cloned(self, connection: Connection, job: Job, document: object) -> object:
        """The request of a clone: `document`, or the job's own request, with the job's secrets in place of `***`.

        Raises:
            SpecError: `***` stands where the job has no secret.
            SealError: a secret does not open with the keys that this server has.
        """
        request = load_stored(job.spec_version, job.spec)
        given = {**redacted(request), "handle": None} if document is None else document
        return with_secrets_of(given, request, self.open(connection, job, until_end=False))

    def secrets_for(self, connection: Connection, job: Job) -> Secrets:
        """The secrets for the workers of a job."""
        return Secrets.of(self.open(connection, job))


def _row(job: Job, name: str) -> str:
    return f"secrets/{job.account_id}/{job.job_id}/{name}"
