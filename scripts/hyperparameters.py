"""The page of the built-in trainers' tables: `docs/reference/hyperparameters.md`."""

from __future__ import annotations

from trainmaster.server.core.training.hyperparameters import HYPERPARAMETERS, Hyperparameter, Value, ValueKind
from trainmaster.server.core.training.types import BUILT_IN, FRAMEWORKS, LATER, TRAIN_EXTRA, TrainingType

ORDER = [training_type for training_type in TrainingType if training_type in BUILT_IN]

INTRODUCTION = f"""\
# Frameworks and hyperparameters

This page lists the frameworks of `training_config` and the hyperparameters of the built-in ones. `make docs` generates
it from the tables that check a submission (`trainmaster.server.core.training`).

## Which framework trains what

`training_config.framework.type` names the framework. The built-in frameworks need
`{TRAIN_EXTRA}` in the workers' Python. If a package is
missing, the job is refused with 400, and the error names the package.
"""
EXCLUDED = """
Empty combinations are refused with 400, and the error says what to use instead.
"""
HYPERPARAMETERS_BEGIN = """
## Hyperparameters

A built-in trainer accepts these in `training_config.hyperparameters`. Values are text, numbers or booleans. An unknown
name is refused with 400 and the nearest known name; an invalid value is refused, too. A CUSTOM script gets all
hyperparameters, as text.

Batch size, gradient accumulation, sequence length, packing and seed are in `data_config`. `output_config.checkpoint`
sets when to save and which checkpoint is the best. [Job fields](job-fields.md) lists both.
"""


def hyperparameters_page() -> str:
    """Frameworks, and a row for every hyperparameter."""
    lines = [INTRODUCTION, f"| framework | {' | '.join(TrainingType)} | what it is |"]
    lines.append("|---" * (len(TrainingType) + 2) + "|")
    for name, framework in FRAMEWORKS.items():
        cells = ["yes" if training_type in framework.types else "" for training_type in TrainingType]
        lines.append(f"| {name} | {' | '.join(cells)} | {framework.meaning} |")
    lines += [EXCLUDED]
    lines += [f"- {name} has no built-in trainer in this version: {instead}." for name, instead in LATER.items()]
    lines += [HYPERPARAMETERS_BEGIN, "| name | for | value | default | meaning |", "|---|---|---|---|---|"]
    for known in HYPERPARAMETERS.values():
        cells = [f"`{known.name}`", _types(known), _value(known), _default(known), known.meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _types(known: Hyperparameter) -> str:
    return "all" if known.types >= BUILT_IN else ", ".join(name for name in ORDER if name in known.types)


def _value(known: Hyperparameter) -> str:
    choices = ", ".join(f"`{choice}`" for choice in known.choices)
    choices += "".join(f", `{choice}` (LORA)" for choice in known.adapter_choices)
    match known.kind:
        case ValueKind.CHOICE:
            return choices
        case ValueKind.FLAG_OR_CHOICE:
            return f"`true`, `false`, {choices}"
        case ValueKind.NAMES if choices:
            return f"{known.kind}, or {choices}"
    bounds = [("≥", known.minimum), (">", known.above), ("<", known.below)]
    words = ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    return f"{known.kind} ({words})" if words else str(known.kind)


def _default(known: Hyperparameter) -> str:
    defaults: dict[str, list[str]] = {}
    for training_type in ORDER:
        if training_type in known.types:
            defaults.setdefault(_shown(known.default_for(training_type)), []).append(training_type)
    usual, *others = defaults.items()
    return ", ".join([usual[0], *(f"{shown} for {', '.join(types)}" for shown, types in others)])


def _shown(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
