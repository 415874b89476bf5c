"""What is fetched before a training starts: a dataset, a model."""

from __future__ import annotations

import re
from abc import ABC
from dataclasses import dataclass, field
from typing import ClassVar

from trainmaster.trainer.constants import INITIALIZER_DEFAULT_IGNORE_PATTERNS


def _default_ignore_patterns() -> list[str] | None:
    return list(INITIALIZER_DEFAULT_IGNORE_PATTERNS)


@dataclass
class BaseInitializer(ABC):
    """Something that is fetched, by its URI."""

    storage_uri: str

    uri_form: ClassVar[str] = "SCHEME://PLACE"
    """How `storage_uri` is written, for people."""
    uri_pattern: ClassVar[str] = r".*"

    def __post_init__(self) -> None:
        if not isinstance(self.storage_uri, str) or not re.fullmatch(self.uri_pattern, self.storage_uri):
            raise ValueError(f"storage_uri must be {self.uri_form}, not {self.storage_uri!r}")


class _HuggingFace:
    uri_form: ClassVar[str] = "hf://OWNER/REPOSITORY or hf://REPOSITORY, with a /PATH or a @REVISION where needed"
    uri_pattern: ClassVar[str] = r"hf://[\w.-]+(/[\w.-]+)?(@[^\s/]+)?(/.*)?"


class _S3:
    uri_form: ClassVar[str] = "s3://BUCKET/PATH"
    uri_pattern: ClassVar[str] = r"s3://[^\s/]+(/.*)?"


@dataclass
class HuggingFaceDatasetInitializer(_HuggingFace, BaseInitializer):
    """A dataset of the Hugging Face Hub."""

    ignore_patterns: list[str] | None = None
    """Files to leave out."""
    access_token: str | None = field(default=None, repr=False)


@dataclass
class S3DatasetInitializer(_S3, BaseInitializer):
    """A dataset in S3, or in what speaks its protocol."""

    ignore_patterns: list[str] | None = None
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    role_arn: str | None = None


@dataclass
class DataCacheInitializer(BaseInitializer):
    """An Iceberg table that is read once, and served to the ranks from a cache."""

    metadata_loc: str
    """Where the metadata file of the table lies."""
    num_data_nodes: int
    head_cpu: str | None = None
    head_mem: str | None = None
    worker_cpu: str | None = None
    worker_mem: str | None = None
    iam_role: str | None = None
    """The role that reads `metadata_loc`."""

    uri_form: ClassVar[str] = "cache://SCHEMA/TABLE"
    uri_pattern: ClassVar[str] = r"cache://[^\s/]+/[^\s/]+"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.num_data_nodes) is not int or self.num_data_nodes <= 1:
            raise ValueError(f"num_data_nodes must be a whole number above 1, not {self.num_data_nodes!r}")
        if not isinstance(self.metadata_loc, str) or not self.metadata_loc.strip():
            raise ValueError(f"metadata_loc must say where the table's metadata file lies, not {self.metadata_loc!r}")


@dataclass
class HuggingFaceModelInitializer(_HuggingFace, BaseInitializer):
    """A model of the Hugging Face Hub."""

    ignore_patterns: list[str] | None = field(default_factory=_default_ignore_patterns)
    access_token: str | None = field(default=None, repr=False)


@dataclass
class S3ModelInitializer(_S3, BaseInitializer):
    """A model in S3, or in what speaks its protocol."""

    ignore_patterns: list[str] | None = field(default_factory=_default_ignore_patterns)
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    role_arn: str | None = None


@dataclass
class Initializer:
    """What is fetched before the training, each in a step of its own."""

    dataset: HuggingFaceDatasetInitializer | S3DatasetInitializer | DataCacheInitializer | None = None
    model: HuggingFaceModelInitializer | S3ModelInitializer | None = None
