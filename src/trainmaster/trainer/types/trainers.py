"""What a job runs: a function, a script, an image or a built-in trainer.

Nothing is checked here: a trainer may be filled in piece by piece. It is checked when it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainmaster.trainer.constants import DEFAULT_PIP_INDEX_URLS
from trainmaster.trainer.types.initializers import Initializer
from trainmaster.trainer.types.results import Runtime


def _default_index_urls() -> list[str]:
    return list(DEFAULT_PIP_INDEX_URLS)


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
    pip_index_urls: list[str] = field(default_factory=_default_index_urls)
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
    pip_index_urls: list[str] = field(default_factory=_default_index_urls)
    num_nodes: int | None = None
    resources_per_node: dict[str, Any] | None = None
    env: dict[str, str] | None = None


class DataType(Enum):
    """Number format of a training."""

    BF16 = "bf16"
    FP32 = "fp32"


class DataFormat(Enum):
    """How the rows of a dataset are written."""

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
        """The names of the arguments."""
        return ["trainer", "runtime", "initializer"]

    def __getitem__(self, key: str) -> CustomTrainer | str | Runtime | Initializer | None:
        if key not in self.keys():
            raise KeyError(key)
        value: CustomTrainer | str | Runtime | Initializer | None = getattr(self, key)
        return value
