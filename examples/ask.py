"""Asks two models the same questions: python examples/ask.py BEFORE AFTER QUESTION..."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"


def main(before: str, after: str, questions: list[str]) -> None:
    """Print a table of what each of them answers."""
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoModelForCausalLM, AutoTokenizer

    table = Table("question", "before", "after")
    tokenizer = AutoTokenizer.from_pretrained(after)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (before, after)]
    for question in questions:
        table.add_row(question, *(_answer(model, tokenizer, question) for model in models))
    Console().print(table)


def _answer(model: Any, tokenizer: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    answer: str = tokenizer.decode(said[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer.strip()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
