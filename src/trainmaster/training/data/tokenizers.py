"""The tokenizer of a job, with the job's own options and chat template; and how long its samples may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.server.core.training.models import positions_of, refused_arguments, too_long
from trainmaster.training.data.config import Preprocess
from trainmaster.training.errors import InputError
from trainmaster.training.values import parsed

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_NO_LENGTH = 10**9
"""Tokenizers that know no limit say a number beyond this."""


def load_tokenizer(directory: Path, preprocess: Preprocess, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a directory.

    Raises:
        InputError: it cannot be loaded, or not with these options.
    """
    from transformers import AutoTokenizer

    for name, instead in refused_arguments(preprocess.tokenizer_config):
        raise InputError(f"preprocess.tokenizer_config.{name}: {instead}")
    options = {name: parsed(text) for name, text in preprocess.tokenizer_config.items()}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code, **options
        )
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        with_options = f" with the options {', '.join(options)}" if options else ""
        raise InputError(f"the tokenizer in {directory} cannot be loaded{with_options}: {error}") from error
    if preprocess.chat_template is not None:
        tokenizer.chat_template = preprocess.chat_template
    return tokenizer


def sample_length(wanted: int | None, *directories: Path, model_kwargs: Mapping[str, str] | None = None) -> int:
    """The most tokens of a sample: what the job says, or what its model or else its tokenizer was made for.

    Args:
        wanted: what the job says.
        directories: of the model, then of the tokenizer.
        model_kwargs: further arguments for loading the model, which may change how many positions it has.

    Raises:
        InputError: nobody says, or the model has fewer positions than the job wants.
    """
    if wanted is not None:
        known = (positions_of(_json(directory / "config.json"), model_kwargs) for directory in directories)
        if (problem := too_long(wanted, next((each for each in known if each is not None), None))) is not None:
            raise InputError(problem)
        return wanted
    for directory in directories:
        config = _json(directory / "config.json")
        for part in (config, config.get("text_config") or {}):
            for name in _LENGTHS:
                if isinstance(part.get(name), int):
                    return int(part[name])
        length = _json(directory / "tokenizer_config.json").get("model_max_length")
        if isinstance(length, int | float) and length < _NO_LENGTH:
            return int(length)
    raise InputError("neither model nor tokenizer says how long a sample may be; set data_config.max_seq_length")


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
