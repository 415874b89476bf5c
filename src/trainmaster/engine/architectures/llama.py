"""Llama, which the other families are described by their differences from."""

from __future__ import annotations

from trainmaster.engine.architectures.family import Bias, Family

LLAMA = Family(mlp_bias=Bias.IF_SAID)
