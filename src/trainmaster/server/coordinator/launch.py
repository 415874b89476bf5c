"""Launches: the request and the secrets that the workers of a placed job get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from sqlalchemy import Connection

from trainmaster.backends.base import Capabilities, FilesBy, LaunchError, PlacementBy
from trainmaster.protocol import environment as variables
from trainmaster.protocol.attempt_files import AttemptFileUrl, FileArea
from trainmaster.protocol.launch import Launch
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import CONFINED_CACHES, AttemptRequest, EngineNeeds, NodeAssignment
from trainmaster.protocol.run_directory import OWNER, RANKS_OWNER
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.coordinator.account_users import is_confined, runs_as
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.job import Attempt, CheckpointRecord, Job
from trainmaster.server.core.resources import Node, Share
from trainmaster.server.core.spec.documents import load_stored, redacted, unsealed_values, with_secrets_of
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.server.scheduling.placement import share_of
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import (
    ARTIFACTS,
    BLOBS,
    RUNS,
    URI,
    Location,
    Roots,
    checkpoints_path,
    class_checkpoints_path,
    output_path,
)
from trainmaster.server.store import accounts, attempts, checkpoints, job_inputs
from trainmaster.server.store.database import Database
from trainmaster.server.store.job_inputs import SealedSecret
from trainmaster.server.store.scope import Scope


@dataclass(frozen=True, slots=True, eq=False)
class JobSecrets:
    """Encrypts the secrets of jobs, each bound to its job: it does not open in the row of another."""

    sealer: Sealer

    def seal(self, job: Job, values: Mapping[str, str], *, until_end: bool = False) -> list[SealedSecret]:
        return [
            SealedSecret(name=name, sealed=self.sealer.seal(value, about=_row(job, name)), until_end=until_end)
            for name, value in values.items()
        ]

    def open(self, connection: Connection, job: Job, *, until_end: bool = True) -> dict[str, str]:
        """The values of a job's secrets by name; without `until_end`, only those that a child inherits."""
        values = dict(unsealed_values(job.spec_version, job.spec))
        for secret in job_inputs.secrets_of_job(connection, Scope(account_id=job.account_id), job.job_id):
            if until_end or not secret.until_end:
                values[secret.name] = self.sealer.open(secret.sealed, about=_row(job, secret.name))
        return values

    def cloned(self, connection: Connection, job: Job, document: object) -> object:
        """The request of a clone: `document`, or the job's own request, with the job's secrets in place of `***`."""
        request = load_stored(job.spec_version, job.spec)
        given = {**redacted(request), "handle": None} if document is None else document
        return with_secrets_of(given, request, self.open(connection, job, until_end=False))

    def secrets_for(self, connection: Connection, job: Job) -> Secrets:
        return Secrets.of(self.open(connection, job))


def _row(job: Job, name: str) -> str:
    return f"secrets/{job.account_id}/{job.job_id}/{name}"


