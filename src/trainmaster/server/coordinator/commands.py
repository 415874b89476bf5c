"""The commands that every door gives. Each is one transaction, on any server: read the job, call the pure function,
write the answer. The leader sees the change by its event."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection

from trainmaster.protocol.launch import Launch
from trainmaster.server.coordinator.admission import Admission, check_queue
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.core import commands as decide
from trainmaster.server.core.commands import check_retry, child_request, in_queue, new_job_id, submit
from trainmaster.server.core.errors import NotFoundError, Problem, SpecError, StaleWriteError
from trainmaster.server.core.job import Change, CheckpointRecord, Job, merge
from trainmaster.server.core.spec.documents import secret_values
from trainmaster.server.core.spec.submit import CompiledJob, SubmitJobRequest
from trainmaster.server.core.states import TERMINAL
from trainmaster.server.settings.telemetry import METERS
from trainmaster.server.store import accounts, checkpoints, job_inputs, jobs, queues
from trainmaster.server.store.accounts import IdempotencyRecord
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_inputs import SealedSecret
from trainmaster.server.store.scope import Scope

Decision = Callable[[Connection, Job], Change | None]
_NO_TOKENS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Idempotency:
    """What identifies a repeated request."""

    key: str
    fingerprint: str
    """Of the request; the same key with another one is refused."""
    older: tuple[str, ...] = ()
    """What its fingerprint was with secret keys that were replaced since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutcome:
    job: Job
    replayed: bool = False
    """The command had been carried out before, under the same idempotency key."""


Done = Future[CommandOutcome]
"""Done when the change is on disk."""


