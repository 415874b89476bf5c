"""The base models of trainer services: directories that the operator named, and models that accounts promoted."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.types import EngineError
from trainmaster.protocol.account_files import open_below, open_real
from trainmaster.server.core.errors import Problem, RefusedError, choice_message
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads.trainer_service import TrainerServiceSpec
from trainmaster.server.settings.settings import NamedPath

CONFIG = "config.json"
"""The file that makes a directory a transformers checkpoint."""
ADAPTER_CONFIG = "adapter_config.json"
PROMOTED = "models"
"""The directory of promoted models below the artifacts' root, by account."""
MAX_CONFIG_BYTES = 4 << 20

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NAME = re.compile(r"accounts/([^/]+)/models/([a-z0-9-]{1,63})")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A directory with a transformers checkpoint, and its name."""

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    within: tuple[Path, ...] = (Path("/"),)
    """The files must lie below one of these: an account that can write there may replace them with links."""

    def config(self) -> Mapping[str, Any]:
        """The content of `config.json`; empty where it cannot be read."""
        return _json_of(self._open(CONFIG))

    def has(self, name: str) -> bool:
        if (descriptor := self._open(name)) is not None:
            os.close(descriptor)
        return descriptor is not None

    def _open(self, name: str) -> int | None:
        try:
            return open_real(self.path / name, self.within)
        except FileNotFoundError:
            return None

    @property
    def context_length(self) -> int | None:
        """The longest sequence that the model supports; None where its config does not say."""
        config = self.config()
        try:
            return ModelConfig.of(config, self.path / CONFIG).max_positions
        except EngineError:  # no trainer can hold the model, but its config may have the length
            lengths = (part.get("max_position_embeddings") for part in (config, _language_model(config)))
            return next((said for said in lengths if isinstance(said, int) and said > 0), None)

    @property
    def is_moe(self) -> bool:
        config = self.config()
        return any((part.get(name) or 0) > 1 for part in (config, _language_model(config)) for name in _EXPERTS)

    def require(self, context_length: int | None = None) -> int:
        """Raise RefusedError unless a trainer can hold the model with such sequences; returns the longest length."""
        config = self.config()
        if not config:
            raise RefusedError(f"base model {self.name} has no {CONFIG} that can be read")
        try:
            # The name instead of the directory, which users need not know.
            longest = ModelConfig.of(config, Path(self.name, CONFIG)).max_positions
        except EngineError as error:
            raise RefusedError(str(error)) from None
        if context_length is not None and context_length > longest:
            message = f"is {context_length}, and {self.name} was made for {longest} tokens at most"
            raise RefusedError.because([Problem(field="workload.max_context_length", message=message)])
        return longest


class BaseModels:
    def __init__(self, aliases: Sequence[NamedPath] = (), *, artifacts: Path = Path()) -> None:
        self._paths = {alias.name: alias.path for alias in aliases}
        self._artifacts = artifacts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._paths))

    def find(self, name: str, account_id: str) -> BaseModel | None:
        if (path := self._paths.get(name)) is None:
            model = self._promoted_model(name, account_id)
            return model if model and model.has(CONFIG) and not model.has(ADAPTER_CONFIG) else None
        others = tuple(other for other in self.names if other != name and self._paths[other] == path)
        return BaseModel(name=name, path=path, aliases=others)

    def at(self, path: Path, account_id: str, *, name: str, within: Sequence[Path] = ()) -> BaseModel:
        """The model in a directory that an account names; `within` says where directories that are not ours may lie."""
        if path in self._paths.values():
            return BaseModel(name=name, path=path)
        return BaseModel(name=name, path=path, within=(path,) if self.owns(path, account_id) else tuple(within))

    def of_account(self, account_id: str) -> list[BaseModel]:
        """The models whose names the operator put below an account."""
        prefix = f"accounts/{account_id}/models/"
        return [BaseModel(name=name, path=self._paths[name]) for name in self.names if name.startswith(prefix)]

    def owns(self, path: Path, account_id: str) -> bool:
        return path in self._paths.values() or path.parent == self._artifacts / PROMOTED / account_id

    def named(self, request: SubmitJobRequest, account_id: str) -> SubmitJobRequest:
        """The request with the directory of the model that it names, where the request has none."""
        spec = request.workload
        if not isinstance(spec, TrainerServiceSpec) or spec.model_path is not None:
            return request  # without a look at the disk
        if (model := self.find(spec.base_model, account_id)) is None:
            raise RefusedError(self._unknown(spec.base_model, account_id))
        # The maximum of a shape may be more than what the model supports; what a request asks for may not.
        longest = model.require(None if spec.training_shape is not None else spec.max_context_length)
        found = spec.model_copy(
            update={
                "model_path": str(model.path),
                "aliases": tuple(dict.fromkeys((*spec.aliases, *model.aliases))),
                "max_context_length": min(spec.max_context_length or longest, longest),
            }
        )
        return request.model_copy(update={"workload": found})

    async def looked_up(self, request: SubmitJobRequest, account_id: str) -> SubmitJobRequest:
        """What `named` returns, for an event loop: models may lie on a disk that does not answer."""
        spec = request.workload
        if not isinstance(spec, TrainerServiceSpec):
            return request
        path = Path(spec.model_path or "")
        if self.owns(path, account_id):
            model = self.at(path, account_id, name=spec.base_model)
            await asyncio.to_thread(model.require, spec.max_context_length)
        return await asyncio.to_thread(self.named, request, account_id)

    def _promoted_model(self, name: str, account_id: str) -> BaseModel | None:
        found = _NAME.fullmatch(name)
        if found is None or found[1] != account_id:
            return None
        path = promoted_path(self._artifacts, account_id, found[2])
        return BaseModel(name=name, path=path, within=(path,))

    def _unknown(self, name: str, account_id: str) -> str:
        promoted = self._promoted_model(name, account_id)
        if promoted is not None and promoted.has(ADAPTER_CONFIG):
            return f"base model {name} is an adapter; train its own base model, and load it with load_adapter"
        if not self._paths:
            return f"this server knows no base model {name}; its operator can name directories with --model-alias"
        return choice_message("base model", name, self.names)


def promoted_path(artifacts: Path, account_id: str, model_id: str) -> Path:
    return artifacts / promoted_name(account_id, model_id)


def promoted_name(account_id: str, model_id: str) -> str:
    """The path of a promoted model, below the artifacts' root."""
    return f"{PROMOTED}/{account_id}/{model_id}"


def read_own_config(top: Path, name: str) -> Mapping[str, Any]:
    """The JSON object in a file below a directory of ours; empty where there is no file."""
    try:
        return _json_of(open_below(top, name))
    except FileNotFoundError:
        return {}


def _json_of(descriptor: int | None) -> Mapping[str, Any]:
    if descriptor is None:
        return {}
    try:
        with open(descriptor, "rb") as file:
            document = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config about the language model, where the model also sees images."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def check_aliases(aliases: Sequence[NamedPath]) -> None:
    """Raise ValueError, with all problems, unless every alias names one directory with a model."""
    seen: dict[str, Path] = {}
    problems = []
    for alias in aliases:
        if seen.setdefault(alias.name, alias.path) != alias.path:
            problems.append(f"{alias.name} has two directories, {seen[alias.name]} and {alias.path}")
        if not alias.path.is_dir():
            problems.append(f"{alias.name}: there is no directory {alias.path}")
        elif not (alias.path / CONFIG).is_file():
            problems.append(f"{alias.name}: {alias.path} has no {CONFIG}, so it is no transformers checkpoint")
    if problems:
        raise ValueError("; ".join(problems))