@dataclass(frozen=True, slots=True, eq=False)
class Launches:
    """Builds the requests of attempts from what is stored and from the settings."""

    database: Database
    roots: Roots
    vault: JobSecrets
    settings: Settings
    hint_socket: str | None = None
    server_url: str | None = None
    """Where workers on this machine report over HTTP if they share no files with the server."""
    advertised_url: str = ""
    """Where workers on other machines report, unless their backend says otherwise."""
    here_as_elsewhere: bool = False
    """For tests: what reports over HTTP from this machine also sends checkpoints and results."""

    def request(self, job: Job, nodes: Mapping[str, Node], capable: Capabilities) -> AttemptRequest:
        scope, checkpoint_id = Scope(job.account_id), job.live.resume_checkpoint_id
        with self.database.read() as connection:
            try:
                resume = checkpoints.get(connection, scope, checkpoint_id) if checkpoint_id else None
            except NotFoundError as error:
                raise LaunchError(f"checkpoint {checkpoint_id} is gone", Reason.LAUNCH_REFUSED) from error
            uid, submitter, confined, elsewhere = None, None, False, self._is_elsewhere(capable)
            if capable.runs_here or elsewhere or capable.submits_as_users:
                account = accounts.get(connection, scope, job.account_id)
                confined = is_confined(account, self.settings)
                if capable.submits_as_users:
                    submitter = runs_as(account, self.settings)
                elif not elsewhere:
                    uid = runs_as(account, self.settings, isolated=capable.isolates_accounts)
        return attempt_request(
            job,
            compiled_launch(job),
            nodes=nodes,
            roots=self.roots,
            resume=resume,
            hint_socket=self.hint_socket,
            server_url=self._url_of(capable),
            elsewhere=elsewhere,
            saves_directly=self._saves_directly(job, capable),
            placement=capable.placement,
            uid=uid,
            submitter=submitter,
            confined=confined,
            log_cap_bytes=self.settings.log_cap_mb << 20,
            cache=self.settings.cache,
            environment=fetching_environment(self.settings),
        )

    def preview(self, job: Job, launch: Launch, capable: Capabilities) -> AttemptRequest:
        """The request of a first attempt of a job that is not stored, on nodes that are not chosen."""
        gpus = job.needs.gpus_per_node or int(job.needs.describes_gpu)
        share = share_of(job.needs, job.backend, range(gpus))
        attempt = Attempt(
            number=1, token="", backend=job.backend, shares=(share,) * job.needs.node_count, created_at=job.created_at
        )
        return attempt_request(
            job.evolve(attempt=attempt),
            launch,
            nodes={},
            roots=self.roots,
            resume=None,
            hint_socket=None,
            server_url=self._url_of(capable),
            elsewhere=self._is_elsewhere(capable),
            saves_directly=self._saves_directly(job, capable),
            placement=capable.placement,
            cache=self.settings.cache,
            environment=fetching_environment(self.settings),
        )

    def _url_of(self, capable: Capabilities) -> str | None:
        return self.server_url if capable.runs_here else capable.server_url or self.advertised_url or None

    def _is_elsewhere(self, capable: Capabilities) -> bool:
        """Whether checkpoints and results go over HTTP, too."""
        apart = not (capable.runs_here or capable.files is FilesBy.SHARED)
        return (apart or self.here_as_elsewhere) and bool(self._url_of(capable))

    def _saves_directly(self, job: Job, capable: Capabilities) -> bool:
        # Other jobs look for checkpoints of services and of job classes in the server's directory.
        return capable.files is FilesBy.OBJECT_ROOT and not job.is_service and job.workload_kind != JOB_CLASS

    def secrets(self, job: Job) -> Secrets:
        with self.database.read() as connection:
            return self.vault.secrets_for(connection, job)

    def attempts(self, job: Job) -> list[Attempt]:
        with self.database.read() as connection:
            return attempts.of_job(connection, Scope(job.account_id), job.job_id)


def compiled_launch(job: Job) -> Launch:
    """What was compiled at the submission, too; storing it with the job takes longer."""
    return compile_job(load_stored(job.spec_version, job.spec)).launch


