"""The cases of `engine_tokens`, and the table that sets what they gave against peers of the same run and goals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.report import number

Measured = Mapping[str, Any]
"""The outcome of a case, as JSON."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Something that is measured."""

    key: str
    group: str
    """What it is set against has the same."""
    what: str
    program: str
    """Of `engine_cases`."""
    options: Mapping[str, Any]
    host: str
    """Cases of one host that follow one another share a process, and the model that it has loaded."""

    @property
    def ours(self) -> bool:
        return self.program.endswith("_engine")


def _case(key: str, group: str, what: str, program: str, *, host: str | None = None, **options: Any) -> Case:
    if host is None:
        host = "engine" if program.endswith("_engine") else key
    return Case(key, group, what, program, options, host)


def _training(key: str, what: str, program: str, **options: Any) -> Case:
    return _case(key, f"LoRA, lengths {options['data']}", what, program, **options)


def _sampling(key: str, what: str, program: str, *, host: str | None = None, **options: Any) -> Case:
    count = options["count"]
    return _case(f"{key}-{count}", f"sampling, {count} at once", what, program, host=host, **options)


def _agreement(key: str, what: str, trained: str, **options: Any) -> Case:
    group = "logprobs of sampling and training"
    return _case(f"agreement-{key}", group, what, "agreement_engine", trained=trained, **options)


def _first_tokens(prompts: str) -> Case:
    what = {"different": "different prompts", "same": "one prompt", "again": "that prompt again"}[prompts]
    group = "first tokens of 64 long prompts"
    return _case(f"prefix-{prompts}", group, what, "first_tokens_engine", count=64, prompts=prompts)


