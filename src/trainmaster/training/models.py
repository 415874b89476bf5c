"""Loads base model and tokenizer, and configures the adapter and packed attention where they apply."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.compute as pc
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import flash_attention_mask

from trainmaster.server.core.training.hyperparameters import ALL_LINEAR, Value
from trainmaster.server.core.training.options import refused_arguments
from trainmaster.training.document import Document, DocumentError, Prepared, parsed


def load_model(document: Document, prepared: Prepared, *, trains_base: bool) -> PreTrainedModel:
    """The base model, on the CPU. `trains_base`: its own weights are trained, not only an adapter's."""
    base = document.training.base_model
    for name, instead in refused_arguments(base.model_kwargs):
        raise DocumentError(f"base_model.model_kwargs.{name}: {instead}")
    options: dict[str, Any] = {name: parsed(text) for name, text in base.model_kwargs.items()}
    if attention := document.hyperparameters.get("attn_implementation"):
        options["attn_implementation"] = attention
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
            raise  # of this machine, such as a failing disk
        with_options = f" with model_kwargs {', '.join(base.model_kwargs)}" if base.model_kwargs else ""
        raise DocumentError(f"the base model {base.model_id} cannot be loaded{with_options}: {error}") from error
    if not isinstance(model, PreTrainedModel):
        raise DocumentError(f"{base.model_id} is not a language model that transformers can train")
    prefer_packed_attention(model, document)
    return model


def load_config(document: Document, prepared: Prepared) -> PretrainedConfig:
    """The base model's configuration, as it will be loaded. Raises OSError or ValueError where it cannot be read."""
    base = document.training.base_model
    config = AutoConfig.from_pretrained(
        prepared.model_path,
        trust_remote_code=base.trust_remote_code,
        local_files_only=True,
        **{name: parsed(text) for name, text in base.model_kwargs.items()},
    )
    assert isinstance(config, PretrainedConfig)
    return config


def precision(document: Document, *, cuda: bool) -> str:
    """The number format of the computation: bf16, fp16, fp8, which only the engine has, or no, that of the weights."""
    wanted = str(document.hyperparameters["mixed_precision"])
    if wanted == "auto":
        wanted = "bf16" if cuda and torch.cuda.is_bf16_supported() else "no"
    if wanted == "fp16" and not cuda:
        raise DocumentError("hyperparameters.mixed_precision: fp16 needs a GPU; use bf16 or no")
    return wanted


def load_tokenizer(document: Document, prepared: Prepared) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(
        prepared.tokenizer_path, trust_remote_code=document.training.base_model.trust_remote_code, local_files_only=True
    )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DocumentError("the tokenizer has neither a padding token nor an end-of-text token; name one that has")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset) -> None:
    """Refuse rows with tokens that the model has no embedding for: a GPU only says that an assertion failed."""
    known = model.get_input_embeddings().get_parameter("weight").shape[0]
    if len(tokenizer) <= known:
        return
    highest = max(pc.max(part.flatten()).as_py() for part in rows.data.column("input_ids").chunks)
    if highest >= known:
        raise DocumentError(
            f"the rows have the token '{tokenizer.decode([highest])}' (number {highest}), and the model has embeddings "
            f"for {known} tokens: name the model's own tokenizer, or a model that was resized for this one"
        )


def lora_config(parameters: Mapping[str, Value]) -> LoraConfig:
    options: dict[str, Any] = {
        # Some readers of adapters take integers alone.
        "lora_alpha": int(alpha) if (alpha := float(parameters["lora_alpha"] or 0)).is_integer() else alpha,
        "target_modules": targets if (targets := parameters["lora_target_modules"]) == ALL_LINEAR else _names(targets),
        "modules_to_save": _names(parameters.get("modules_to_save")) or None,
        "init_lora_weights": parameters["lora_init"],
        "bias": parameters.get("lora_bias", "none"),
        "r": parameters["lora_r"],
        **{name: parameters[name] for name in ("lora_dropout", "use_rslora", "use_dora") if name in parameters},
    }
    return LoraConfig(task_type="CAUSAL_LM", **options)


