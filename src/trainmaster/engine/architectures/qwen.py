"""Qwen 2 and 3."""

from __future__ import annotations

from trainmaster.engine.architectures.family import Bias, Family, HeadNorm

QWEN2 = Family(qkv_bias=Bias.ALWAYS, output_bias=Bias.NEVER)
QWEN3 = Family(head_dim=128, head_norm=HeadNorm.EACH_HEAD)
