"""The cluster: nodes, queues, backends and training runtimes."""

from __future__ import annotations

from typing import Annotated, Any

from typing_extensions import TypedDict

from trainmaster.schema import Doc, OneOf, Timestamp
from trainmaster.schema.jobs import Status
from trainmaster.server.core.resources import NodeState


class GpuResource(TypedDict):
    """An accelerator of a node."""

    index: int
    type: str
    memory_mb: int
    healthy: bool
    problem: Annotated[str | None, Doc("Why it is not schedulable; null while it is healthy.")]
    free: bool
    job_id: Annotated[str | None, Doc("The job that holds it; null when it is free or held by another account.")]


class Amount(TypedDict):
    """The total of a resource, and how much of it is free."""

    total: int
    free: int


class NodeResource(TypedDict):
    """A machine, and what is free on it."""

    id: str
    hostname: str
    backend: str
    state: Annotated[str, OneOf(NodeState)]
    drain_reason: Annotated[str | None, Doc("Why it is drained, in the operator's words.")]
    drain_force: Annotated[bool, Doc("It is being drained, and its jobs are preempted.")]
    labels: list[str]
    capabilities: list[str]
    given_labels: Annotated[list[str], Doc("The labels that operators gave it.")]
    given_capabilities: Annotated[list[str], Doc("The capabilities that operators gave it.")]
    gpus: list[GpuResource]
    cpu_cores: Amount
    ram_mb: Amount
    storage_mb: Amount
    slots: Annotated[Amount, Doc("How many job nodes it runs at a time.")]
    jobs: Annotated[list[str], Doc("The jobs of your account that run on it.")]
    last_heartbeat: Timestamp


class NodeList(TypedDict):
    """All nodes."""

    nodes: list[NodeResource]


class ClusterEventResource(TypedDict):
    """Something that happened to a node."""

    ts: Timestamp
    type: str
    message: str
    data: dict[str, Any]


class ClusterEventList(TypedDict):
    """The last events of a node."""

    events: Annotated[list[ClusterEventResource], Doc("The newest first.")]


class GpuTypeResource(TypedDict):
    """All GPUs of one type."""

    type: str
    total: int
    free: Annotated[int, Doc("On nodes that accept jobs.")]
    unhealthy: int


class LeaderResource(TypedDict):
    """The server that leads."""

    id: str
    url: str
    epoch: Annotated[int, Doc("Rises each time that another server becomes the leader.")]
    since: Timestamp | None


class ClusterResource(TypedDict):
    """The cluster's resources, and how much of them is used."""

    version: Annotated[str, Doc("Of the server that answers.")]
    leader: Annotated[LeaderResource | None, Doc("Null: no server leads now, and no job is started.")]
    backends: list[str]
    nodes: Annotated[dict[Annotated[str, OneOf(NodeState)], int], Doc("How many are in each state.")]
    gpus: list[GpuTypeResource]
    cpu_cores: Amount
    ram_mb: Amount
    gpu_utilisation: Annotated[float | None, Doc("The share of the GPUs that jobs hold; null: there are none.")]
    cpu_utilisation: Annotated[float | None, Doc("The share of the cores that jobs requested and hold.")]
    jobs: Annotated[dict[Status, int], Doc("Jobs of all accounts that have not ended.")]
    queue_depth: Annotated[int, Doc("Jobs that wait for resources.")]


class QueueResource(TypedDict):
    """A queue, and what is in it over all accounts."""

    name: str
    weight: Annotated[float, Doc("Its share of the cluster, in proportion to the other queues that have work.")]
    quota_gpus: Annotated[int | None, Doc("The most GPUs that its jobs may hold at a time; null: no limit.")]
    depth: Annotated[int, Doc("Jobs that wait, of all accounts.")]
    running: Annotated[int, Doc("Jobs that hold resources.")]
    paused: int
    gpus_held: int
    oldest_wait_seconds: Annotated[float | None, Doc("How long the oldest job has waited; null: none waits.")]


class QueueList(TypedDict):
    """All queues."""

    queues: list[QueueResource]


