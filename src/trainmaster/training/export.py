"""The result of a training: a directory that others can load, whole or not there at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainmaster.training import models, publish
from trainmaster.training.document import Document, Prepared
from trainmaster.training.states import plain_name

RESULT = "model"
"""The name of the result in the job's output."""

State = Mapping[str, Tensor]


def whole_state(model: nn.Module) -> State | None:
    """Of a sharded model the weights (of an adapter, its own), gathered on the first rank. Collective.

    None where nothing is sharded.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.tensor import DTensor

    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=_has_adapter(model))
    state = get_model_state_dict(model, options=options)
    # Weights that are one and the same, such as those of embedding and output, are there by each of their names.
    once, all_names = (
        {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=removed)} for removed in (True, False)
    )
    return {name: value for name, value in state.items() if name not in all_names - once}


def export(
    document: Document,
    prepared: Prepared,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_dir: Path,
    state: State | None = None,
) -> str:
    """Write the result into the job's output and, where the job names one, to its own place; says where.

    Args:
        document: what to write, and where to.
        prepared: where the base model lies.
        model: the trained model, with its adapter if it has one.
        tokenizer: goes along with it.
        output_dir: the job's output.
        state: the weights, where the model has only a part of them.

    Raises:
        DocumentError: the job names a place that it may not write to.
        PreparingError: the object store does not answer, or refuses the credentials.
    """
    result = output_dir / RESULT
    with publish.drafting(output_dir) as draft:
        _write(document, prepared, model, tokenizer, draft, state)
        publish.record(draft)
        publish.place(draft, result)
    if (wanted := publish.destination(document)) is None:
        return str(result)
    publish.publish(result, wanted)
    return wanted


def _write(
    document: Document,
    prepared: Prepared,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: State | None,
) -> None:
    if _has_adapter(model) and document.output.merge_lora:
        if state is not None:
            model, state = _with_adapter(document, prepared, state), None
        model = model.merge_and_unload(safe_merge=True)
    model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    tokenizer.save_pretrained(directory)
    config = directory / "adapter_config.json"
    if config.exists():
        # Where the base model was fetched to means nothing to others.
        adapter = json.loads(config.read_text()) | {"base_model_name_or_path": document.base_model.model_id}
        config.write_text(json.dumps(adapter, indent=2) + "\n")
    for card in directory.glob("README.md"):
        card.unlink()  # a form that nobody has filled in


def _with_adapter(document: Document, prepared: Prepared, state: State) -> Any:
    """The base model, read once more, with a trained adapter: of a sharded model this rank has but a part."""
    from peft import get_peft_model

    base = models.load_model(document, prepared, trains_base=False)
    model = get_peft_model(base, models.lora_config(document.hyperparameters))
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    if unexpected:
        raise RuntimeError(f"the adapter has no place for {unexpected[0]}")
    return model


def _has_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config")
