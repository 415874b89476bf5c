"""Looking at training data, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from trainmaster.server.core.fields import Broken, Environment, Model, StringMap, refuse
from trainmaster.server.core.spec.data import DataConfig, PreprocessConfig, Sources
from trainmaster.server.core.spec.training import BaseModelConfig
from trainmaster.server.core.training.types import TrainingType
from trainmaster.server.core.workloads.base import ShippedFile
from trainmaster.server.http.envelope import Wire

MAX_SHOWN = 100


class ValidateDataBody(Model):
    """The data to look at, and what it is for: a `data_config`, or the `sources` and `preprocess` of one."""

    data_config: DataConfig | None = Field(default=None, description="As a job has it.")
    sources: Sources | None = Field(default=None, description="Instead of data_config: its sources alone.")
    preprocess: PreprocessConfig | None = Field(default=None, description="Beside sources.")
    base_model: BaseModelConfig | None = Field(
        default=None, description="Whose tokenizer is used. Without it and preprocess.tokenizer_id, rows are only read."
    )
    training_type: TrainingType = Field(default=TrainingType.SFT, description="How rows become what is trained on.")
    hyperparameters: StringMap = Field(
        default_factory=dict, description="Of these, completion_only_loss and assistant_only_loss count."
    )
    environment: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Such as HF_TOKEN and AWS_ACCESS_KEY_ID; what is no key, token, region or endpoint is passed over.",
    )
    files: Annotated[tuple[ShippedFile, ...], Field(max_length=8192)] = Field(
        default=(), description="Uploaded files that relative paths name."
    )
    limit: Annotated[int, Strict(), Field(ge=0, le=MAX_SHOWN)] = Field(
        default=3, description="How many rows of each source are shown."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[Broken]:
        if self.data_config is None and self.sources is None:
            yield Broken(("data_config",), "required, unless there are sources")
        for name in ("sources", "preprocess"):
            if self.data_config is not None and getattr(self, name) is not None:
                yield Broken((name,), "is a part of data_config; give one of the two")

    @property
    def data(self) -> DataConfig:
        """The data to look at."""
        if self.data_config is not None:
            return self.data_config
        return DataConfig(sources=self.sources or (), preprocess=self.preprocess or PreprocessConfig())


class DataProblem(Wire):
    """What is wrong with a source, or with one of its rows."""

    message: str
    file: str | None
    row: int | None = Field(description="The row of the file, or the line of a jsonl or csv file; from 1.")
    column: str | None


class TokenCounts(Wire):
    """How long rows are, in tokens."""

    min: int
    median: int
    max: int


class TokenSegment(Wire):
    """Tokens after one another that are all trained on, or all not."""

    text: str
    tokens: int
    trained: bool


class DataSample(Wire):
    """One row, as a model will see it."""

    file: str
    row: int
    shape: str | None = Field(description="messages, prompt and completion, or text.")
    values: str | None = Field(description="The row as it is, where there is no tokenizer.")
    length: int | None = Field(description="Tokens before anything was cut off.")
    samples: int = Field(description="How many sequences it becomes; a long document may become several.")
    cut: bool = Field(description="Whether its end is cut off at max_seq_length.")
    input_ids: list[int]
    tokens: list[str] = Field(description="The text of each token.")
    trained: list[bool] = Field(description="Of each token, whether it is trained on.")
    segments: list[TokenSegment]


class CheckedSource(Wire):
    """One source."""

    path: str
    ok: bool
    format: str | None
    files: int
    rows: int = Field(description="That were read.")
    kept: int = Field(description="That the filters keep.")
    complete: bool = Field(description="Whether all of it was read, not just its beginning.")
    columns: list[str]
    tokenized: int = Field(description="How many rows were tokenized.")
    tokens: TokenCounts | None
    cut: int = Field(description="Of those, how many are longer than max_seq_length.")
    untrained: int = Field(description="Of those, how many have nothing left to train on.")
    problems: list[DataProblem]
    samples: list[DataSample]


class CheckedData(Wire):
    """What was found."""

    ok: bool
    problem: str | None = Field(description="What is wrong with the tokenizer, if anything.")
    max_seq_length: int | None
    sources: list[CheckedSource]
