"""Facts about models before they are loaded: the longest sequence, and load arguments that jobs may not set. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

_LIMITS = ("max_position_embeddings", "n_positions")
"""What configurations call the number of positions."""
_ROPE = ("rope_scaling", "rope_parameters")
"""Where they say that rotary positions are stretched."""


def positions_of(config: Mapping[str, Any], model_kwargs: Mapping[str, str] | None = None) -> int | None:
    """The longest sequence that a model takes; None when its configuration does not say.

    Args:
        config: the content of the model's `config.json`.
        model_kwargs: `base_model.model_kwargs`, which replace values of the configuration.
    """
    given = {name: _plain(text) for name, text in (model_kwargs or {}).items()}
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        known = {**part, **{name: value for name, value in given.items() if name in (*_LIMITS, *_ROPE)}}
        limit = next((known[name] for name in _LIMITS if _is_count(known.get(name))), None)
        if limit is not None:
            return max(int(limit), _stretched(known, int(limit)))
    return None


def too_long(max_seq_length: int | None, positions: int | None) -> str | None:
    """What is wrong with a max_seq_length for a model with so many positions; None when it fits."""
    if max_seq_length is None or positions is None or max_seq_length <= positions:
        return None
    return (
        f"data_config.max_seq_length is {max_seq_length}, but the base model has {positions} positions; set it to at "
        f"most {positions}"
    )


def _stretched(config: Mapping[str, Any], limit: int) -> int:
    """How far scaled rotary positions reach: `factor` times what the model was first trained with."""
    for name in _ROPE:
        scaling = config.get(name)
        if isinstance(scaling, Mapping) and isinstance(factor := scaling.get("factor"), int | float):
            first = scaling.get("original_max_position_embeddings")
            return int((first if isinstance(first, int) else limit) * factor)
    return 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_CODE = "set base_model.trust_remote_code instead"
_PICKLE = "leave it out; weights are read from safetensors alone"
_PLACE = "leave it out; model_id, revision and tokenizer_id say what is loaded"

REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "dtype": "set base_model.dtype instead",
        "torch_dtype": "set base_model.dtype instead",
        "revision": "set base_model.revision instead",
        "attn_implementation": "set hyperparameters.attn_implementation instead",
        "device_map": "leave it out; ranks place the model themselves",
        "token": "give HF_TOKEN in training_config.environment instead",
        "trust_remote_code": _CODE,
        "code_revision": _CODE,
        "use_kernels": _CODE,
        "allow_all_kernels": _CODE,
        "use_safetensors": _PICKLE,
        "weights_only": _PICKLE,
        "adapter_kwargs": _PLACE,
        "cache_dir": _PLACE,
        "config": _PLACE,
        "gguf_file": _PLACE,
        "local_files_only": _PLACE,
        "offload_folder": _PLACE,
        "state_dict": _PLACE,
        "subfolder": _PLACE,
    }
)
"""What to do instead, by the argument's name. Some are set from elsewhere. With the others a job would read unchecked
files, or run code that came with a model on a server that does not allow that."""


def refused_arguments(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of some arguments that a job may not pass on, each with what to do instead."""
    for name in names:
        if name in REFUSED:
            yield name, REFUSED[name]
        elif name.startswith("_") or name.endswith("_file"):
            yield name, _PLACE
