"""How weights of published checkpoints may be quantized, as `quantization_config` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FP8_BLOCK = 128
"""Rows and columns with a common scale."""
INT4_GROUP = 32
"""Numbers of a row with a common scale."""


def lacks(quantization: Mapping[str, Any]) -> str | None:
    """What of a quantization that is said to be of a known method cannot be read."""
    method = quantization.get("quant_method")
    if method == "fp8":
        block = quantization.get("weight_block_size")
        return None if block == [FP8_BLOCK] * 2 else f"weight_block_size is {block}, not {[FP8_BLOCK] * 2}"
    if method == "compressed-tensors":
        if (packing := quantization.get("format")) != "pack-quantized":
            return f"format is {packing!r}, not 'pack-quantized'"
        for name, group in (quantization.get("config_groups") or {}).items():
            said = group.get("weights") or {}
            for key, value in {"type": "int", "num_bits": 4, "group_size": INT4_GROUP, "symmetric": True}.items():
                if said.get(key) != value:
                    return f"{key} of {name} is {said.get(key)!r}, not {value!r}"
            if group.get("input_activations"):
                return f"inputs are quantized, too ({name})"
    return None
