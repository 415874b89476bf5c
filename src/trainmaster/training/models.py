"""The model that is trained: loaded from where it was prepared, with an adapter where the training type has one."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trainmaster.server.core.training.models import refused_arguments
from trainmaster.training.attention import prefer_packed_attention
from trainmaster.training.document import Document, DocumentError, Hyperparameters, Prepared
from trainmaster.training.values import parsed


def load_model(document: Document, prepared: Prepared, *, trains_base: bool) -> PreTrainedModel:
    """The base model, on the CPU. `trains_base`: its own weights are trained, not an adapter's alone.

    Raises:
        DocumentError: transformers cannot load it, or not like this.
    """
    base = document.base_model
    for name, instead in refused_arguments(base.model_kwargs):
        raise DocumentError(f"base_model.model_kwargs.{name}: {instead}")
    options: dict[str, Any] = {name: parsed(text) for name, text in base.model_kwargs.items()}
    if document.hyperparameters.attn_implementation:
        options["attn_implementation"] = document.hyperparameters.attn_implementation
    try:
        model = AutoModelForCausalLM.from_pretrained(
            prepared.model_path,
            dtype=_dtype(base.dtype, trains_base=trains_base),
            trust_remote_code=base.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # anything else is a pickle
            **options,
        )
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this machine: its disk fails, say
        with_options = f" with model_kwargs {', '.join(base.model_kwargs)}" if base.model_kwargs else ""
        raise DocumentError(f"the base model {base.model_id} cannot be loaded{with_options}: {error}") from error
    if not isinstance(model, PreTrainedModel):
        raise DocumentError(f"{base.model_id} is no language model that transformers can train")
    prefer_packed_attention(model, document)
    return model


def load_tokenizer(document: Document, prepared: Prepared) -> PreTrainedTokenizerBase:
    """The tokenizer that the rows were made with."""
    tokenizer = AutoTokenizer.from_pretrained(
        prepared.tokenizer_path, trust_remote_code=document.base_model.trust_remote_code, local_files_only=True
    )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DocumentError("the tokenizer has neither a padding token nor an end-of-text token; name one that has")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def lora_config(parameters: Hyperparameters) -> LoraConfig:
    """The adapter that a LORA training puts beside the base model."""
    targets = parameters.lora_target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=parameters.lora_r,
        lora_alpha=_whole(parameters.lora_alpha),
        lora_dropout=parameters.lora_dropout,
        target_modules=targets if targets in (None, "all-linear") else _names(targets),
        bias=parameters.lora_bias,
        use_rslora=parameters.use_rslora,
        use_dora=parameters.use_dora,
        modules_to_save=_names(parameters.modules_to_save) or None,
        init_lora_weights=parameters.lora_init,
    )


def _dtype(name: str, *, trains_base: bool) -> torch.dtype | str:
    if name == "auto":
        # Updates of a fine-tuning are too small for 16-bit weights: what is trained is kept in 32 bits, and computed
        # with in fewer (`mixed_precision`). What stays frozen keeps the form in which it came, unless it would be
        # computed with on a CPU: few are good at 16 bits.
        return torch.float32 if trains_base or not torch.cuda.is_available() else "auto"
    return getattr(torch, name)  # type: ignore[no-any-return]


def _whole(number: float) -> float:
    """An integer where it is one: some who read adapters take nothing else."""
    return int(number) if number == int(number) else number


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