@dataclass(frozen=True, slots=True, eq=False)
class Commands:
    database: Database
    admission: Admission
    vault: JobSecrets
    hint: Callable[[str], None]
    clock: Callable[[], float] = time.time

    def submit(
        self,
        scope: Scope,
        request: SubmitJobRequest,
        *,
        created_by: str,
        tokens: Mapping[str, str] = _NO_TOKENS,
        idempotency: Idempotency | None = None,
    ) -> Done:
        """Create a job. Its secrets are sealed; `tokens` are kept until it ends. On an event loop, call
        `Admission.look_up` before: it reads files."""
        compiled = self.admission.compile(request, scope.account)
        change = self._new_job(scope, compiled, created_by=created_by)
        sealed = self._sealed(change.job, secret_values(request), tokens)

        def work(connection: Connection) -> Job:
            return self._insert(connection, scope, change, compiled, sealed)

        return self._write(scope, idempotency, work)

    def check(self, scope: Scope, request: SubmitJobRequest, *, created_by: str) -> Future[tuple[Job, Launch]]:
        """Check that `submit` would accept a request once its files are uploaded; the job is not stored."""
        compiled = self.admission.compile(request, scope.account)
        change = self._new_job(scope, compiled, created_by=created_by)

        def work(connection: Connection) -> tuple[Job, Launch]:
            accepted = self.admission.accept(connection, scope, change, compiled.request)
            jobs.require_free_handle(connection, scope, change.job)
            return accepted.job, compiled.launch

        # Nothing is written, but `AccountIsolation` may only be used on that thread.
        return self.database.write(work)

    def cancel(self, scope: Scope, job_id: str, *, message: str = "", idempotency: Idempotency | None = None) -> Done:
        def cancelled(_: Connection, job: Job) -> Change | None:
            return decide.cancel(job, now=self.clock(), message=message)

        return self.change(scope, job_id, cancelled, idempotency=idempotency)

    def pause(self, scope: Scope, job_id: str, *, save: bool = True, idempotency: Idempotency | None = None) -> Done:
        def paused(_: Connection, job: Job) -> Change | None:
            return decide.pause(job, now=self.clock(), save=save)

        return self.change(scope, job_id, paused, idempotency=idempotency)

    def resume(
        self,
        scope: Scope,
        job_id: str,
        *,
        checkpoint_id: str = "",
        tokens: Mapping[str, str] = _NO_TOKENS,
        idempotency: Idempotency | None = None,
    ) -> Done:
        """Queue a paused job again; `tokens` replace those that it had."""

        def resumed(connection: Connection, job: Job) -> Change | None:
            chosen = _checkpoint_of_line(connection, scope, job, checkpoint_id) if checkpoint_id else None
            change = decide.resume(job, now=self.clock(), checkpoint=chosen)
            job_inputs.put_secrets(connection, scope, job, self.vault.seal(job, tokens, until_end=True))
            return change

        return self.change(scope, job_id, resumed, idempotency=idempotency)

    def edit(
        self,
        scope: Scope,
        job_id: str,
        *,
        priority: int | None = None,
        queue: str | None = None,
        labels: Mapping[str, str] | None = None,
        idempotency: Idempotency | None = None,
    ) -> Done:
        def edited(connection: Connection, job: Job) -> Change | None:
            if queue is not None:
                check_queue(connection, scope, queue, "queue")
            return decide.edit(job, now=self.clock(), priority=priority, queue=queue, labels=labels)

        return self.change(scope, job_id, edited, idempotency=idempotency)

    def delete(self, scope: Scope, job_id: str, *, purge: bool = False, idempotency: Idempotency | None = None) -> Done:
        """Stop a job and hide it. With `purge`, a job that was deleted before is found again."""

        def deleted(_: Connection, job: Job) -> Change | None:
            return decide.delete(job, now=self.clock(), purge=purge)

        return self.change(scope, job_id, deleted, deleted=purge, idempotency=idempotency)

    def retry(
        self,
        scope: Scope,
        job_id: str,
        *,
        created_by: str,
        checkpoint_id: str = "",
        modify_resources: bool = False,
        new_resource_config: Mapping[str, Any] | None = None,
        handle: str | None = None,
        tokens: Mapping[str, str] = _NO_TOKENS,
        idempotency: Idempotency | None = None,
    ) -> Done:
        """Create a child of a job that ended; it resumes from the parent's checkpoint, with its secrets."""

        def child(connection: Connection) -> Job:
            parent = jobs.get(connection, scope, job_id)
            check_retry(parent, modify_resources=modify_resources, new_resource_config=new_resource_config)
            request = child_request(parent, new_resource_config=new_resource_config, handle=handle)
            if not queues.exists(connection, scope, request.scheduling_config.queue):
                request = in_queue(request, queues.DEFAULT)  # its own was removed meanwhile
            owner = Scope(account_id=parent.account_id)
            compiled = self.admission.compile(request, owner.account)
            change = self._new_job(owner, compiled, created_by=created_by, parent=parent)
            chosen = parent.own_checkpoint_id or parent.resume_checkpoint_id
            if checkpoint_id:
                chosen = _checkpoint_of_line(connection, scope, parent, checkpoint_id).checkpoint_id
            change = Change(job=change.job.evolve(resume_checkpoint_id=chosen), events=change.events)
            sealed = self._sealed(change.job, self.vault.open(connection, parent, until_end=False), tokens)
            return self._insert(connection, scope, change, compiled, sealed, resized=modify_resources)

        return self._write(scope, idempotency, child)

    def change(
        self,
        scope: Scope,
        job_id: str,
        decision: Decision,
        *,
        deleted: bool = False,
        idempotency: Idempotency | None = None,
    ) -> Done:
        """Carry out a decision about a job; what the decision writes goes into the same transaction."""

        def decided(connection: Connection) -> Job:
            job = jobs.get(connection, scope, job_id, deleted=deleted)
            if (change := decision(connection, job)) is None:
                return job
            if not jobs.apply(connection, scope, change):
                raise StaleWriteError
            return change.job

        return self._write(scope, idempotency, decided)

    def _new_job(self, scope: Scope, compiled: CompiledJob, *, created_by: str, parent: Job | None = None) -> Change:
        change = submit(
            compiled,
            account_id=scope.account,
            job_id=new_job_id(),
            created_by=created_by,
            now=self.clock(),
            default_backend=self.admission.default_backend,
            parent=parent,
        )
        admitted = self.admission.admit_at_once(change.job, compiled)
        return merge(change, admitted) if admitted else change

    def _sealed(self, job: Job, values: Mapping[str, str], tokens: Mapping[str, str]) -> list[SealedSecret]:
        """The secrets of a new job; one that was refused at once needs none until its end."""
        kept = _NO_TOKENS if job.status in TERMINAL else tokens
        return [*self.vault.seal(job, values), *self.vault.seal(job, kept, until_end=True)]

    def _insert(
        self,
        connection: Connection,
        scope: Scope,
        change: Change,
        compiled: CompiledJob,
        sealed: Sequence[SealedSecret],
        *,
        resized: bool = True,
    ) -> Job:
        change = self.admission.accept(connection, scope, change, compiled.request, resized=resized)
        job = change.job
        jobs.insert(connection, scope, change)
        job_inputs.put_secrets(connection, scope, job, sealed)
        try:
            used = {blob.sha256 for blob in compiled.launch.blobs}
            job_inputs.use_blobs(connection, scope, job, used, job.created_at)
        except NotFoundError as error:
            message = f"{error.message}; PUT it to /v1/blobs/<sha256> first"
            raise SpecError([Problem(field="workload.files", message=message)]) from None
        METERS.submissions += 1
        return job

    def _write(self, scope: Scope, key: Idempotency | None, action: Callable[[Connection], Job]) -> Done:
        """Run an action in a transaction, unless a request with the same key ran it before."""

        def work(connection: Connection) -> CommandOutcome:
            if key is None:
                return CommandOutcome(job=action(connection))
            if (known := accounts.find_request(connection, scope, key.key, key.fingerprint, *key.older)) is not None:
                return CommandOutcome(job=jobs.get(connection, scope, known.job_id, deleted=True), replayed=True)
            job = action(connection)
            record = IdempotencyRecord(
                key=key.key, fingerprint=key.fingerprint, job_id=job.job_id, created_at=self.clock()
            )
            accounts.record_request(connection, scope, record)
            return CommandOutcome(job=job)

        future = self.database.write(work)
        future.add_done_callback(lambda _: self.hint(""))
        return future


def _checkpoint_of_line(connection: Connection, scope: Scope, job: Job, checkpoint_id: str) -> CheckpointRecord:
    """A checkpoint that belongs to the job or to one that it descends from; SpecError when it is of another line."""
    checkpoint = checkpoints.get(connection, scope, checkpoint_id)
    owner = jobs.get(connection, scope, checkpoint.job_id, deleted=True)
    if owner.root_job_id != job.root_job_id:
        message = f"belongs to job {owner.job_id}, which is not of this job's line"
        raise SpecError([Problem(field="checkpoint_id", message=message)])
    return checkpoint