def attempt_request(
    job: Job,
    launch: Launch,
    *,
    nodes: Mapping[str, Node],
    roots: Roots,
    resume: CheckpointRecord | None,
    hint_socket: str | None,
    server_url: str | None,
    elsewhere: bool = False,
    saves_directly: bool = False,
    placement: PlacementBy = PlacementBy.US,
    uid: int | None = None,
    submitter: int | None = None,
    confined: bool = False,
    log_cap_bytes: int = 0,
    cache: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AttemptRequest:
    """The request for the workers of the current attempt. `resume` is the checkpoint to resume from, `hint_socket` is
    where workers send hints, `server_url` where they report over HTTP if they share no files with the server. `uid`
    runs the ranks (None: the worker's own), and `submitter` submits to an engine (None: the server's user); `confined`
    jobs may run only in containers on this machine. `cache` holds a directory for each account; `environment` is for
    every process. `elsewhere`: checkpoints go over HTTP, too, or to the object store (`saves_directly`), and each
    node's courier names local directories for results and caches."""
    attempt = job.live
    shared = server_url is None
    # Users of the machine pass through `cache` to their own directory. Root in a container could open its account's
    # directory to them, with setuid programs in it: that directory lies behind a closed one, which no container mounts.
    cache_home = cache / CONFINED_CACHES if cache and confined else cache
    home = checkpoints_home(job, confined=confined)
    checkpoint_dir = str(roots.path(ARTIFACTS, home))
    resume_from = None
    if resume is not None:
        resume_from = resume.path if resume.root == URI else str(roots.path(resume.root, resume.path))
    if elsewhere:
        checkpoint_dir = file_url(server_url, job, FileArea.CHECKPOINTS)
        resume_from = _resume_url(server_url, job, resume, home) if resume is not None else None
    if saves_directly and roots.archive is not None:
        checkpoint_dir = roots.archive.uri(f"{ARTIFACTS}/{home}")
        if resume is not None and resume.root != URI:
            resume_from = roots.stored_uri(Location(root=resume.root, path=resume.path)) or resume_from
    return AttemptRequest(
        job_id=job.job_id,
        attempt=attempt.number,
        token=attempt.token,
        rank_token=attempt.rank_token,
        launch=launch,
        nodes=tuple(_assignment(share, nodes.get(share.node_id), placement) for share in attempt.shares),
        engine_needs=_engine_needs(job, submitter) if placement is PlacementBy.ENGINE else None,
        checkpoint_dir=checkpoint_dir,
        output_dir="" if elsewhere else str(roots.path(ARTIFACTS, output_path(job.job_id))),
        owner_file="" if elsewhere else str(roots.path(RUNS, f"{job.job_id}/{OWNER if uid is None else RANKS_OWNER}")),
        resume_from=resume_from,
        max_runtime_s=job.max_runtime_s,
        hint_socket=hint_socket if shared else None,
        server_url=server_url,
        blob_dir=str(roots.path(BLOBS, job.account_id)) if shared else None,
        uid=uid,
        confined=confined and not elsewhere,
        log_cap_bytes=log_cap_bytes,
        cache_dir=str(cache_home / job.account_id) if cache_home and not elsewhere else None,
        environment=dict(environment),
    )


def file_url(server_url: str | None, job: Job, area: FileArea, path: str = "") -> str:
    attempt_id = f"{job.job_id}.{job.live.number}"
    return str(AttemptFileUrl(server_url=(server_url or "").rstrip("/"), attempt_id=attempt_id, area=area, path=path))


def _resume_url(server_url: str | None, job: Job, resume: CheckpointRecord, home: str) -> str:
    """Where ranks on other machines find a checkpoint: beside their own, with older ones, if it is there."""
    if resume.root == URI:
        return resume.path
    if resume.root == ARTIFACTS and resume.path.startswith(f"{home}/"):
        return file_url(server_url, job, FileArea.CHECKPOINTS, resume.path.removeprefix(f"{home}/"))
    return file_url(server_url, job, FileArea.RESUME, Path(resume.path).name)


def _assignment(share: Share, node: Node | None, placement: PlacementBy) -> NodeAssignment:
    if placement is PlacementBy.ENGINE:
        # The engine chooses the node, and numbers the GPUs that the attempt gets there.
        where = NodeAssignment(node_id=share.node_id, gpus=tuple(map(str, range(len(share.gpus)))))
    else:
        where = NodeAssignment(
            node_id=share.node_id,
            address=node.address if node is not None else "127.0.0.1",
            gpus=_devices(node, share.gpus),
        )
    return replace(where, cpu_cores=share.cpu_cores, memory_mb=share.ram_mb)


def _engine_needs(job: Job, submitter: int | None) -> EngineNeeds:
    needs = job.needs
    return EngineNeeds(
        account=job.account_id,
        job_name=job.name,
        handle=job.handle or "",
        uid=submitter,
        priority=job.priority,
        gpus=len(job.live.shares[0].gpus),
        gpu_type=needs.gpu_type,
        gpu_memory_min_mb=needs.gpu_memory_min_mb,
        cpu_cores=needs.cpu_cores,
        memory_mb=needs.ram_mb,
        storage_mb=needs.storage_mb,
        capabilities=needs.capabilities,
        affinity=needs.affinity,
        anti_affinity=needs.anti_affinity,
    )


SERVER_ENDPOINTS = ("HF_ENDPOINT",)
"""Variables of the server's environment that say where jobs fetch from, unless the jobs set them."""


def fetching_environment(settings: Settings) -> dict[str, str]:
    """The variables that tell a job's processes what they may fetch, and from where."""
    services = {variables.SCAIDRIVE_URL: settings.scaidrive_url, variables.SCAIATLAS_URL: settings.scaiatlas_url}
    return {
        variables.DATA_ROOTS: os.pathsep.join(map(str, settings.readable_roots)),
        variables.ARTIFACTS_DIR: str(settings.artifacts.absolute()),
        variables.PRIVATE_URLS: "1" if settings.private_sources else "0",
        **{name: url for name, url in services.items() if url},
        # Processes in containers, and those of a fork server that is older than the server, inherit none of this.
        **{name: os.environ[name] for name in SERVER_ENDPOINTS if os.environ.get(name)},
    }


def checkpoints_homes(job: Job) -> tuple[str, ...]:
    """The directories in the root of artifacts that may hold checkpoints of a job. Job classes have two: an account
    that runs in containers alone may get a uid later."""
    return tuple(sorted({checkpoints_home(job, confined=confined) for confined in (False, True)}))


def checkpoints_home(job: Job, *, confined: bool) -> str:
    # All job classes of an account share a directory: a class that runs again under the same name resumes from there.
    if job.workload_kind == JOB_CLASS:
        return class_checkpoints_path(job.account_id, confined=confined)
    return checkpoints_path(job.job_id)


def _devices(node: Node | None, indexes: tuple[int, ...]) -> tuple[str, ...]:
    if node is None:
        return tuple(map(str, indexes))
    by_index = {gpu.index: gpu.device for gpu in node.gpus}
    return tuple(by_index.get(index, str(index)) for index in indexes)