class EntryResource(TypedDict):
    """A job that waits. Of another account's job only the requested resources are shown."""

    position: Annotated[int, Doc("1 is next.")]
    job_id: Annotated[str | None, Doc("Null: another account's.")]
    name: str | None
    priority: int
    gpus: Annotated[int, Doc("Requested GPUs, over all nodes.")]
    wait_seconds: Annotated[float, Doc("How long it has waited.")]
    estimated_wait_seconds: Annotated[float | None, Doc("How much longer it will wait; null: unknown.")]
    reason: Annotated[str | None, Doc("Why it waits, in brief; null: another account's.")]


class QueuePage(TypedDict):
    """A part of a queue, in the order of the scheduler."""

    queue: str
    depth: int
    running: int
    paused: int
    entries: list[EntryResource]
    next_page_token: Annotated[str | None, Doc("Send it as `page_token`; null on the last page.")]


class BackendSummary(TypedDict):
    """Where jobs can run."""

    name: str
    default: Annotated[bool, Doc("Whether jobs that name no backend run there.")]
    images: Annotated[bool, Doc("Whether it runs a workload in the image that the workload names.")]
    here: Annotated[bool, Doc("Whether its jobs run on the server's machine, and see the server's files.")]
    kind: Annotated[str, Doc("`local`, `container`, or what engine runs a cluster's jobs, such as `slurm`.")]
    options: Annotated[
        dict[str, Any] | None, Doc("Of a cluster, with `***` for secrets; null: a backend of every server.")
    ]


class BackendList(TypedDict):
    """All backends of the server, the default first."""

    backends: list[BackendSummary]


class EngineResource(TypedDict):
    """The engine that runs a backend's jobs."""

    name: Annotated[str | None, Doc("Such as `podman` or `Slurm 24.05`; null: none answers.")]
    host: Annotated[str | None, Doc("Where it is, such as an address or the name of a partition.")]
    problem: Annotated[str | None, Doc("Why jobs cannot run there now, and what to do.")]


class BackendResource(BackendSummary):
    """One backend, with the engine that runs its jobs."""

    engine: Annotated[
        EngineResource | None, Doc("Asked now. Null: the server itself runs the jobs, or this server cannot tell.")
    ]
    server_url: Annotated[str | None, Doc("Where workers reach the server; null: they run on its machine.")]
    unreachable: Annotated[str | None, Doc("Why workers cannot reach the server there, and what to do.")]


class ForeignStep(TypedDict):
    """A part of a job of others that has a log of its own."""

    name: str
    status: Annotated[str, Doc("As of the job.")]
    pod: str
    device: Annotated[str, Doc("What it computes with, such as `gpu`; empty: unknown.")]
    device_count: str


class ForeignJobResource(TypedDict):
    """A job that somebody else made on a cluster."""

    name: str
    status: Annotated[str, Doc("QUEUED, TRAINING, PAUSED, COMPLETED or FAILED.")]
    created_at: str
    node_count: int
    runtime: Annotated[str, Doc("The name of its training runtime.")]
    message: Annotated[str, Doc("How it failed, in the engine's words.")]
    labels: dict[str, str]
    steps: list[ForeignStep]


class ForeignJobList(TypedDict):
    """All jobs of others, the newest first."""

    jobs: list[ForeignJobResource]


class ForeignLog(TypedDict):
    """Lines of a step."""

    lines: list[str]
    next_cursor: str
    complete: Annotated[bool, Doc("Whether the step has ended; it may still have further lines.")]


class RuntimeResource(TypedDict):
    """A training runtime, and the file that defines it."""

    name: str
    kind: Annotated[str, Doc("`ClusterTrainingRuntime` or `TrainingRuntime`.")]
    file: Annotated[str, Doc("The file that it is in.")]
    document: Annotated[dict[str, Any], Doc("As it was written, in the shape of Kubeflow's.")]


class RuntimeProblem(TypedDict):
    """What is wrong with a file."""

    file: str
    message: str


class RuntimeList(TypedDict):
    """All training runtimes of the server."""

    runtimes: list[RuntimeResource]
    problems: Annotated[list[RuntimeProblem], Doc("Files of which something cannot be used.")]
