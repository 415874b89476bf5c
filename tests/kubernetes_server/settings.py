"""How a cluster is made: its nodes, its images, and how fast its clocks run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Timing:
    """Seconds that the real components wait; the defaults here are short, the real value is in each comment."""

    job_backoff_s: float = 0.5  # 10
    """Before the first replacement of a failed pod; doubles with each further failure."""
    job_backoff_limit_s: float = 600.0  # 600
    crash_backoff_s: float = 0.5  # 10
    """Before the first restart of a container; doubles."""
    crash_backoff_limit_s: float = 300.0  # 300
    image_backoff_s: float = 0.5  # 10
    node_heartbeat_s: float = 0.5  # 10
    node_grace_s: float = 3.0  # 50
    """How old a node's lease may be before the node counts as lost."""
    node_evict_s: float = 0.5  # 5
    """From a lost node to its NoExecute taint."""
    storage_s: float = 0.5  # 10, of what is measured once a minute
    """How often a kubelet looks at what pods with a limit have written."""
    bookmark_s: float = 5.0  # 60
    probe_factor: float = 0.1  # 1
    """What the periods and delays of probes are multiplied by."""

    @classmethod
    def real(cls) -> Timing:
        return cls(
            job_backoff_s=10,
            crash_backoff_s=10,
            image_backoff_s=10,
            node_heartbeat_s=10,
            node_grace_s=50,
            node_evict_s=5,
            storage_s=10,
            bookmark_s=60,
            probe_factor=1,
        )


@dataclass(kw_only=True)
class ClusterSettings:
    directory: Path
    """For everything that the cluster writes: pods, logs, certificates."""
    nodes: int = 2
    cpu: str = "8"
    memory: str = "16Gi"
    gpus: int = 0
    """nvidia.com/gpu of each node."""
    max_pods: int = 110
    fake: bool = False
    """Whether kubelets only pretend to run pods: their phases follow the annotations that `kubelet/fake.py` names."""
    images: tuple[str, ...] = ()
    """The images that can be pulled; empty for all."""
    bare: tuple[str, ...] = ()
    """Images without programs: `cluster.PROGRAMS` is empty in their containers."""
    hidden: tuple[str, ...] = ()
    """Folders of this machine that are empty in pods, whose root is otherwise this machine's."""
    trainer: str = ""
    """The version of Kubeflow Trainer that is installed, with JobSet; empty for none."""
    timing: Timing = field(default_factory=Timing)
