"""The job file that `trainmaster init` writes: commented, complete, and made from the tables that check it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trainmaster.cli.exits import UsageError
from trainmaster.plain_yaml import YamlError, parse_yaml
from trainmaster.server.core.errors import TrainmasterError, choice_message
from trainmaster.server.core.fields import Model
from trainmaster.server.core.spec import configs
from trainmaster.server.core.spec.data import DataConfig, DataSource, PreprocessConfig
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.training.hyperparameters import ValueKind, hyperparameters_of
from trainmaster.server.core.training.options import positions_of
from trainmaster.server.core.training.types import ADAPTER_TYPES, FrameworkType, TrainingType, unavailable

TYPES: Mapping[str, str] = {
    "sft": "all weights learn the answers in conversations or pairs of prompt and completion",
    "lora": "a small adapter beside the model learns the answers; takes the least memory",
    "full_finetune": "all weights learn every token of the rows",
    "continued_pretrain": "all weights learn plain text, packed into full sequences",
    "dpo": "an adapter, or all weights, learn to prefer the chosen of two answers",
}
"""What may be chosen, and what it does."""

_TALK = '{"messages": [{"role": "user", "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"text": ...}'
_PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages'
_OFTEN_CHANGED = frozenset(
    {
        "learning_rate",
        "num_train_epochs",
        "warmup_steps",
        "lr_scheduler_type",
        "lora_r",
        "lora_alpha",
        "loss_type",
        "beta",
    }
)
"""Hyperparameters that are not commented out."""
_EXAMPLES: Mapping[str, object] = {
    "labels": {"project": "first-steps"},
    "revision": "main",
    "tokenizer_id": "org/tokenizer",
    "eval_strategy": "epoch",
    "eval_steps": 100,
    "attn_implementation": "sdpa",
    "neftune_noise_alpha": 5,
    "tracker_project": "trainmaster",
    "modules_to_save": "lm_head",
    "format": "jsonl",
    "filters": [{"column": "language", "op": "eq", "value": "en"}],
    "sampling": {"max_samples": 1000},
    "field_mapping": {"prompt": "question", "completion": "answer"},
    "seed": 42,
    "gpu_type": "H100",
    "metric_for_best_model": "eval_loss",
    "max_runtime_seconds": 86400,
}
"""What is shown, commented out, of fields that are empty by default."""
_SEQ_LENGTH = 1024
"""Enough for most conversations, and little enough for a small GPU; a model may have fewer positions."""
_WIDTH = 119
_COMMENT_COLUMN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    text: str
    comment: str = ""
    depth: int = 0
    active: bool = True


def training_type_of(text: str) -> TrainingType:
    name = text.strip().upper().replace("-", "_")
    if name not in TrainingType.__members__:
        raise UsageError(f"--type: {choice_message('training type', text, TYPES)}")
    training_type = TrainingType(name)
    if (why := unavailable(FrameworkType.AUTO, training_type)) is not None:
        raise UsageError(f"--type: {why}")
    return training_type


def job_file(
    training_type: TrainingType, *, model: str, data: str, file: str, config: Mapping[str, Any] | None = None
) -> str:
    """The text of a job file: what is usually changed, and all else commented out with its default.

    `model` and `data` are as the file is to name them, and `file` is what its comments call it. `config` is the
    model's `config.json`, if it is on this machine.
    """
    lines = [*_header(training_type, file), *_job(training_type, model, data, positions_of(config or {}))]
    text = "".join(f"{line}\n" for each in lines for line in _rendered(each))
    try:
        parse(SubmitJobRequest, parse_yaml(text, file))
    except (TrainmasterError, YamlError) as error:
        raise UsageError(f"such a job would be refused: {error}") from error
    return text


def rows_of(training_type: TrainingType) -> str:
    if training_type is TrainingType.DPO:
        return _PAIR
    return '{"text": ...}' if training_type is TrainingType.CONTINUED_PRETRAIN else _TALK


def _header(training_type: TrainingType, file: str) -> Iterator[_Line]:
    page = training_type.lower().replace("_", "-")
    yield _Line(text=f"# {training_type}: {TYPES[training_type.lower()]} (docs/guides/training/{page}.md).")
    yield _Line(text=f"#   trainmaster data check {file}           reads rows, and shows what the model will see")
    yield _Line(text=f"#   trainmaster submit {file} --follow      trains")
    yield _Line(text="# A line that begins with # and a name shows a default, or an example where there is none.")


def _job(training_type: TrainingType, model: str, data: str, positions: int | None) -> Iterator[_Line]:
    stem = re.sub(r"[^a-z0-9.]+", "-", PurePosixPath(model).name.lower()).strip("-.") or "model"
    yield _set(SubmitJobRequest, "name", 0, f"{stem[:64]}-{training_type.lower().replace('_', '-')}")
    yield from _unset(SubmitJobRequest, 0, "labels")
    yield _Line(text="")
    yield _Line(text="training_config:")
    yield _Line(text=f"training_type: {training_type}", depth=1)
    yield _Line(text="base_model:", depth=1)
    yield _set(configs.BaseModelConfig, "model_id", 2, model)
    yield from _unset(configs.BaseModelConfig, 2, "revision", "tokenizer_id", "dtype", "trust_remote_code")
    yield _Line(text="hyperparameters:", depth=1)
    yield from _hyperparameters(training_type)
    yield _Line(text="")
    yield from _data(training_type, data, positions)
    yield _Line(text="")
    yield _Line(text="resource_config:")
    yield _set(configs.ResourceConfig, "gpu_count", 1, None)
    yield from _unset(configs.ResourceConfig, 1, "gpu_type")
    yield _Line(text="")
    yield from _output(training_type)
    yield _Line(text="")
    yield _Line(text="scheduling_config:")
    yield _set(configs.SchedulingConfig, "max_retries", 1, 2)
    yield from _unset(configs.SchedulingConfig, 1, "priority", "preemptible", "queue", "max_runtime_seconds")


def _hyperparameters(training_type: TrainingType) -> Iterator[_Line]:
    for known in sorted(hyperparameters_of(training_type).values(), key=lambda each: each.name not in _OFTEN_CHANGED):
        default = known.default_for(training_type)
        choices = f" One of {', '.join(known.choices)}." if known.kind is ValueKind.CHOICE else ""
        yield _Line(
            text=f"{known.name}: {_written(_EXAMPLES[known.name] if default is None else default)}",
            comment=known.meaning + choices,
            depth=2,
            active=known.name in _OFTEN_CHANGED,
        )


def _data(training_type: TrainingType, data: str, positions: int | None) -> Iterator[_Line]:
    yield _Line(text="data_config:")
    yield _Line(text=f"# Rows: {rows_of(training_type)}", depth=1)
    yield _Line(text="sources:", depth=1)
    path = _set(DataSource, "path", 2, data)
    yield _Line(text=f"- {path.text}", comment=path.comment, depth=2)
    yield from _unset(DataSource, 3, "format", "filters", "sampling")
    yield _Line(text="preprocess:", depth=1)
    yield _set(PreprocessConfig, "packing", 2, training_type is TrainingType.CONTINUED_PRETRAIN)
    yield from _unset(PreprocessConfig, 2, "field_mapping")
    yield _set(DataConfig, "max_seq_length", 1, min(_SEQ_LENGTH, positions or _SEQ_LENGTH))
    yield _set(DataConfig, "batch_size", 1, 4)
    yield _set(DataConfig, "gradient_accumulation_steps", 1, 4)
    yield _set(DataConfig, "validation_split", 1, 0.05)
    yield from _unset(DataConfig, 1, "seed", "num_workers")


def _output(training_type: TrainingType) -> Iterator[_Line]:
    yield _Line(text="output_config:")
    if training_type in ADAPTER_TYPES:
        yield _set(configs.OutputConfig, "merge_lora", 1, True)
    yield from _unset(configs.OutputConfig, 1, "export_format")
    yield _Line(text="checkpoint:", depth=1)
    yield _set(configs.CheckpointConfig, "save_steps", 2, 100)
    less_often = ("save_strategy", "save_total_limit", "metric_for_best_model", "resume_from_best")
    yield from _unset(configs.CheckpointConfig, 2, *less_often)


def _set(model: type[Model], name: str, depth: int, value: object) -> _Line:
    field = model.model_fields[name]
    comment = field.description or ""
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if default not in (None, value):
        comment += f" Default: {_written(default)}."
    return _Line(text=f"{name}: {_written(value)}", comment=comment, depth=depth)


def _unset(model: type[Model], depth: int, *names: str) -> Iterator[_Line]:
    for name in names:
        field = model.model_fields[name]
        value = _EXAMPLES.get(name, field.get_default(call_default_factory=True))
        yield _Line(text=f"{name}: {_written(value)}", comment=field.description or "", depth=depth, active=False)


def _rendered(line: _Line) -> Iterator[str]:
    text = "  " * line.depth + ("" if line.active else "#") + line.text
    if not line.comment:
        yield text.rstrip()
        return
    column = max(_COMMENT_COLUMN, len(text) + 2)
    # A long value leaves no room beside it.
    room = max(_WIDTH - column - 2, 40)
    first, *rest = textwrap.wrap(line.comment, room, break_long_words=False)
    yield f"{text:{column}}# {first}"
    for more in rest:
        yield f"{'':{column}}# {more}"


def _written(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if 0 < abs(value) < 1e-3:
            digits, _, exponent = f"{value:e}".partition("e")
            return f"{float(digits):g}e{int(exponent)}"  # 2e-5, and not 2e-05
        case float():
            return f"{value:g}"
        case int():
            return str(value)
        case list():
            return f"[{', '.join(map(_written, value))}]"
        case dict():
            return f"{{{', '.join(f'{_written(key)}: {_written(each)}' for key, each in value.items())}}}"
        case _:
            return _text(str(value))


def _text(text: str) -> str:
    """Without quotes where nobody could take it for something else, wherever it stands."""
    try:
        plain = parse_yaml(f"[{text}]", "") == [text]
    except YamlError:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)
