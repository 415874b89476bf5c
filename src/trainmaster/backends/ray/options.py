"""What an operator says of a Ray cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SecretStr

from trainmaster.backends.cluster.engine import ClusterOptions


def _amounts(value: Any) -> Any:
    """`--set` gives text: `pool-a=0.01,CPU=2`."""
    if not isinstance(value, str):
        return value
    pairs = (part.partition("=") for part in value.split(",") if part.strip())
    return {name.strip(): amount for name, _, amount in pairs}


class Spread(StrEnum):
    """How Ray distributes the nodes of an attempt over its own: the strategies of its placement groups."""

    STRICT_SPREAD = "STRICT_SPREAD"
    SPREAD = "SPREAD"
    PACK = "PACK"
    STRICT_PACK = "STRICT_PACK"


class RayOptions(ClusterOptions):
    address: str = Field(
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        description="Where the dashboard of the cluster answers, such as `http://ray-head:8265`.",
    )
    token: SecretStr = Field(
        default=SecretStr(""),
        description="What the dashboard, or a proxy before it, asks for; sent as `Authorization: Bearer`.",
    )
    headers: SecretStr = Field(
        default=SecretStr(""),
        description="Further headers of every request, for a proxy: lines of the form `Name: value`.",
    )
    ca_file: str = Field(
        default="", description="Certificates that a dashboard behind https is checked against; empty: the system's."
    )
    namespace: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="The Ray namespace of the workers. Empty: `trainmaster-` and the name of this Trainmaster.",
    )
    placement: Spread = Field(
        default=Spread.STRICT_SPREAD,
        description="How the nodes of a job are distributed. STRICT_SPREAD: each on a node of its own. SPREAD and PACK "
        "allow several on one, and prefer many or few. STRICT_PACK: all on one.",
    )
    resources: Annotated[dict[str, Annotated[float, Field(ge=0)]], BeforeValidator(_amounts)] = Field(
        default={},
        description="What each node of a job takes besides what the job asks for, such as `pool-a=0.01,CPU=2`. CPU "
        "counts for jobs that do not say how many cores they need; the default is 1.",
    )
    driver_python: str = Field(
        default="",
        description="The Python on the head node that has Ray: a path, or a name on the PATH of the Ray processes. "
        "Empty: the one that Ray's processes there run on.",
    )

    @property
    def job_nodes_apart(self) -> bool:
        return self.placement is Spread.STRICT_SPREAD
