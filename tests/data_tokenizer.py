"""A byte-level tokenizer for tests, whose tokens are single characters unless they are special."""

from __future__ import annotations

import itertools
from typing import Any

GENERATION = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = GENERATION.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETFUL = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if loop.last %}{{ message.content }}{% else %}…{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes earlier messages differently once others follow."""
WITH_TOOLS = "{% if tools %}[{% for tool in tools %}{{ tool.function.name }}{% endfor %}]{% endif %}" + (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.tool_calls %}{% for call in message.tool_calls %}!{{ call.function.name }}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}"
)
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>")


def make_tokenizer(
    template: str | None = GENERATION,
    *,
    bos: bool = True,
    eos: bool = True,
    adds_bos: bool = False,
    merges: tuple[tuple[str, str], ...] = (),
) -> Any:
    """A tokenizer with a chat template; `merges` are pairs of characters that are one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *map("".join, merges)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    named = {"bos_token": "<s>"} if bos else {}
    named |= {"eos_token": "</s>"} if eos else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, additional_special_tokens=list(SPECIALS[2:]), model_max_length=512, **named
    )
    tokenizer.chat_template = template
    return tokenizer


def shown(tokenizer: Any, input_ids: list[int], mask: list[int]) -> str:
    """A sample as text, with what is trained on in brackets."""
    runs = itertools.groupby(zip(input_ids, mask, strict=True), key=lambda pair: pair[1])
    parts = ((tokenizer.decode([token for token, _ in run]), trained) for trained, run in runs)
    return "".join(f"[{text}]" if trained else text for text, trained in parts)
