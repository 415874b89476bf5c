"""The coordinator role of a server: assembles its parts, starts its threads, and passes hints on."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Mapping
from pathlib import Path

from trainmaster.backends import BackendContext, ContainerDefaults, make_backends
from trainmaster.backends.base import Backend, LaunchError
from trainmaster.backends.cluster.backend import ClusterBackend
from trainmaster.protocol.launch import Launch
from trainmaster.protocol.sockets import HintListener
from trainmaster.server import failpoints
from trainmaster.server.coordinator.actions import AttemptActions
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.cluster_view import NodeReports
from trainmaster.server.coordinator.clusters import Clusters, RunningBackends
from trainmaster.server.coordinator.launch import JobSecrets, Launches
from trainmaster.server.coordinator.leadership import Leadership
from trainmaster.server.coordinator.loop import Coordinator
from trainmaster.server.coordinator.maintenance import Maintenance
from trainmaster.server.coordinator.operator_files import DeclaredCluster
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.coordinator.webhooks import Deliveries
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.foreign_jobs import ForeignJobs
from trainmaster.server.core.job import Job
from trainmaster.server.core.reports import EngineFacts, EngineOutage
from trainmaster.server.settings.encryption import key_file
from trainmaster.server.settings.settings import ContainerRuntime, Role, Settings, TransportKind
from trainmaster.server.storage import Roots, run_directory
from trainmaster.server.store.database import Database

_log = logging.getLogger(__name__)
_HINT_WAIT_S = 1.0


class CoordinatorRole:
    """Coordinates from `start` to `stop`; running jobs continue afterwards."""

    def __init__(
        self,
        settings: Settings,
        *,
        settings_file: Path | None,
        url: str,
        holder: str,
        database: Database,
        roots: Roots,
        admission: Admission,
        vault: JobSecrets,
        clusters: Clusters,
        subscriptions: Subscriptions,
        declared_cluster: DeclaredCluster,
        collector: Collector,
        hint_socket: Path,
    ) -> None:
        context = BackendContext(
            data_dir=settings.data_dir,
            run_directory=lambda request: run_directory(roots, request.job_id, request.attempt),
            simulated_gpus=settings.simulated_gpus,
            slots_per_node=settings.slots_per_node,
            runs=settings.runs.absolute(),
            container=ContainerDefaults(
                host=settings.container_host,
                runtime="" if settings.container_runtime is ContainerRuntime.AUTO else settings.container_runtime,
                pull_policy=settings.container_pull_policy,
                image=settings.container_image,
                data_roots=settings.readable_roots,
                set_data_roots=settings.data_roots,
                private=private_places(settings, settings_file),
            ),
        )
        self._backends = RunningBackends(
            make_backends(settings.backends, context),
            clusters,
            context,
            ca_pem=settings.ca.read_text() if settings.ca else "",
            hint=self.hint,
            leads=self.leads,
        )
        self._own = tuple(self._backends)
        """Not clusters, which are opened when they are read from the database."""
        self._leadership = Leadership(
            database, holder=holder, url=url, lease_s=settings.lease_s, on_change=lambda: self.hint("")
        )
        self._reports = NodeReports(database, self._backends, declared_cluster.settle_nodes)
        self._launches = Launches(
            *(database, roots, vault, settings),
            hint_socket=str(hint_socket),
            server_url=worker_url(settings, url),
            advertised_url=settings.advertise_url.rstrip("/") or url,
            here_as_elsewhere=failpoints.ELSEWHERE_VARIABLE in os.environ,
        )
        self._coordinator = Coordinator(
            database,
            reports=self._reports,
            leadership=self._leadership,
            actions=AttemptActions(
                backends=self._backends,
                roots=roots,
                launches=self._launches,
                hint=self.hint,
            ),
            admission=admission,
            stalled_after_s=settings.stalled_after_s,
        )
        self._maintenance = Maintenance(database, roots, leads=self.leads, collector=collector)
        self._deliveries = Deliveries(database, subscriptions, epoch=lambda: self._leadership.epoch)
        self._listener = HintListener(hint_socket)
        self._stopping = threading.Event()
        self._listening = threading.Thread(target=self._pass_hints_on, name="hints", daemon=True)

    def hint(self, subject: str) -> None:
        self._coordinator.hint(subject)

    def problem(self) -> str | None:
        return self._coordinator.problem()

    def leads(self) -> bool:
        return self._leadership.epoch is not None

    def engine(self, backend: str) -> EngineFacts | None:
        """The engine that runs the jobs of a backend, asked now; None where this server runs them itself."""
        return self._declared(backend).engine()

    def foreign_jobs(self, backend: str) -> ForeignJobs | None:
        """What others run on the engine of a backend; None: it shows nothing of that."""
        found = self._declared(backend)
        return found.foreign if isinstance(found, ClusterBackend) else None

    def outages(self) -> Mapping[str, EngineOutage]:
        """The clusters whose engine does not answer, by name."""
        found = ((name, backend) for name, backend in self._backends.items() if isinstance(backend, ClusterBackend))
        return {name: outage for name, backend in found if (outage := backend.follower.outage) is not None}

    def render(self, job: Job, launch: Launch) -> str:
        """What a job's backend would send to its engine now, without secrets; RefusedError if it could not be sent."""
        backend = self._declared(job.backend)
        try:
            return backend.render(self._launches.preview(job, launch, backend.capabilities))
        except LaunchError as error:
            raise RefusedError(str(error)) from error

    def _declared(self, backend: str) -> Backend:
        """A backend as it is declared now: an operator may have added it, or changed it, a moment ago."""
        self._backends.refresh()
        return self._backends[backend]

    def start(self) -> None:
        self._reports.take()
        for name in self._own:
            self._backends[name].open()
        self._leadership.start()
        self._coordinator.start()
        self._maintenance.start()
        self._deliveries.start()
        self._listening.start()

    def stop(self) -> None:
        self._stopping.set()
        self._maintenance.stop()
        self._deliveries.stop()
        self._coordinator.stop()
        self._leadership.stop()
        for backend in self._backends.values():
            backend.close()
        self._listening.join()
        self._listener.close()

    def _pass_hints_on(self) -> None:
        while not self._stopping.is_set():
            readable, _, _ = select.select([self._listener], [], [], _HINT_WAIT_S)
            if readable:
                for subject in self._listener.drain():
                    self.hint(subject)


def private_places(settings: Settings, settings_file: Path | None) -> tuple[Path, ...]:
    """What no job may mount: the server's directories, and files by which others could pass for the server."""
    directories = (settings.data_dir, settings.runs, settings.artifacts, settings.blobs, settings.cache)
    files = (key_file(settings), settings.database_file, settings.tls_key, settings_file)
    return (*directories, *filter(None, files))


def worker_url(settings: Settings, url: str) -> str | None:
    """The URL to which workers report over HTTP; None when they share the server's files."""
    if settings.transport is TransportKind.FILES:
        return None
    if not settings.advertise_url and Role.API not in settings.roles:
        raise ValueError("workers report over HTTP, and this server has no api role: say where with --advertise-url")
    return settings.advertise_url.rstrip("/") or url
