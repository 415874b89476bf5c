"""The container backend: one container for each node of an attempt, on docker or podman.

The worker runs in the container and shares the server's files: the job's directories are mounted at the paths that they
have outside. So everything that holds for local processes holds here, and logs, results and checkpoints outlive the
container. Containers outlive the server, and are found again by their labels.

If an image's Python cannot run the worker, a local worker runs its ranks from outside (`supervision`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.backends import BACKENDS, BackendContext, ContainerDefaults
from trainmaster.backends.base import LaunchError, Loss, claim_free_nodes
from trainmaster.backends.container import container_spec as spec
from trainmaster.backends.container import plans
from trainmaster.backends.container.engine import (
    ContainerEngine,
    ContainerEngineError,
    NoSuchCommandError,
    RefusedByEngineError,
    engine_of,
    has_ended,
)
from trainmaster.backends.container.images import Images
from trainmaster.backends.container.monitor import ContainerMonitor
from trainmaster.backends.container.preflight import checked
from trainmaster.backends.container.secret_files import put_secrets, remove_secrets, secrets_directory
from trainmaster.backends.local import kill_worker, liveness_of
from trainmaster.backends.local.fork_client import ForkServer, ForkServerError
from trainmaster.backends.local.inventory import LocalInventory
from trainmaster.backends.worker_package import packed_worker
from trainmaster.protocol.launch import CONTAINER, Lifetime, PullPolicy
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node

__all__ = ["ContainerBackend", "make"]

_log = logging.getLogger(__name__)
_MACHINE_MEMORY_MB = (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20


def make(context: BackendContext) -> ContainerBackend:
    return ContainerBackend(
        engine=engine_of(context),
        defaults=context.container,
        inventory=LocalInventory(
            storage=context.data_dir, simulated_gpus=context.simulated_gpus, slots=context.slots_per_node
        ),
        run_directory=context.run_directory,
        runs=context.runs,
        workers=context.data_dir.absolute() / "workers",
        passes_gpus=not context.simulated_gpus,
        fork_server=ForkServer(context.data_dir / "forkserver"),
    )


class ContainerBackend:
    name = CONTAINER
    capabilities = BACKENDS[CONTAINER].capabilities

    def __init__(
        self,
        *,
        engine: ContainerEngine,
        defaults: ContainerDefaults,
        inventory: LocalInventory,
        run_directory: Callable[[AttemptRequest], RunDirectory],
        runs: Path,
        workers: Path,
        passes_gpus: bool,
        fork_server: ForkServer,
    ) -> None:
        self._engine = engine
        self._defaults = defaults
        self._inventory = inventory
        self._run_directory = run_directory
        self._runs = runs
        self._workers = workers
        self._passes_gpus = passes_gpus
        self._fork_server = fork_server
        self._plans = plans.Plans(workers / "plans")
        self._images = Images(engine, runs)
        self._monitor = ContainerMonitor(engine, runs, self._remove)

    def open(self) -> None:
        self._plans.clear()
        self._monitor.start()

    def close(self) -> None:
        self._monitor.stop()
        self._engine.close()

    def inventory(self) -> Sequence[Node]:
        """The local backend's nodes, so that nothing is booked twice."""
        return self._inventory.nodes()

    def engine(self) -> EngineFacts | None:
        try:
            self._engine.is_rootless  # noqa: B018 - which it has to answer
            return EngineFacts(name=self._engine.name, host=self._engine.host)
        except ContainerEngineError as error:
            return EngineFacts(problem=str(error))

    def render(self, request: AttemptRequest) -> str:
        """The containers and the network. Only the name of the image is known yet."""
        facts = spec.unknown_image(self._image_of(request))
        context = self._context(request, user="0:0")
        documents = [
            document
            for node in range(len(request.nodes))
            for document in (
                *plans.step_documents(request, node, context),
                spec.container_document(request, node, facts, context),
            )
        ]
        networks = [spec.network_document(request, context)] if spec.network_name(request) else []
        return json.dumps([*networks, *documents], indent=2)

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """Start a container for each unclaimed node, once its image is here."""
        if request.server_url is not None:
            raise LaunchError(
                "containers share the server's files: set its transport to files, or use the backend local",
                Reason.LAUNCH_REFUSED,
            )
        try:
            image = self._image_of(request)
            facts = self._facts(request, image)
            images = {step.image: self._facts(request, step.image) for step in request.launch.steps if step.image}
            request = checked(request, image, facts, self._defaults, engine=self._engine.name)
            plans.check_steps(request, images)
            # The server's own user outside: it must be able to read and remove what the container writes.
            is_root = os.geteuid() == 0 or self._engine.is_rootless
            context = self._context(request, user="0:0" if is_root else f"{os.geteuid()}:{os.getegid()}")
            for node in range(len(request.nodes)):
                prepared = spec.prepared_directories(request, node, context).values()
                for path in (*spec.writable_directories(request, node, context), *prepared):
                    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            if spec.network_name(request):
                self._engine.create_network(spec.network_document(request, context))
            if facts.python and not images:
                self._start(request, facts, context, secrets)
            else:
                self._start_outside(request, facts, images, context, secrets)
        except (ContainerEngineError, ForkServerError, LaunchError) as error:
            # Nothing more of it may start; nodes that already run are stopped as a broken gang.
            with contextlib.suppress(ContainerEngineError):
                self.revoke(request)
            if all(alive is Liveness.REVOKED for alive in self.observe(request)):
                if isinstance(error, LaunchError):
                    raise
                reason = Reason.LAUNCH_REFUSED if isinstance(error, RefusedByEngineError) else Reason.ENGINE_UNAVAILABLE
                raise LaunchError(str(error), reason) from error
            _log.warning("%s has begun, and its other nodes cannot: %s", request.attempt_id, error)
        return f"{self._engine.name}:{spec.container_name(request, 0)}"

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """By the claim and the engine's last report of the container; by the process, if the worker is outside."""
        directory = self._run_directory(request)
        return [
            liveness_of(directory, node)
            if self._plans.path(request, node).exists()
            else self._monitor.liveness(spec.container_name(request, node), directory, node)
            for node in range(len(request.nodes))
        ]

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:  # noqa: ARG002 - there is no engine that knows
        return None

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:  # noqa: ARG002
        """Where the node's service is published, whatever its worker says."""
        published = next(filter(None, map(self._monitor.port, self._names(request, node))), None)
        return f"{spec.LOOPBACK}:{port}" if port == published else None

    def stop(self, request: AttemptRequest, control: Control) -> None:
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            if self._plans.path(request, node).exists():
                kill_worker(directory, node)
            for name in self._names(request, node):
                self._engine.kill(name)

    def revoke(self, request: AttemptRequest) -> None:
        """Take every free claim, and remove the containers that would have had them."""
        # All claims first: the engine may be away, and a worker that finds no claim left ends by itself.
        for node in claim_free_nodes(self._run_directory(request), request):
            for name in self._names(request, node):
                self._remove(name)
            self._plans.remove(request, node)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Remove the containers of a node, and kill what its worker started outside."""
        names = self._names(request, node)
        if self._plans.path(request, node).exists():
            # First, as a worker inside would take the end of its ranks for the cause; and again below, because the
            # worker that was ended here may have been about to start one.
            for name in names:
                self._engine.remove(name)
            self._fork_server.ask({"op": "sweep", "attempt_id": request.attempt_id, "node": node})
        else:
            self._monitor.tell_memory(spec.container_name(request, node), self._run_directory(request), node)
        for name in names:
            self._remove(name)
        self._plans.remove(request, node)

    def _facts(self, request: AttemptRequest, image: str) -> spec.ImageFacts:
        directory = self._run_directory(request)
        policy = request.launch.container.pull_policy or self._defaults.pull_policy
        if any(directory.claimant(node) is not None for node in range(len(request.nodes))):
            policy = PullPolicy.NEVER  # it was here for the nodes that have begun
        return self._images.facts(image, policy=policy, attempt_id=request.attempt_id)

    def _image_of(self, request: AttemptRequest) -> str:
        image = request.launch.image or self._defaults.image
        if not image:
            raise LaunchError(
                "the job names no image: set workload.image, or have the operator set container_image",
                Reason.LAUNCH_REFUSED,
            )
        return image

    def _start_outside(
        self,
        request: AttemptRequest,
        facts: spec.ImageFacts,
        images: Mapping[str, spec.ImageFacts],
        context: spec.ContainerContext,
        secrets: Secrets,
    ) -> None:
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            if directory.claimant(node) is not None:
                continue
            # A worker that was started by an earlier plan, and has not claimed the node yet, tells its service that
            # port.
            planned = self._plans.read(request, node) or {}
            context = _with_port(context, request, port=planned.get("port"))
            for path in plans.output_directories(request, node, context):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            document = plans.plan_document(request, node, facts, images, context, engine=self._engine.host)
            plan = self._plans.write(request, node, document, directory)
            # Without -P it would import modules from the job's working directory.
            leads = (sys.executable, "-P", "-m", "trainmaster.backends.container.supervision", str(plan))
            within = plans.within_outside(request, node, facts, images, context, leads=leads)
            order = {"op": "start", "run_dir": str(context.run_dir), "node": node, "within": within.to_json()}
            self._fork_server.ask({**order, **({"secrets": secrets.to_json()} if secrets else {})})

    def _start(
        self, request: AttemptRequest, facts: spec.ImageFacts, context: spec.ContainerContext, secrets: Secrets
    ) -> None:
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            name = spec.container_name(request, node)
            if directory.claimant(node) is not None:
                continue
            state = self._engine.state(name)
            if state == "running":
                continue  # its worker is on the way
            if has_ended(state) and directory.claimant(node) is None:
                said = self._engine.output(name)
                raise LaunchError(f"the worker did not start in image {facts.id}: {said}", Reason.LAUNCH_REFUSED)
            put_secrets(context.secrets / name, secrets)
            self._engine.create(name, spec.container_document(request, node, facts, _with_port(context, request)))
            try:
                self._engine.start(name)
            except NoSuchCommandError as error:
                raise ContainerEngineError(str(error)) from error

    def _names(self, request: AttemptRequest, node: int) -> list[str]:
        """The names that the containers of a node can have."""
        plan = self._plans.read(request, node)
        return [spec.container_name(request, node)] if plan is None else plans.planned_names(plan)

    def _context(self, request: AttemptRequest, *, user: str) -> spec.ContainerContext:
        return spec.ContainerContext(
            runs=self._runs,
            run_dir=self._run_directory(request).path,
            worker=packed_worker(self._workers),
            secrets=secrets_directory(),
            user=user,
            machine_memory_mb=_MACHINE_MEMORY_MB,
            passes_gpus=self._passes_gpus,
        )

    def _remove(self, name: str) -> None:
        remove_secrets(secrets_directory() / name)  # first: the engine may be away
        self._engine.remove(name)


def _with_port(
    context: spec.ContainerContext, request: AttemptRequest, *, port: int | None = None
) -> spec.ContainerContext:
    """For a service: this port, or a free one of this machine."""
    if request.launch.lifetime is not Lifetime.SERVICE:
        return context
    if port is not None:
        return replace(context, port=port)
    with socket.socket() as probe:
        probe.bind((spec.LOOPBACK, 0))
        return replace(context, port=probe.getsockname()[1])
