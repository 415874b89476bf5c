"""Preferences as tokens: which rows they may be, what is trained on of both answers, and what a check shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_tokenizer import make_tokenizer, shown
from trainmaster.training.data.dataset import IGNORED, build
from trainmaster.training.data.encoder import Encoder
from trainmaster.training.data_check import check
from trainmaster.training.document import LocalSource, TokenizationConfig
from trainmaster.training.fetching.access import Access
from trainmaster.training.steps import Origin, RowError

ORIGIN = Origin(source="data.jsonl", file="data.jsonl", number=7, unit="line")
USER = {"role": "user", "content": "hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("yo", "no"))
TALK = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
TEXT = {"prompt": "q: ", "chosen": "abcd", "rejected": "x"}


def document(model: Path | None = None, *, loss: str = "sigmoid", **data: Any) -> dict[str, Any]:
    base = {} if model is None else {"base_model": {"model_id": str(model)}}
    return {
        "training_config": {"training_type": "DPO", "hyperparameters": {"loss_type": loss}, **base},
        "data_config": {"sources": [{"path": "data.jsonl"}], **data},
    }


def encoded(row: dict[str, Any], *, length: int = 200, **preprocess: Any) -> list[str]:
    """Both answers, with what is trained on in brackets."""
    tokenizer = make_tokenizer()
    config = TokenizationConfig.from_document(document(preprocess=preprocess))
    samples = Encoder(config, tokenizer, length).encode([row], [ORIGIN])[0]
    return [shown(tokenizer, sample.input_ids, sample.mask) for sample in samples]


def test_answers_are_trained_on_and_the_prompt_is_not() -> None:
    assert encoded(TEXT) == ["q: [abcd</s>]", "q: [x</s>]"]
    opening = "<|user|>hi<|end|><|assistant|>"
    assert encoded(TALK) == [f"{opening}[yo<|end|>]", f"{opening}[no<|end|>]"]


def test_whole_conversations_have_what_they_begin_with_for_a_prompt() -> None:
    whole = {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}
    opening = "<|user|>hi<|end|><|assistant|>yo<|end|><|user|>hi<|end|><|assistant|>"
    assert encoded(whole) == [f"{opening}[yo<|end|>]", f"{opening}[no<|end|>]"]


def test_columns_may_have_other_names() -> None:
    row = {"question": "q: ", "better": "a", "worse": "b"}
    names = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    assert encoded(row, field_mapping=names) == ["q: [a</s>]", "q: [b</s>]"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no `rejected`, which this training type needs"),
        ({"chosen": "b", "rejected": "c"}, "has no `prompt`, which this training type needs"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "is the same as 'chosen'; leave such rows out"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "column 'rejected': is empty"),
        (
            {"prompt": "a", "chosen": [GOOD], "rejected": [BAD]},
            "and 'chosen' a list of messages; expected both as text",
        ),
        ({"chosen": [USER, GOOD], "rejected": [GOOD]}, "begins with another message than 'chosen'"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "do not each end with a message of their own"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "is the same as 'chosen'"),
        ({"messages": [USER, GOOD]}, "has no `chosen`"),
    ],
)
def test_row_that_is_no_preference_is_refused_with_what_is_missing(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError) as caught:
        encoded(row)
    assert said in str(caught.value)


def test_pairs_become_rows_of_two_sequences(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (TEXT, TALK)))
    source = LocalSource(path="data.jsonl", files=(tmp_path / "data.jsonl",), format="jsonl")
    config = TokenizationConfig.from_document(document())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    made = build(config, tokenizer, [source], max_seq_length=5, directory=scratch)
    # Of the second row nothing that is trained on is left.
    assert (len(made.train), made.cut, made.left_out) == (1, 2, 1)
    [row] = made.train
    assert row["seq_lengths"] == [5, 5]
    assert tokenizer.decode(row["input_ids"]) == "q: abq: x</s>"
    assert [label != IGNORED for label in row["labels"]] == ([False] * 3 + [True] * 2) * 2


def test_check_shows_both_answers(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = [TEXT, TALK, {"prompt": "a"}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    access = Access(cache=tmp_path / "cache", working_directory=tmp_path)
    found = check(document(tmp_path / "model", max_seq_length=64), access, limit=1)
    [source] = found["sources"]
    assert [(each["row"], each["shape"]) for each in source["samples"]] == [
        (1, "prompt and chosen"),
        (1, "prompt and rejected"),
    ]
    trained = [[part["text"] for part in each["segments"] if part["trained"]] for each in source["samples"]]
    assert trained == [["abcd</s>"], ["x</s>"]]
    assert ["has no `chosen`" in problem["message"] for problem in source["problems"]] == [True]


def judged(rows: list[dict[str, Any]], directory: Path) -> Any:
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = LocalSource(path="data.jsonl", files=(directory / "data.jsonl",), format="jsonl")
    config = TokenizationConfig.from_document(document(loss="kto"))
    scratch = directory / "scratch"
    scratch.mkdir()
    return build(config, make_tokenizer(), [source], max_seq_length=64, directory=scratch).train


def test_single_answers_keep_whether_they_were_liked(tmp_path: Path) -> None:
    chat = {"prompt": [USER], "completion": [BAD], "label": 0}
    made = judged([{"prompt": "q: ", "completion": "abcd", "label": True}, chat], tmp_path)
    assert sorted(made["liked"]) == [False, True]
    assert "seq_lengths" not in made.column_names


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "completion": "b"}, "has no `label`"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "expected true for a liked answer, or false"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has no `completion`"),
    ],
)
def test_row_that_is_no_judgement_is_refused_with_what_is_missing(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RowError) as caught:
        judged([row], tmp_path)
    assert said in str(caught.value)
