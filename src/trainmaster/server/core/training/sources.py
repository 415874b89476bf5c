"""Sources of models and data, as jobs name them, and splits of data. Pure: nothing is opened. Splits are written as in
Hugging Face datasets: `train`, `train[:10%]`, `train[10:20]`, `train[-5%:]+test`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class ModelSource(StrEnum):
    """Where a base model comes from."""

    HUGGINGFACE = "huggingface"
    SCAIATLAS = "scaiatlas"
    LOCAL = "local"
    S3 = "s3"
    URL = "url"
    ARTIFACTS = "artifacts"


_SOURCE_OF_SCHEME = {
    "file": ModelSource.LOCAL,
    "hf": ModelSource.HUGGINGFACE,
    "s3": ModelSource.S3,
    "http": ModelSource.URL,
    "https": ModelSource.URL,
    "scaiatlas": ModelSource.SCAIATLAS,
}
SOURCE_TYPES: Mapping[str, str] = {
    "file": "file", "local": "file", "hf": "hf", "huggingface": "hf", "s3": "s3",
    "http": "http", "https": "https", "url": "https", "scaidrive": "scaidrive", "scaiatlas": "scaiatlas",
}  # fmt: skip
"""What `type` of a data source may say, and the scheme that its path then has, where it names none."""
_ARTIFACTS = f"{ModelSource.ARTIFACTS}:"
"""Jobs show what they leave like this, so that it can be named like this too."""
_HUB = re.compile(
    r"(?:datasets/)?(?P<repo>[^/@]+(?:/[^/@]+)?)(?:@(?P<early>[^/]+))?(?:/(?P<path>.*?))?(?:@(?P<late>[^@]+))?"
)
_LOCAL_START = re.compile(r"/|\.{1,2}(/|$)|~")


def model_source(model_id: str, named: ModelSource | None = None) -> ModelSource:
    """Where a model lies: where the request says, or else what its id looks like.

    >>> [str(model_source(name)) for name in ("org/model", "/srv/model", "./model", "s3://bucket/model")]
    ['huggingface', 'local', 'local', 's3']
    >>> str(model_source("artifacts:job-4jd8wz0q1c2x/output/model"))
    'artifacts'
    """
    if named is not None:
        return named
    if model_id.startswith(_ARTIFACTS):
        return ModelSource.ARTIFACTS
    if (scheme := scheme_of(model_id)) is None:
        return ModelSource.LOCAL if _LOCAL_START.match(model_id) else ModelSource.HUGGINGFACE
    return _SOURCE_OF_SCHEME.get(scheme, ModelSource.URL)


@dataclass(frozen=True, slots=True)
class LeftByJob:
    """A directory that another job left."""

    job_id: str
    path: str
    """Below what is the job's: `output/model`, say."""


