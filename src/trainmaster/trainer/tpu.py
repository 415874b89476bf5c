"""How many nodes a slice of TPUs has."""

from __future__ import annotations

import re
from math import prod


def get_tpu_num_nodes(num_slices: int, topology: str, chips_per_host: int = 4) -> int:
    """The nodes of so many slices, for `num_nodes` of a trainer.

    Args:
        num_slices: Slices that train together.
        topology: Chips of a slice along two or three axes, such as `4x4` or `2x2x2`.
        chips_per_host: Chips of one node. A slice with fewer lies on one node.

    Raises:
        ValueError: A number is not positive, the topology is ill-formed, or its chips do not fill their nodes.
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
