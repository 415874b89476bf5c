"""What a job runs: a function, a script, an image or a built-in trainer; and the initializers that fetch its data.

Programs written for Kubeflow import all types from here, those of results too. Nothing is checked here: a trainer may
be filled in piece by piece, and is checked when it is submitted.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

from trainmaster.trainer.constants import DEFAULT_PIP_INDEX_URLS, INITIALIZER_DEFAULT_IGNORE_PATTERNS, TORCH_TUNE
from trainmaster.trainer.types.results import (
    Checkpoint,
    Event,
    Listing,
    Progress,
    Runtime,
    RuntimeKind,
    RuntimeTrainer,
    Step,
    TrainerType,
    TrainJob,
)


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


@dataclass
class _HuggingFace(BaseInitializer):
    ignore_patterns: list[str] | None = None
    access_token: str | None = field(default=None, repr=False)

    uri_form: ClassVar[str] = "hf://OWNER/REPOSITORY or hf://REPOSITORY, with a /PATH or a @REVISION where needed"
    uri_pattern: ClassVar[str] = r"hf://[\w.-]+(/[\w.-]+)?(@[^\s/]+)?(/.*)?"


@dataclass
class _S3(BaseInitializer):
    ignore_patterns: list[str] | None = None
    endpoint: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    region: str | None = None
    role_arn: str | None = None

    uri_form: ClassVar[str] = "s3://BUCKET/PATH"
    uri_pattern: ClassVar[str] = r"s3://[^\s/]+(/.*)?"


@dataclass
class HuggingFaceDatasetInitializer(_HuggingFace):
    """A dataset of the Hugging Face Hub."""


@dataclass
class S3DatasetInitializer(_S3):
    """A dataset in S3, or in what speaks its protocol."""


@dataclass
class DataCacheInitializer(BaseInitializer):
    """An Iceberg table that is read once, and served to the ranks from a cache."""

    metadata_loc: str
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
class HuggingFaceModelInitializer(_HuggingFace):
    ignore_patterns: list[str] | None = field(default_factory=lambda: list(INITIALIZER_DEFAULT_IGNORE_PATTERNS))


@dataclass
class S3ModelInitializer(_S3):
    """A model in S3, or in what speaks its protocol."""

    ignore_patterns: list[str] | None = field(default_factory=lambda: list(INITIALIZER_DEFAULT_IGNORE_PATTERNS))


@dataclass
class Initializer:
    """What is fetched before the training, each in a step of its own."""

    dataset: HuggingFaceDatasetInitializer | S3DatasetInitializer | DataCacheInitializer | None = None
    model: HuggingFaceModelInitializer | S3ModelInitializer | None = None


@dataclass
class CustomTrainer:
    """A function that is the whole training: its source is shipped, so its imports belong inside it."""

    func: Callable[..., Any]
    func_args: dict[str, Any] | None = None
    """Passed as `func(**func_args)`, or as the one dictionary where the function cannot take them by name."""
    image: str | None = None
    """A container image to run it in, on backends that run images; the runtime's own when None."""
    packages_to_install: list[str] | None = None
    """What pip installs first, such as `einops>=0.8`."""
    pip_index_urls: list[str] = field(default_factory=lambda: list(DEFAULT_PIP_INDEX_URLS))
    """The index, then further ones. None given: as pip is configured where the job runs."""
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    """Such as `{"gpu": 4, "cpu": 5, "memory": "10G"}`, or `{"mig-1g.5gb": 1}`."""
    env: dict[str, str] | None = None
    """Variables for the function, over those that it has anyway."""


@dataclass
class CustomTrainerContainer:
    """An image that is the whole training."""

    image: str
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = None


@dataclass
class ScriptTrainer:
    """A script, or a directory with one in it: files are shipped by content, without what `.gitignore` ignores."""

    script: str
    """Its path; below `directory` where one is given."""
    args: list[str] | None = None
    directory: str | None = None
    """Shipped as a whole, and the working directory of the script. None: the script alone is shipped."""
    image: str | None = None
    packages_to_install: list[str] | None = None
    pip_index_urls: list[str] = field(default_factory=lambda: list(DEFAULT_PIP_INDEX_URLS))
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = None


class DataType(Enum):
    BF16 = "bf16"
    FP32 = "fp32"


class DataFormat(Enum):
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"
    ARROW = "arrow"
    TEXT = "text"
    XML = "xml"


class Loss(Enum):
    """What a built-in trainer minimises. The value is a name that torchtune has for it; torchtune does not run here."""

    CEWithChunkedOutputLoss = "torchtune.modules.loss.CEWithChunkedOutputLoss"


@dataclass
class LoraConfig:
    """An adapter of low rank, in place of training all weights."""

    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    lora_attn_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj", "output_proj"])
    lora_rank: int | None = None
    lora_alpha: int | None = None
    lora_dropout: float | None = None
    quantize_base: bool | None = None
    use_dora: bool | None = None


@dataclass
class TorchTuneInstructDataset:
    """How rows become instructions and answers."""

    source: DataFormat | None = None
    split: str | None = None
    train_on_input: bool | None = None
    new_system_prompt: str | None = None
    column_map: dict[str, str] | None = None


@dataclass
class TorchTuneConfig:
    """A fine-tuning of the runtime's model; what is None is the built-in trainer's own default."""

    dtype: DataType | None = None
    batch_size: int | None = None
    epochs: int | None = None
    loss: Loss | None = None
    num_nodes: int | None = None
    peft_config: LoraConfig | None = None
    dataset_preprocess_config: TorchTuneInstructDataset | None = None
    resources_per_node: dict[str, Any] | None = None


@dataclass
class BuiltinTrainer:
    """A built-in trainer, which needs parameters only."""

    config: TorchTuneConfig
    env: dict[str, str] | None = None
    """Variables for the training and its preparation, over those of the runtime; kubeflow's own has none."""


@dataclass
class TrainJobTemplate:
    """The arguments of `train()`, to be kept and used again: `client.train(**template)`."""

    trainer: CustomTrainer
    runtime: str | Runtime | None = None
    initializer: Initializer | None = None

    def keys(self) -> list[str]:
        return ["trainer", "runtime", "initializer"]

    def __getitem__(self, key: str) -> CustomTrainer | str | Runtime | Initializer | None:
        if key not in self.keys():
            raise KeyError(key)
        value: CustomTrainer | str | Runtime | Initializer | None = getattr(self, key)
        return value


__all__ = [
    "TORCH_TUNE",
    "BaseInitializer",
    "BuiltinTrainer",
    "Checkpoint",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataCacheInitializer",
    "DataFormat",
    "DataType",
    "Event",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "Listing",
    "LoraConfig",
    "Loss",
    "Progress",
    "Runtime",
    "RuntimeKind",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "ScriptTrainer",
    "Step",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJob",
    "TrainJobTemplate",
    "TrainerType",
]
