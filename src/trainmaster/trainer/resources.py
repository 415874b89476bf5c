"""num_nodes and resources_per_node of a trainer, as a job's resource_config; and the nodes of a TPU slice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod
from typing import Any

MIG = "mig-"
_VENDOR = "nvidia.com/"
_MEMORY, _STORAGE = "memory", "storage"
_ALIASES = {"ephemeral-storage": _STORAGE}
_SIZES = {_MEMORY: "ram_min_mb", _STORAGE: "storage_min_mb"}
_KNOWN = "gpu, cpu, memory, storage and mig-PROFILE"

_UNITS = {
    "": Fraction(1),
    **{unit: Fraction(1, 1000**power) for power, unit in enumerate(("m", "u", "n"), start=1)},
    **{unit: Fraction(1000**power) for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{unit: Fraction(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}
_QUANTITY = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)([a-zA-Z]*)")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """What a job asks of its machines."""

    count: int
    gpus_per_node: int | None
    """None: as the server decides; one where there are GPUs."""
    resource_config: dict[str, Any]

    @property
    def ranks_per_node(self) -> int:
        """A rank for each GPU, and one without."""
        return self.gpus_per_node or 1


def nodes_from(num_nodes: object, resources_per_node: object) -> Nodes:
    """What a trainer's two fields ask for; raises ValueError if they cannot be read, or name what no backend has."""
    count = 1 if num_nodes is None else num_nodes
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"num_nodes must be a whole number of at least 1, not {num_nodes!r}")
    config: dict[str, Any] = {"node_count": count}
    if resources_per_node is None:
        return Nodes(count=count, gpus_per_node=None, resource_config=config)
    if not isinstance(resources_per_node, Mapping):
        raise ValueError(f"resources_per_node must be a dict such as {{'gpu': 1}}, not {resources_per_node!r}")
    gpus: dict[str, int] = {}
    for given, amount in resources_per_node.items():
        if not isinstance(given, str):
            raise ValueError(f"resources_per_node has the key {given!r}; its keys are {_KNOWN}")
        plain = given.removeprefix(_VENDOR).lower()
        name = _ALIASES.get(plain, plain)
        field = f"resources_per_node[{given!r}]"
        if name == "gpu" or name.startswith(MIG):
            number = _quantity(field, amount, at_least=0)
            if number.denominator != 1:
                raise ValueError(f"{field} must be a whole number, not {amount!r}")
            gpus[name] = int(number)
        elif name == "cpu":
            # The server books whole cores: of a fraction the whole.
            config["cpu_cores"] = ceil(_quantity(field, amount))
        elif name in _SIZES:
            config[_SIZES[name]] = _mib(field, amount)
        else:
            raise ValueError(f"{field}: there is no such resource here; known are {_KNOWN}")
    if len(gpus) > 1:
        raise ValueError(f"resources_per_node asks for {' and '.join(gpus)}; a job has one kind of GPU")
    kind, per_node = next(iter(gpus.items()), ("gpu", 0))
    config["gpu_count"] = per_node * count
    if kind != "gpu":
        config["gpu_type"] = kind
    return Nodes(count=count, gpus_per_node=per_node, resource_config=config)


def _mib(field: str, amount: object) -> int:
    size = _quantity(field, amount)
    if size < _MIB:
        # 512m is half a byte, and 16 are sixteen; nobody means that.
        raise ValueError(f"{field} is less than a mebibyte: {amount!r} are bytes; write it with a unit, as in '512Mi'")
    return ceil(size / _MIB)


def _quantity(field: str, amount: object, *, at_least: int = 1) -> Fraction:
    """A number, or one with a unit as Kubernetes writes it.

    >>> [int(_quantity("memory", amount)) for amount in (4, "2Ki", "1.5k", "1e3")]
    [4, 2048, 1500, 1000]
    """
    found = None if isinstance(amount, bool) else _QUANTITY.fullmatch(str(amount).strip())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{field} must be a number, or one with a unit such as '500m' or '10Gi', not {amount!r}")
    value = Fraction(found[1]) * _UNITS[found[2]]
    if at_least and value <= 0:
        raise ValueError(f"{field} must be more than 0, not {amount!r}")
    return value


def get_tpu_num_nodes(num_slices: int, topology: str, chips_per_host: int = 4) -> int:
    """The nodes of so many slices, for `num_nodes` of a trainer.

    Args:
        num_slices: Slices that train together.
        topology: Chips of a slice along two or three axes, such as `4x4` or `2x2x2`.
        chips_per_host: Chips of one node. A slice with fewer lies on one node.

    Raises ValueError if a number is not positive, the topology is ill-formed, or its chips do not fill their nodes.
    """
    for name, value in (("num_slices", num_slices), ("chips_per_host", chips_per_host)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    if not isinstance(topology, str) or not re.fullmatch(r"\s*\d+(\s*[xX]\s*\d+){1,2}\s*", topology, re.ASCII):
        raise ValueError(f"topology must be two or three numbers such as '4x4' or '2x2x2', not {topology!r}")
    chips = prod(int(size) for size in re.split("[xX]", topology))
    if chips < 1:
        raise ValueError(f"each number of the topology must be positive, not {topology!r}")
    if chips <= chips_per_host:
        return num_slices
    if chips % chips_per_host:
        raise ValueError(f"the {chips} chips of {topology!r} do not fill nodes of {chips_per_host}")
    return num_slices * (chips // chips_per_host)
