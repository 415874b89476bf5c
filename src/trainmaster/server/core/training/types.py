"""The kinds of training, and what can do them."""

from __future__ import annotations

from enum import StrEnum


class TrainingType(StrEnum):
    """What kind of training it is."""

    SFT = "SFT"
    LORA = "LORA"
    QLORA = "QLORA"
    DPO = "DPO"
    RLHF = "RLHF"
    CONTINUED_PRETRAIN = "CONTINUED_PRETRAIN"
    FULL_FINETUNE = "FULL_FINETUNE"


LORA_TYPES = frozenset({TrainingType.LORA, TrainingType.QLORA})
"""The types that train an adapter beside the base model."""


class FrameworkType(StrEnum):
    """What does the training. CUSTOM is a script of the user's own."""

    HF_TRAINER = "HF_TRAINER"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON = "MEGATRON"
    CUSTOM = "CUSTOM"