def left_by_job(name: str) -> LeftByJob:
    """What the name of a model with the source `artifacts` stands for; ValueError if it is no such name.

    >>> left_by_job("artifacts:job-4jd8wz0q1c2x/output/model/")
    LeftByJob(job_id='job-4jd8wz0q1c2x', path='output/model')
    """
    job_id, _, path = name.removeprefix(_ARTIFACTS).rstrip("/").partition("/")
    parts = [job_id, *path.split("/")]
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"'{name}' is no directory of a job; write {_ARTIFACTS}JOB/output/model, as the job shows it")
    return LeftByJob(job_id, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """What `hf://owner/name[/path][@revision]` names."""

    repo: str
    path: str
    revision: str | None


def hub_name(uri: str) -> HubName | None:
    """What a URI names of the Hugging Face Hub; None when it is not written like one.

    >>> hub_name("hf://owner/name/data/*.parquet@v1")
    HubName(repo='owner/name', path='data/*.parquet', revision='v1')
    >>> hub_name("hf://gpt2")
    HubName(repo='gpt2', path='', revision=None)
    """
    if (found := _HUB.fullmatch(uri.removeprefix("hf://").rstrip("/"))) is None:
        return None
    return HubName(repo=found["repo"], path=found["path"] or "", revision=found["late"] or found["early"])


def file_path(path: str) -> str | None:
    """The path of a file, where a data source or a place for results is one; None where it is something else.

    >>> file_path("data/train.jsonl"), file_path("file:///srv/train.jsonl"), file_path("hf://org/data")
    ('data/train.jsonl', '/srv/train.jsonl', None)
    """
    return path.removeprefix("file://") if scheme_of(path) in (None, "file") else None


def data_path(path: str, named_type: str | None = None) -> str | None:
    """The path of a file, where a data source is one; None where it is something else.

    >>> data_path("org/data"), data_path("org/data", "hf")
    ('org/data', None)
    """
    typed = SOURCE_TYPES.get((named_type or "file").lower(), "file")
    return file_path(path) if scheme_of(path) is not None or typed == "file" else None


def fixed_part(path: str) -> str:
    """The directory below which all matches of a pattern lie; a path without wild characters is its own.

    >>> fixed_part("/srv/data/*/train-?.jsonl"), fixed_part("/srv/rows.jsonl"), fixed_part("*.jsonl")
    ('/srv/data', '/srv/rows.jsonl', '')
    """
    if (wild := re.search(r"[*?[]", path)) is None:
        return path
    above, slash, _ = path[: wild.start()].rpartition("/")
    return above or slash


def scheme_of(path: str) -> str | None:
    """None for a plain path."""
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", path)
    return found[1] if found else None


_BOUND = r"(-?[0-9]+%?)?"
_SLICE = re.compile(rf"{_BOUND}:{_BOUND}")
_PART = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<rows>[^\]]*)\])?")
_EXAMPLES = "write it like train, train[:1000], train[10%:20%] or train+test"


@dataclass(frozen=True, slots=True)
class Bound:
    """Where a slice begins or ends: a row, or a percentage of all rows; negative ones count from the end."""

    value: int
    percent: bool = False

    @classmethod
    def read(cls, text: str) -> Self:
        percent = text.endswith("%")
        value = int(text.removesuffix("%"))
        if percent and abs(value) > 100:
            raise ValueError(f"{text} is more than 100%")
        return cls(value, percent)

    def __str__(self) -> str:
        return f"{self.value}%" if self.percent else str(self.value)

    @property
    def needs_count(self) -> bool:
        return self.percent or self.value < 0

    def place(self, count: int) -> int:
        """Its place among so many rows. Half a row is rounded up."""
        place = (abs(self.value) * count * 2 + 100) // 200 if self.percent else abs(self.value)
        return max(0, min(count, count - place if self.value < 0 else place))


@dataclass(frozen=True, slots=True)
class Slice:
    """Some consecutive rows of a split; by default all of them."""

    start: Bound | None = None
    stop: Bound | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """A slice as it stands between brackets; ValueError when it is written otherwise."""
        if (found := _SLICE.fullmatch(text)) is None:
            raise ValueError(f"[{text}] is no slice; {_EXAMPLES}")
        start, stop = (Bound.read(bound) if bound else None for bound in found.groups())
        return cls(start, stop)

    def __str__(self) -> str:
        return f"{'' if self.start is None else self.start}:{'' if self.stop is None else self.stop}"

    def places(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """The first row, and the one after the last; None: until the end. Rows are counted only where that matters."""
        start, stop = self.start or Bound(0), self.stop
        if start.needs_count or (stop is not None and stop.needs_count):
            total = count()
            return start.place(total), total if stop is None else stop.place(total)
        return start.value, None if stop is None else stop.value


ALL_ROWS = Slice()


@dataclass(frozen=True, slots=True)
class SplitPart:
    name: str
    rows: Slice = ALL_ROWS

    def __str__(self) -> str:
        return self.name if self.rows == ALL_ROWS else f"{self.name}[{self.rows}]"


def read_split(text: str) -> tuple[SplitPart, ...]:
    """The parts of a split; ValueError when it is written otherwise.

    >>> [str(part) for part in read_split("train[:10%] + test")]
    ['train[:10%]', 'test']
    """
    return tuple(_part(part.strip()) for part in text.split("+"))


def _part(text: str) -> SplitPart:
    if (found := _PART.fullmatch(text)) is None:
        raise ValueError(f"'{text}' is no split; {_EXAMPLES}")
    return SplitPart(found["name"], ALL_ROWS if found["rows"] is None else Slice.read(found["rows"]))
