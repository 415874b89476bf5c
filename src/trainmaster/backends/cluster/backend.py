"""The verbs of a backend on a cluster. What they say of an attempt is what `following` last saw of it on the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from trainmaster.backends.base import Capabilities, LaunchError, Loss, NotYetError, claim_free_nodes
from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.context import ClusterContext
from trainmaster.backends.cluster.engine import (
    ClusterEngine,
    ClusterOptions,
    EngineAwayError,
    EngineLaunch,
    EnginePhase,
    EngineRefusedError,
    ShowsForeignJobs,
    StandsIn,
    engine_name,
)
from trainmaster.backends.cluster.following import EngineFollower
from trainmaster.backends.worker_package import package_digest, packed_worker
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.foreign_jobs import ForeignJobs
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node

_log = logging.getLogger(__name__)

QUEUED_AGAIN_S = 600.0
"""How often an attempt that waits in the engine's queue is looked at, unless the engine reports a change."""
AWAY_AGAIN_S = 30.0
"""The same of an attempt that the engine may not have."""


class ClusterBackend:
    def __init__(
        self, engine: ClusterEngine, options: ClusterOptions, capabilities: Capabilities, context: ClusterContext
    ) -> None:
        self.name = context.name
        self.capabilities = capabilities
        self._engine = engine
        self._options = options
        self._context = context
        self._run_directory = context.run_directory
        self.follower = EngineFollower(engine, context, poll_s=options.poll_s)

    def open(self) -> None:
        self.follower.open()

    def close(self) -> None:
        self.follower.close()
        self._engine.close()

    def inventory(self) -> Sequence[Node]:
        """As last reported: a request to the engine would delay every job."""
        return self.follower.nodes

    def engine(self) -> EngineFacts | None:
        return self._engine.facts()

    @property
    def foreign(self) -> ForeignJobs | None:
        """The jobs of others; None: such an engine shows none."""
        return self._engine.foreign if isinstance(self._engine, ShowsForeignJobs) else None

    def render(self, request: AttemptRequest) -> str:
        """With a line in place of the source that starts a worker, which is the same for every attempt."""
        launch = self._launch(request, digest="0" * 16)
        shown = {**launch.environment, worker_start.SOURCE: worker_start.SHOWN_SOURCE}
        return self._engine.document(replace(launch, environment=shown))

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:  # noqa: ARG002 - the worker fetches them
        """Hand the attempt to the engine's queue, unless it is there; NotYetError while it waits there."""
        name = self._note(request)
        try:
            seen = self.follower.seen
            job = seen.jobs.get(name) if self.follower.is_fresh(seen) else None
            if job is None or job.phase is EnginePhase.PREPARING:
                if (message := self.follower.just_started(name)) is not None:
                    raise self._wait(name, message, None)
                raise self._start(request, name)
            if job.phase is EnginePhase.QUEUED:
                raise self._wait(name, job.message or "waits in the engine's queue", job.handle)
        except EngineAwayError as error:
            # It may have been started all the same: nothing is known until the engine answers.
            raise self._wait(name, f"{self.name} does not answer: {error}", None, again_in_s=AWAY_AGAIN_S) from error
        if job.phase is EnginePhase.ENDED and claim_free_nodes(self._run_directory(request), request):
            loss = job.loss or Loss(reason=Reason.ENGINE_UNAVAILABLE, message=job.message)
            if all(alive is Liveness.REVOKED for alive in self.observe(request)):
                raise LaunchError(loss.message, worker_start.reason_of_launch(loss.reason))
        if job.phase is EnginePhase.RUNNING and self.follower.unheard.is_silent(name):
            unheard = worker_start.UNHEARD.format(url=request.server_url)
            raise self._wait(name, unheard, job.handle, again_in_s=AWAY_AGAIN_S)
        return job.handle

    def _start(self, request: AttemptRequest, name: str) -> NotYetError:
        packed_worker(self._context.workers)
        is_new = self.follower.begin_start(name, request)
        try:
            launch = self._launch(request, digest=package_digest())
            handle = self._engine.start(launch, is_new=is_new)
        except EngineRefusedError as error:
            self.revoke(request)
            raise LaunchError(f"{self.name}: {error}", Reason.LAUNCH_REFUSED) from error
        instead = self._engine.instead(launch) if isinstance(self._engine, StandsIn) else ""
        message = f"handed to the engine as {instead}" if instead else "handed to the engine"
        self.follower.has_started(name, message)
        return self._wait(name, message, handle)

    def _wait(self, name: str, message: str, handle: str | None, *, again_in_s: float = QUEUED_AGAIN_S) -> NotYetError:
        return NotYetError(message, self.follower.next_change(name), again_in_s=again_in_s, handle=handle)

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """By the claims, which workers make over HTTP, and the engine's last list of jobs."""
        name, directory = self._note(request), self._run_directory(request)
        return [self._liveness(name, directory, node) for node in range(len(request.nodes))]

    def _note(self, request: AttemptRequest) -> str:
        """The name of an attempt, which is followed from now on."""
        name = self._name_of(request)
        self.follower.follow(name, request)
        return name

    def _liveness(self, name: str, directory: RunDirectory, node: int) -> Liveness:
        claimant = directory.claimant(node)
        if claimant is None:
            return Liveness.UNCLAIMED
        if claimant.get("revoked"):
            return Liveness.REVOKED
        claimed_from = self.follower.claimed_from(name, node)
        seen = self.follower.seen
        # A list from before the claim says nothing about the claimant.
        if seen.asked_at < claimed_from or not self.follower.is_fresh(seen):
            return Liveness.UNKNOWN
        job = seen.jobs.get(name)
        if job is None or job.phase is EnginePhase.ENDED or node in job.node_losses:
            return Liveness.GONE
        return Liveness.ALIVE

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:
        name = self._name_of(request)
        job = self.follower.seen.jobs.get(name)
        if job is None:
            if self._run_directory(request).claimant(node) is None:
                return None
            return Loss(reason=Reason.ENGINE_CANCELLED, message=f"{self.name} does not know the job any more")
        return job.node_losses.get(node) or job.loss

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:  # noqa: ARG002
        """On the address that the engine names, whatever the worker says."""
        job = self.follower.seen.jobs.get(self._name_of(request))
        address = job.addresses.get(node) if job is not None else None
        return f"{address}:{port}" if address else None

    def stop(self, request: AttemptRequest, control: Control) -> None:
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        self._cancel(self._name_of(request))

    def revoke(self, request: AttemptRequest) -> None:
        """Take the free claims first: a worker that starts all the same ends at once."""
        claim_free_nodes(self._run_directory(request), request)
        name = self._name_of(request)
        if all(alive is Liveness.REVOKED for alive in self.observe(request)):
            try:
                self._cancel(name)
            except EngineAwayError as error:
                _log.warning("%s is cancelled on %s when that answers: %s", request.attempt_id, self.name, error)
                self.follower.cancel_later(name)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """The engine ends what is left of a job; nothing that it lists as ended runs."""

    def _cancel(self, name: str) -> None:
        job = self._engine.find(name)
        if job is not None and job.phase is not EnginePhase.ENDED:
            self._engine.cancel(job.handle)
        self.follower.look_now()

    def _launch(self, request: AttemptRequest, *, digest: str) -> EngineLaunch:
        return worker_start.launch(
            request,
            self._options,
            instance=self._context.instance,
            digest=digest,
            node_variable=self._engine.node_variable,
            ca_pem=self._context.ca_pem,
        )

    def _name_of(self, request: AttemptRequest) -> str:
        return engine_name(self._context.instance, request.attempt_id)
