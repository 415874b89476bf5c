"""`trainmaster data check`: what the model will see, and what is wrong with which row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from data_tokenizer import make_tokenizer

pytestmark = pytest.mark.usefixtures("connected")

Tm = Callable[..., Result]


def written(directory: Path, rows: list[dict[str, Any]], **training: Any) -> str:
    """A job file with its data and its tokenizer beside it."""
    make_tokenizer().save_pretrained(directory / "model")
    (directory / "model" / "model.safetensors").write_bytes(b"weights")
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "name": "tune",
        "training_config": {"training_type": "SFT", "base_model": {"model_id": "./model"}, **training},
        "data_config": {"sources": [{"path": "rows.jsonl"}], "max_seq_length": 12},
    }
    (directory / "job.json").write_text(json.dumps(document))
    return str(directory / "job.json")


def test_rows_are_shown_with_what_is_trained_on_and_wrong_ones_named(tm: Tm, tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "long:", "completion": "12345678"},
        {"prompt": "x"},
        {"prompt": "y"},
        {"prompt": "z"},
        {"prompt": 1, "completion": "d"},
    ]
    result = tm("data", "check", written(tmp_path, rows), "--rows", "2")
    assert result.exit_code == 1
    shown = result.stdout
    assert "rows.jsonl\n  format   jsonl, 1 file\n  rows     6\n" in shown
    assert "6 to 14 in a row, median 10 (of 2 rows)" in shown
    assert "cut off  1 row, at 12 tokens" in shown
    assert "What stands in ‹ › is context" in shown
    assert "Sends model (3 files, " in result.stderr, "the weights stay here"
    assert "  line 1, prompt and completion, 6 tokens, 2 trained on\n  ‹2+2=›4</s>\n" in shown
    assert "  line 2, prompt and completion, 14 tokens, 7 trained on, end cut off\n  ‹long:›1234567\n" in shown
    told_once, other = (line for line in shown.splitlines() if line.startswith("error: "))
    assert told_once.startswith("error: rows.jsonl, line 3: has no `messages`, no `prompt` with `completion`")
    assert told_once.endswith("(and 2 more rows alike)")
    assert other.startswith("error: rows.jsonl, line 6")


@pytest.mark.long  # training/test_data_tokens.py has this, too
def test_length_above_the_positions_of_the_model_is_told(tm: Tm, tmp_path: Path) -> None:
    file = written(tmp_path, [{"prompt": "2+2=", "completion": "4"}])
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 8}))
    result = tm("data", "check", file)
    assert result.exit_code == 1
    said = "data_config.max_seq_length is 12, but the base model has 8 positions; set it to at most 8"
    assert said in " ".join((result.stdout + result.stderr).split())


def test_rows_that_are_cut_before_what_is_learned_are_not_called_fine(tm: Tm, tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "a prompt that is too long:", "completion": "5"}]
    result = tm("data", "check", written(tmp_path, rows))
    assert result.exit_code == 0
    assert "not trained  1 row, cut before what is learned" in result.stdout
    assert "1 of 2 have no tokens to train on" in result.stdout
    assert "Nothing is wrong" not in result.stdout


def test_good_data_of_a_script_is_read_and_not_tokenized(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    framework = {"type": "CUSTOM", "custom_script_path": "train.py"}
    file = written(tmp_path, [{"anything": [1, 2]}], framework=framework, hyperparameters={"mine": "1"})
    result = tm("data", "check", file, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["ok"]
    assert json.loads(found["sources"][0]["samples"][0]["values"]) == {"anything": [1, 2]}


def test_file_without_data_is_refused(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: n\nworkload: {kind: command, argv: [echo]}\n")
    result = tm("data", "check", str(tmp_path / "job.yaml"))
    assert result.exit_code == 2
    assert "has no data_config" in result.stderr