def _dtype(name: str, *, trains_base: bool) -> torch.dtype | str:
    if name == "auto":
        # Updates of a fine-tuning are too small for 16-bit weights: trained weights have 32 bits, and `mixed_precision`
        # computes with 16. Frozen weights keep their dtype, except on a CPU: few compute well with 16 bits.
        return torch.float32 if trains_base or not torch.cuda.is_available() else "auto"
    return getattr(torch, name)  # type: ignore[no-any-return]


def _names(value: Value) -> list[str]:
    return [name.strip() for name in str(value or "").split(",") if name.strip()]


# Attention for packed samples, by PyTorch's variable-length kernels. transformers' default also computes attention
# between samples, and masks it: for a small model that is most of a step. Other implementations of such kernels need a
# package that takes hours to build, or minutes of compilation.

PACKED = "trainmaster_packed"
_HEAD_DIMS = range(8, 257, 8)
_LAYERS = {"full_attention", "sliding_attention"}
_NOT_COMPUTED = ("s_aux", "softcap")
"""Arguments of some models' attention that the kernels do not take."""


def prefer_packed_attention(model: PreTrainedModel, document: Document) -> None:
    """Use these kernels on a GPU where the samples of a batch are laid end to end, if the model allows it."""
    parameters = document.hyperparameters
    if parameters.get("attn_implementation") or not (document.packing or parameters.get("padding_free")):
        return
    halved = parameters["mixed_precision"] != "no" or model.dtype in (torch.bfloat16, torch.float16)
    if halved and torch.cuda.is_available() and torch.cuda.is_bf16_supported() and _able(model) and _register():
        model.set_attn_implementation(PACKED)


def _able(model: PreTrainedModel) -> bool:
    """Whether the kernels compute everything that the architecture needs of attention."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return (
        model.config._attn_implementation == "sdpa"
        and bool(getattr(model, "_supports_flash_attn", False))
        and head_dim in _HEAD_DIMS
        and set(getattr(config, "layer_types", None) or ()) <= _LAYERS
        and not getattr(config, "attention_dropout", 0)
        and not getattr(config, "attn_logit_softcapping", None)
        and not any(name.endswith("sinks") for name, _ in model.named_parameters())
    )


def _register() -> bool:
    """Register the implementation with transformers; false where this PyTorch lacks the kernels."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before 2.10
        return False
    AttentionInterface.register(PACKED, PackedSampleAttention(varlen_attn))
    AttentionMaskInterface.register(PACKED, flash_attention_mask)
    return True


class PackedSampleAttention:
    """Causal attention of each sample to itself, by PyTorch's `varlen_attn` or what has its signature."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._shares_heads = "enable_gqa" in inspect.signature(kernel).parameters
        self._positions: torch.Tensor | None = None
        self._ends: tuple[torch.Tensor, int] | None = None

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        position_ids: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Called by transformers: `[batch, heads, length, width]` in, `[batch, length, heads, width]` out."""
        if attention_mask is not None or dropout or position_ids is None:
            raise RuntimeError(
                "rows with padding reached attention for packed samples; set hyperparameters.attn_implementation: sdpa"
            )
        if asked := [name for name in _NOT_COMPUTED if others.get(name) is not None]:
            raise RuntimeError(
                f"attention for packed samples knows no {asked[0]}; set hyperparameters.attn_implementation: sdpa"
            )
        batch, heads, length, width = query.shape
        ends, longest = self._ends_of(position_ids.expand(batch, length))
        window = (sliding_window - 1 if sliding_window else -1, 0)
        options: dict[str, Any] = {"enable_gqa": True} if self._shares_heads else {}
        if not self._shares_heads:
            key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
        laid = [_narrow(each).transpose(1, 2).reshape(batch * length, -1, width) for each in (query, key, value)]
        attended: torch.Tensor = self._kernel(
            *laid, ends, ends, longest, longest, scale=scaling, window_size=window, **options
        )
        return attended.view(batch, length, heads, width), None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _ends_of(self, positions: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The samples' cumulative lengths from 0, and the longest. Cached for a step's layers: it waits for the GPU."""
        if self._ends is None or self._positions is None or self._positions.data_ptr() != positions.data_ptr():
            flat = positions.flatten()
            starts = (flat == 0).nonzero().flatten()
            ends = torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)
            # Keeping the positions keeps their address from being reused.
            self._positions, self._ends = positions, (ends, int(ends.diff().max()))
        return self._ends


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """Cast to the autocast dtype: norms may have widened the tensor."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor
