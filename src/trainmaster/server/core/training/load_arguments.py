"""Arguments for loading models and tokenizers that a job may not pass on.

Some are set from elsewhere. With the others a job would read files that nobody checked, or run code that came with a
model on a server that does not allow that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

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
"""What to do instead, by the argument's name."""


def refused_arguments(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of some arguments that a job may not pass on, each with what to do instead."""
    for name in names:
        if name in REFUSED:
            yield name, REFUSED[name]
        elif name.startswith("_") or name.endswith("_file"):
            yield name, _PLACE
