"""Asks two models the same questions: python examples/ask.py QUESTIONS.jsonl BEFORE AFTER

The file has conversations, `{"messages": [question, answer]}` on each line, that neither model was trained on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SHOWN = 5


def main(file: Path, before: str, after: str) -> None:
    """Print a table of what each of them answers, and how much of it is right."""
    from rich.console import Console
    from rich.table import Table

    conversations = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    questions, expected = ([messages[index]["content"] for messages in conversations] for index in (0, 1))
    answers = [_answers(path, questions) for path in (before, after)]
    table = Table("question", "right answer", "before", "after", pad_edge=False)
    for row in list(zip(questions, expected, *answers, strict=True))[:SHOWN]:
        table.add_row(*row)
    Console().print(table)
    right = [sum(map(str.__eq__, said, expected)) for said in answers]
    print(f"right answers to {len(questions)} such questions: {right[0]} before, {right[1]} after")


def _answers(path: str, questions: list[str]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    said = AutoModelForCausalLM.from_pretrained(path).generate(**prompts, max_new_tokens=12, do_sample=False)
    new = said[:, prompts["input_ids"].shape[1] :]
    return [answer.strip() for answer in tokenizer.batch_decode(new, skip_special_tokens=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
