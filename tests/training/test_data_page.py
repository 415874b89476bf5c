"""What the page on data shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from data_tokenizer import make_tokenizer
from trainmaster.plain_yaml import parse_yaml
from trainmaster.server.core.spec.data import DataConfig, Filter, FilterOp
from trainmaster.server.core.spec.documents import parse
from trainmaster.training.data.formats import FORMAT_OF_SUFFIX
from trainmaster.training.data.row_selection import predicate
from trainmaster.training.data_check import check
from trainmaster.training.fetching.access import Access

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text()
BLOCK = re.compile(r"^```(\w+) ([\w. ]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = {name: text for kind, name, text in BLOCK.findall(PAGE) if kind == "json"}
EXAMPLES = [(name, text) for kind, name, text in BLOCK.findall(PAGE) if kind == "yaml"]


def config_of(text: str) -> dict[str, Any]:
    return parse(DataConfig, parse_yaml(text, "data.md")).model_dump(mode="json")


def looked_at(text: str, directory: Path) -> dict[str, Any]:
    """What a check finds in the files that the page shows."""
    for name, content in FILES.items():
        (directory / name).write_text(content)
    make_tokenizer().save_pretrained(directory / "model")
    document = {
        "training_config": {"training_type": "SFT", "base_model": {"model_id": str(directory / "model")}},
        "data_config": config_of(text),
    }
    return check(document, Access(cache=directory / "cache", working_directory=directory), limit=4)


def test_page_has_examples() -> None:
    assert [name for name, _ in EXAMPLES] == ["data", "data", "data parsed", "data"]
    assert set(FILES) == {"chats.jsonl", "questions.jsonl"}


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES])
def test_example_is_accepted(text: str) -> None:
    assert config_of(text)["sources"]


def test_first_example_trains_on_what_the_page_says(tmp_path: Path) -> None:
    found = looked_at(EXAMPLES[0][1], tmp_path)
    assert found["ok"]
    (source,) = found["sources"]
    trained = [[part["text"] for part in row["segments"] if part["trained"]] for row in source["samples"]]
    assert trained == [
        ["4<|end|>"],
        ["Hello.<|end|>"],
        [" Paris.</s>"],
        ["Plain text is trained on as it is.</s>"],
    ]


def test_second_example_keeps_and_maps_what_the_page_says(tmp_path: Path) -> None:
    (source,) = looked_at(EXAMPLES[1][1], tmp_path)["sources"]
    assert (source["ok"], source["rows"], source["kept"]) == (True, 3, 2)
    assert [row["segments"][0]["text"] for row in source["samples"]] == ["2+2?", "Wie geht's?"]


def test_last_example_mixes_sources_with_different_columns(tmp_path: Path) -> None:
    chats, questions = looked_at(EXAMPLES[3][1], tmp_path)["sources"]
    assert (chats["ok"], questions["ok"]) == (True, True)
    assert (chats["kept"], questions["kept"]) == (4, 2)


def test_page_has_every_format_and_every_op() -> None:
    formats = re.findall(r"^\| `(\w+)` \| (`\.\S.*?) \|", PAGE, re.MULTILINE)
    said = {suffix: name for name, suffixes in formats for suffix in re.findall(r"`(\.\w+)`", suffixes)}
    assert said == dict(FORMAT_OF_SUFFIX)
    table = PAGE.partition("| `op` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) - {"value"} == set(FilterOp)


@pytest.mark.parametrize("op", FilterOp)
def test_every_op_that_is_accepted_is_known_to_the_reader(op: FilterOp) -> None:
    value = {"in": ["a"], "not_in": ["a"], "is_null": None, "not_null": None}.get(op, "a")
    holds = predicate(Filter(column="c", op=op, value=value), textual=False)
    of_nothing = {"ne", "not_in", "not_contains", "is_null"}
    assert holds({}) is (op in of_nothing)
