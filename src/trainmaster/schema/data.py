"""The check of training data: real rows, as a model will see them, and what is wrong with which."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict

from trainmaster.schema import Doc


class DataProblem(TypedDict):
    """What is wrong with a source, or with one of its rows."""

    message: str
    file: str | None
    row: Annotated[int | None, Doc("The row of the file, or the line of a jsonl or csv file; from 1.")]
    column: str | None


class TokenCounts(TypedDict):
    """How long rows are, in tokens."""

    min: int
    median: int
    max: int


class TokenSegment(TypedDict):
    """Consecutive tokens that are all trained on, or all not."""

    text: str
    tokens: int
    trained: bool


class DataSample(TypedDict):
    """One row, as a model will see it."""

    file: str
    row: int
    shape: Annotated[str | None, Doc("messages, prompt and completion, or text.")]
    values: Annotated[str | None, Doc("The row as it is, where there is no tokenizer.")]
    length: Annotated[int | None, Doc("Tokens before truncation.")]
    samples: Annotated[int, Doc("How many sequences it becomes; a long document may become several.")]
    cut: Annotated[bool, Doc("Whether it is truncated at max_seq_length.")]
    input_ids: list[int]
    tokens: Annotated[list[str], Doc("The text of each token.")]
    trained: Annotated[list[bool], Doc("For each token, whether it is trained on.")]
    segments: list[TokenSegment]


class CheckedSource(TypedDict):
    """One source."""

    path: str
    ok: bool
    format: str | None
    files: int
    rows: Annotated[int, Doc("Rows that were read.")]
    kept: Annotated[int, Doc("Rows that the filters keep.")]
    complete: Annotated[bool, Doc("Whether all of it was read, not just its beginning.")]
    columns: list[str]
    tokenized: Annotated[int, Doc("How many rows were tokenized.")]
    tokens: TokenCounts | None
    cut: Annotated[int, Doc("Tokenized rows that are longer than max_seq_length.")]
    untrained: Annotated[int, Doc("Tokenized rows with nothing left to train on.")]
    problems: list[DataProblem]
    samples: list[DataSample]


class CheckedData(TypedDict):
    """The result of a check."""

    ok: bool
    problem: Annotated[str | None, Doc("What is wrong with the tokenizer, if anything.")]
    max_seq_length: int | None
    sources: list[CheckedSource]