_COMPILED: dict[str, Any] = {"compiled": True}
_NARROW: dict[str, Any] = {"compiled": True, "narrow": True}
_COUNTS = (1, 16, 64, 256)
CASES = (
    *(_sampling("sampler", "engine", "sample_engine", count=count) for count in _COUNTS),
    *(
        _sampling("sampler-1-adapter", "engine, an adapter", "sample_engine", count=n, adapters=1)
        for n in (16, 64, 256)
    ),
    *(
        _sampling("sampler-16-adapters", "engine, 16 adapters", "sample_engine", count=n, adapters=16)
        for n in (16, 64, 256)
    ),
    _training("engine-equal", "engine, packed", "train_engine", data="equal"),
    _training("engine-mixed", "engine, packed", "train_engine", data="mixed"),
    _training("engine-16-adapters", "engine, packed, 16 adapters", "train_engine", data="mixed", adapters=16),
    _case("update", "LoRA", "from optim_step to a token of the new weights", "first_token_after_step_engine"),
    _agreement("base", "random weights", "nothing", exact=True),
    _agreement("adapter", "random weights, an adapter", "adapter"),
    _agreement("learnt", "learnt weights", "all"),
    *map(_first_tokens, ("different", "same", "again")),
    _case("grpo-engine", "GRPO step", "engine", "grpo_engine"),
    _training("engine-unembedding", "engine, unembedding adapted", "train_engine", data="mixed", unembedding=True),
    _case("engine-full", "all weights", "engine, packed", "train_engine", data="equal", full=True),
    _case("curve-engine", "losses", "engine", "curve_engine"),
    _training("engine-fp8-equal", "engine, base in fp8", "train_engine", data="equal", fp8=True, host="fp8"),
    _training("engine-fp8-mixed", "engine, base in fp8", "train_engine", data="mixed", fp8=True, host="fp8"),
    *(_sampling("sampler-fp8", "engine, base in fp8", "sample_engine", count=n, fp8=True, host="fp8") for n in (1, 64)),
    _agreement("fp8", "random weights, an adapter, base in fp8", "adapter", fp8=True, host="fp8"),
    _case("curve-fp8", "losses", "engine, base in fp8", "curve_engine", fp8=True, host="fp8"),
    _training("peft-equal-compiled", "PEFT, compiled", "train_peft", data="equal", **_COMPILED),
    _training("peft-mixed-compiled", "PEFT, padded, compiled", "train_peft", data="mixed", **_COMPILED),
    *(_sampling("generate", "generate", "sample_generate", count=count, host="generate") for count in _COUNTS),
    _case("grpo-generate", "GRPO step", "generate and PEFT", "grpo_generate"),
    _case("grpo-trl", "GRPO step", "TRL", "grpo_trl"),
    _training("peft-equal", "PEFT", "train_peft", data="equal"),
    _training("peft-mixed", "PEFT, padded", "train_peft", data="mixed"),
    _training("peft-equal-16-bits", "PEFT, compiled, adapters in 16 bits", "train_peft", data="equal", **_NARROW),
    _training("peft-mixed-16-bits", "PEFT, compiled, adapters in 16 bits", "train_peft", data="mixed", **_NARROW),
    _training("peft-packed", "PEFT, packed by flash-attention", "train_peft", data="mixed", packed=True),
    _case("loop-full", "all weights", "loop, compiled", "train_peft", data="equal", full=True, **_COMPILED),
    _case("curve-peft", "losses", "PEFT", "curve_peft"),
    _case("curve-peft-seed", "losses", "PEFT, another adapter", "curve_peft", seed=1),
    *(_sampling("generate-static", "generate, compiled", "sample_generate", count=n, static=True) for n in (1, 16, 64)),
)
"""What matters most first; those of one host follow one another."""
CURVES = ("curve-engine", "curve-fp8", "curve-peft", "curve-peft-seed")
SHOWING = {
    "engine-mixed",
    "engine-equal",
    "engine-16-adapters",
    "sampler-16",
    "sampler-16-adapters-16",
    "update",
    "agreement-base",
    "agreement-adapter",
    "agreement-learnt",
    "prefix-again",
    "grpo-engine",
    "curve-engine",
    "generate-16",
    "grpo-generate",
    "peft-mixed",
    "peft-equal-compiled",
    "curve-peft",
}
"""Those that show, with a tiny model, that all of it works."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound of a row's figure: absolute, or a multiple of what another case gave in the same run."""

    least: float | None = None
    most: float | None = None
    times: float | None = None
    of: str = ""

    def told(self, unit: str) -> str:
        if self.times is not None:
            return f"≥ {self.times:g} × `{self.of}`"
        return f"≥ {self.least:,.0f} {unit}" if self.least is not None else f"≤ {self.most:g} {unit}"

    def missing(self, found: float, others: Mapping[str, float]) -> str | None:
        """By how much it is missed; empty: it is met; None: what it is a multiple of is not there."""
        if self.times is not None:
            if self.of not in others:
                return None
            least: float | None = self.times * others[self.of]
        else:
            least = self.least
        if least is not None:
            return "" if found >= least else f"by {1 - found / least:.0%}"
        assert self.most is not None
        return "" if found <= self.most else f"by {found / self.most - 1:.0%}"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Of the table."""

    title: str
    key: str
    peers: tuple[str, ...]
    """The best of them is shown."""
    goals: tuple[Goal, ...] = ()


def _least(least: float) -> Goal:
    return Goal(least=least)


def _of(times: float, key: str) -> Goal:
    return Goal(times=times, of=key)


ROWS: Mapping[str, Sequence[Row]] = {
    "8B": (
        Row("sampling, 16 sequences, 16 adapters", "sampler-16-adapters-16", (), (_of(0.7, "sampler-16"),)),
        Row("sampling, 16 sequences, one adapter", "sampler-1-adapter-16", (), (_of(0.8, "sampler-16"),)),
        Row("sampling, 16 sequences", "sampler-16", ("generate-16",), (_least(2_900),)),
        Row("sampling, 64 sequences", "sampler-64", ("generate-64",), (_least(10_000),)),
        Row("sampling, 256 sequences", "sampler-256", ("generate-256",), (_least(25_000),)),
        Row("sampling, 1 sequence", "sampler-1", ("generate-1",), (_least(200),)),
        Row("sampling, 256 sequences, 16 adapters", "sampler-16-adapters-256", (), (_of(0.7, "sampler-256"),)),
        Row("sampling, 256 sequences, one adapter", "sampler-1-adapter-256", (), (_of(0.8, "sampler-256"),)),
        Row(
            "training, equal lengths",
            "engine-equal",
            ("peft-equal-compiled", "peft-equal"),
            (_least(17_500), _of(1.15, "peft-equal-compiled")),
        ),
        Row(
            "training, mixed lengths, packed",
            "engine-mixed",
            ("peft-mixed-compiled",),
            (_least(16_500), _of(1.25, "peft-mixed-compiled")),
        ),
        Row("training, 16 adapters, mixed lengths", "engine-16-adapters", (), (_of(0.95, "engine-mixed"),)),
        Row("from `optim_step` to the first token", "update", (), (Goal(most=100),)),
        Row("logprobs, sampling and training, random weights", "agreement-base", ()),
        Row("logprobs, sampling and training, random weights, adapter", "agreement-adapter", ()),
        Row("first tokens of 64 copies of a prompt", "prefix-same", ("prefix-different",)),
        Row("the same prompt again", "prefix-again", ("prefix-different",)),
        Row("a GRPO step", "grpo-engine", ("grpo-generate", "grpo-trl")),
        Row("training, equal lengths, base in fp8", "engine-fp8-equal", ("engine-equal",), (_least(20_000),)),
        Row("sampling, 64 sequences, base in fp8", "sampler-fp8-64", ("sampler-64",)),
        Row("logprobs, sampling and training, random weights, fp8", "agreement-fp8", ()),
    ),
    "0.6B": (
        Row("training all weights", "engine-full", ("loop-full",), (_least(100_000),)),
        Row("logprobs, sampling and training, learnt weights", "agreement-learnt", (), (Goal(most=5e-3),)),
        Row("loss after 200 steps", "curve-engine", ("curve-peft",)),
        Row("loss after 200 steps, base in fp8", "curve-fp8", ("curve-peft",)),
        Row("loss after 200 steps, PEFT from another adapter", "curve-peft-seed", ("curve-peft",)),
    ),
}
"""By the model's shape, what matters most first."""


