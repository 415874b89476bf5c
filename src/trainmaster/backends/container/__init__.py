"""The container backend: one container for each node of an attempt, on docker or podman.

The worker runs in the container and shares the server's files with it: the job's directories are mounted at the very
paths that they have outside. So everything that holds for local processes holds here, and logs, results and
checkpoints outlive the container. Containers outlive the server, and are found again by their labels.

An image whose Python does not run the worker has it outside: a local worker, whose ranks are `outside`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.backends import BackendContext, ContainerDefaults
from trainmaster.backends.base import Capabilities, LaunchError, PlacementBy
from trainmaster.backends.container.engine import Engine, EngineError, NoSuchCommandError, RefusedByEngineError
from trainmaster.backends.container.images import Images, StillPullingError
from trainmaster.backends.container.packing import OLDEST_PYTHON, packed_worker
from trainmaster.backends.container.rendering import (
    ImageFacts,
    Surroundings,
    container_document,
    container_name,
    network_document,
    network_name,
    outside_document,
    own_directories,
    within_container,
)
from trainmaster.backends.container.secret_files import put_secrets, remove_secrets, secrets_directory
from trainmaster.backends.container.upkeep import Upkeep
from trainmaster.backends.local import kill_worker, liveness_of
from trainmaster.backends.local.forkclient import ForkServer, ForkServerError
from trainmaster.backends.local.inventory import LocalInventory
from trainmaster.core.resources import Node
from trainmaster.core.sight import Liveness
from trainmaster.protocol.control import Control
from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.rundir import RunDirectory, write_document
from trainmaster.protocol.secrets import Secrets

__all__ = ["ContainerBackend", "make"]

CAPABILITIES = Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime), colocates_gangs=True, images=True)
_MACHINE_MEMORY_MB = (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20


def make(context: BackendContext) -> ContainerBackend:
    """The container backend of a server."""
    return ContainerBackend(
        engine=Engine(context.container.host, context.container.runtime),
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
    """Runs attempts in containers of this machine."""

    name = "container"
    capabilities = CAPABILITIES

    def __init__(
        self,
        *,
        engine: Engine,
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
        self._images = Images(engine, runs)
        self._upkeep = Upkeep(engine, runs, self._remove)

    def open(self) -> None:
        """Begin to look after containers, also those of the server before."""
        self._upkeep.start()

    def close(self) -> None:
        """Let go of the engine; what runs goes on."""
        self._upkeep.stop()
        self._images.close()
        self._engine.close()

    def inventory(self) -> Sequence[Node]:
        """This machine: the same nodes that the local backend has, so that nothing is booked twice."""
        return self._inventory.nodes()

    def render(self, request: AttemptRequest) -> str:
        """The containers, and the network where there is one. Of the image only what its name says is known yet."""
        image = self._image_of(request)
        facts = ImageFacts(id=image, environment={}, command=(), working_directory=None, python="python3")
        around = self._around(request, user="0:0")
        nodes = range(len(request.nodes))
        documents = [container_document(request, node, facts, around) for node in nodes]
        networks = [network_document(request, around)] if network_name(request) else []
        return json.dumps([*networks, *documents], indent=2)

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """Start a container for each node that nobody has claimed; nothing happens while its image is being fetched."""
        if request.server_url is not None:
            raise LaunchError(
                "containers share the server's files: set its transport to files, or use the backend local",
                Reason.LAUNCH_REFUSED,
            )
        try:
            facts = self._images.facts(
                self._image_of(request),
                policy=request.launch.container.pull_policy or self._defaults.pull_policy,
                attempt_id=request.attempt_id,
            )
            self._check(request, facts)
            around = self._around(request, user=self._user())
            for path in own_directories(request, around):
                Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            if network_name(request):
                self._engine.create_network(network_document(request, around))
            start = self._start if facts.python else self._start_outside
            start(request, facts, around, secrets)
        except StillPullingError:
            return None
        except (EngineError, ForkServerError) as error:
            # Nothing more of it may start; the nodes that run already are stopped as a broken gang.
            with contextlib.suppress(EngineError):
                self.revoke(request)
            if all(alive is Liveness.REVOKED for alive in self.observe(request)):
                is_final = isinstance(error, RefusedByEngineError)
                reason = Reason.LAUNCH_REFUSED if is_final else Reason.ENGINE_UNAVAILABLE
                raise LaunchError(str(error), reason) from error
        return f"{self._engine.name}:{container_name(request, 0)}"

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """By the claim, and by what the engine last told of the container; by its process, if it is outside of it."""
        directory = self._run_directory(request)
        return [
            liveness_of(directory, node)
            if self._plan(request, node).exists()
            else self._upkeep.liveness(container_name(request, node), directory, node)
            for node in range(len(request.nodes))
        ]

    def stop(self, request: AttemptRequest, control: Control) -> None:
        """Leave the control where the workers look for it."""
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        """Kill the containers; all that runs in one dies with its worker."""
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            if self._plan(request, node).exists():
                kill_worker(directory, node)
            for name in self._names(request, node):
                self._engine.kill(name)

    def revoke(self, request: AttemptRequest) -> None:
        """Take every claim that is still free, and remove the containers that would have had them."""
        directory, nodes = self._run_directory(request), range(len(request.nodes))
        # All of them first: the engine may be away, and who finds no claim left ends by itself.
        free = [node for node in nodes if directory.claim(node, {"nonce": uuid.uuid4().hex, "revoked": True})]
        for node in free:
            for name in self._names(request, node):
                self._remove(name)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Remove the container of a node, with all that is in it; and what its worker started outside."""
        if self._plan(request, node).exists():
            self._fork_server.ask({"op": "sweep", "attempt_id": request.attempt_id, "node": node})
        for name in self._names(request, node):
            self._remove(name)

    def _image_of(self, request: AttemptRequest) -> str:
        image = request.launch.image or self._defaults.image
        if not image:
            raise LaunchError(
                "the job names no image: set workload.image, or have the operator set container_image",
                Reason.LAUNCH_REFUSED,
            )
        return image

    def _check(self, request: AttemptRequest, facts: ImageFacts) -> None:
        """Refuse what this engine or this image cannot do."""
        wanted = request.launch.container.runtime
        if wanted and wanted != self._engine.name:
            raise LaunchError(
                f"the job wants {wanted}, and this server's engine is {self._engine.name}", Reason.LAUNCH_REFUSED
            )
        steps = request.launch.steps
        if facts.python is None and (steps[-1].python or any(step.name == "environment" for step in steps)):
            needed = ".".join(map(str, OLDEST_PYTHON))
            raise LaunchError(
                f"image {self._image_of(request)} does not run Python code of ours: {facts.lacks}, and Python {needed} "
                "or newer is needed",
                Reason.LAUNCH_REFUSED,
            )
        if not steps[-1].argv and not facts.command:
            raise LaunchError("the image has no command of its own: say what to run", Reason.LAUNCH_REFUSED)
        for volume in request.launch.volumes:
            if os.path.isabs(volume.source):
                self._check_source(volume.source)

    def _check_source(self, source: str) -> None:
        """See that a directory may be mounted now; links may have changed since the job was admitted."""
        path = Path(source).resolve()
        if not any(path.is_relative_to(root.resolve()) for root in self._defaults.data_roots):
            raise LaunchError(f"volume {source} lies outside the server's data roots", Reason.LAUNCH_REFUSED)
        for private in (private.resolve() for private in self._defaults.private):
            if path.is_relative_to(private) or private.is_relative_to(path):
                raise LaunchError(f"volume {source}: the server keeps its own state there", Reason.LAUNCH_REFUSED)
        if not path.exists():
            raise LaunchError(f"volume {source}: there is no such directory on the server", Reason.LAUNCH_REFUSED)

    def _start_outside(
        self, request: AttemptRequest, facts: ImageFacts, around: Surroundings, secrets: Secrets
    ) -> None:
        """Have a worker on the machine run the containers of each node that has none."""
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            if directory.claimant(node) is not None:
                continue
            plan = self._plan(request, node)
            document = outside_document(request, node, facts, around)
            name = container_name(request, node)
            write_document(plan, {"engine": self._engine.host, "name": name, "document": document})
            through = (sys.executable, "-m", "trainmaster.backends.container.outside", str(plan))
            within = replace(within_container(request, node, facts, around), through=through)
            order = {"op": "start", "run_dir": str(around.run_dir), "node": node, "within": within.to_json()}
            self._fork_server.ask({**order, **({"secrets": secrets.to_json()} if secrets else {})})

    def _start(self, request: AttemptRequest, facts: ImageFacts, around: Surroundings, secrets: Secrets) -> None:
        """Start a container with a worker in it for each node that has none."""
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            name = container_name(request, node)
            if directory.claimant(node) is not None:
                continue
            state = self._engine.state(name)
            if state == "running":
                continue  # its worker is on the way
            if state in ("exited", "dead") and directory.claimant(node) is None:
                said = self._engine.output(name)
                self.revoke(request)
                raise LaunchError(f"the worker did not start in image {facts.id}: {said}", Reason.LAUNCH_REFUSED)
            put_secrets(around.secrets / name, secrets)
            self._engine.create(name, container_document(request, node, facts, around))
            try:
                self._engine.start(name)
            except NoSuchCommandError as error:
                raise EngineError(str(error)) from error

    def _plan(self, request: AttemptRequest, node: int) -> Path:
        """Where the plan lies of the containers of a worker outside of them; there is none of one inside."""
        return self._run_directory(request).path / "nodes" / str(node) / "containers.json"

    def _names(self, request: AttemptRequest, node: int) -> list[str]:
        """What the containers of a node can be called."""
        name, each = container_name(request, node), request.launch.ranks_per_node
        if not self._plan(request, node).exists():
            return [name]
        return [f"{name}-{rank}" for rank in range(node * each, (node + 1) * each)]

    def _around(self, request: AttemptRequest, *, user: str) -> Surroundings:
        return Surroundings(
            runs=self._runs,
            run_dir=self._run_directory(request).path,
            worker=packed_worker(self._workers),
            secrets=secrets_directory(),
            user=user,
            machine_memory_mb=_MACHINE_MEMORY_MB,
            passes_gpus=self._passes_gpus,
        )

    def _user(self) -> str:
        """Whoever is the server's own user outside: what the container writes, the server has to read and remove."""
        if os.geteuid() == 0 or self._engine.is_rootless:
            return "0:0"
        return f"{os.geteuid()}:{os.getegid()}"

    def _remove(self, name: str) -> None:
        remove_secrets(secrets_directory() / name)  # first: the engine may be away
        self._engine.remove(name)
