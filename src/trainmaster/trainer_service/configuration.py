"""The configuration of a trainer service, as the server writes it to `service.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trainmaster.protocol.trainer_requests import ModelMode


class ServiceConfigurationError(ValueError):
    """The document is not one that this service can be started with; the message says what is wrong."""


def _directory(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"{path} is no directory")
    return path


class Configuration(BaseModel):
    """One service: its base model, and what clients may ask of it. Fields of a newer server are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    base_model: str
    """As clients call it."""
    model_path: Annotated[Path, AfterValidator(_directory)]
    """A directory with a transformers checkpoint."""
    aliases: tuple[str, ...] = ()
    """Other names of the same model."""
    mode: ModelMode = ModelMode.LORA
    lora_rank: int = Field(default=0, ge=0)
    """Of adapters whose request names no rank, and the highest that a request may name; 0: no limit."""
    max_context_length: int | None = Field(default=None, ge=1)
    """None: what the model was made for."""
    learning_rate: float | None = Field(default=None, ge=0)
    """Of an optim_step that names none."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """So many optim_steps make one."""
    sampling_share: float = Field(default=0.5, gt=0, lt=1)
    """Of the time, where training and samples both wait."""
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on the CPU. `fp8`: the same, with weights of 8 bits in linear layers."""
    max_adapters: int = Field(default=64, ge=1)
    """How many models may be loaded at a time."""
    keep_results_s: float = Field(default=600.0, gt=0)
    """How long results can be fetched again."""
    tempered_logprobs: bool = False
    """Whether sampled tokens have the logprobs of the distribution that they were drawn from."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.base_model, *self.aliases})

    @staticmethod
    def read(path: Path) -> Configuration:
        try:
            return Configuration.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ServiceConfigurationError(f"{path}: {error}") from error
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc'])) or 'document'}: {each['msg']}" for each in error.errors())
            raise ServiceConfigurationError(f"{path}: {'; '.join(problems)}") from error