def cases_of_rows(shape: str) -> list[Case]:
    """What the rows of a shape need, in the order of `CASES`: those of one host share a process."""
    wanted = {key for row in ROWS[shape] for key in (row.key, *row.peers)}
    return [case for case in CASES if case.key in wanted]


def figure_of(outcome: Measured) -> tuple[float, str]:
    """What was measured, and its unit."""
    if outcome["value"] is not None:
        return float(outcome["value"]), str(outcome["unit"])
    return float(outcome["tokens"]) / float(outcome["seconds"]), "tokens/s"


def table_of(shape: str, found: Mapping[str, Measured | str]) -> str:
    """The rows of a shape, in Markdown; those of which nothing is known are left out."""
    figures = {key: figure_of(each)[0] for key, each in found.items() if not isinstance(each, str)}
    lines = [
        f"| {shape} | Trainmaster | peer in the same run | ratio | goal | result |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS[shape]:
        outcome = found.get(row.key)
        if outcome is None:
            continue
        if isinstance(outcome, str):
            lines.append(f"| {row.title} | {outcome} | | | | |")
            continue
        measured, unit = figure_of(outcome)
        smaller_is_better = unit != "tokens/s"
        best: Callable[..., str] = min if smaller_is_better else max
        peer = best((key for key in row.peers if key in figures), key=figures.__getitem__, default="")
        told_peer = f"{number(figures[peer])} {unit} (`{peer}`)" if peer else ""
        ratio = f"{measured / figures[peer]:.3g}" if peer else ""
        goals = " and ".join(goal.told(unit) for goal in row.goals)
        told = f"{number(measured)} {unit}"
        lines.append(f"| {row.title} | {told} | {told_peer} | {ratio} | {goals} | {_result(row, measured, figures)} |")
    return "\n".join(lines)


def _result(row: Row, measured: float, figures: Mapping[str, float]) -> str:
    missing = [goal.missing(measured, figures) for goal in row.goals]
    if missed := [each for each in missing if each]:
        return f"missed {' and '.join(missed)}"
    if None in missing:
        return "the peer was not measured"
    return "met" if missing else ""
