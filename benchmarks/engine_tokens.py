"""Tokens per second of the trainer service's engine, against what a user would write instead.

Training: LoRA steps of `trainmaster.engine` over packed sequences, against a plain loop over transformers and PEFT,
compiled and not. Sampling: the engine's sampler against transformers' `generate`. Both together: a GRPO step. A case
that fails, or has no room, is told as a row.

    BENCH_SHAPES=8B,0.6B python -m benchmarks.engine_tokens --table --budget 570 --json figures.json

needs PyTorch, NumPy, safetensors, tokenizers, transformers and PEFT, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engine_goals import CASES, ROWS, SHOWING, Case, cases_of_rows, figure_of, table_of
from benchmarks.engine_processes import run_cases
from benchmarks.kernels import Profile, Spent, told
from benchmarks.models import LARGE, SMALL, Shape
from benchmarks.report import Figure, Peer, Progress, WrongResultError, machine, number, table

if TYPE_CHECKING:
    from benchmarks.engine_work import Setting

SECONDS = 15.0
TABLE_SECONDS = 4.0
"""Of training where the table is made: three batches take longer."""
SAME_LOSS = 0.02
"""How far losses of one batch may lie apart, in 16 bits."""
_SHORT = 0.5
"""Seconds of a case where the model is tiny: to see that it works."""
_TINY = Shape(
    name="tiny",
    layers=2,
    hidden=128,
    intermediate=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    vocabulary=512,
    batch={},
    steps={},
    checkpointing=frozenset(),
    dtype="float32",
)
_SHAPES = (_TINY, LARGE, SMALL)
_SIZES = {
    "sequences": 16, "shortest": 512, "longest": 4096, "equal": 2048, "together": 8192, "prompt": 128,
    "new_tokens": 512, "shared_prompt": 2048, "groups": 64, "group_size": 8, "curve_steps": 200, "curve_sequences": 8,
    "curve_length": 512,
}  # fmt: skip
_TINY_SIZES = {
    "sequences": 16, "shortest": 16, "longest": 128, "equal": 64, "together": 256, "prompt": 16, "new_tokens": 16,
    "shared_prompt": 64, "groups": 4, "group_size": 2, "curve_steps": 20, "curve_sequences": 4, "curve_length": 32,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run measures, and for how long."""

    seconds: float = SECONDS
    """Of training, for each case that trains."""
    budget_s: float = float("inf")
    """No case begins later, or goes on for long after it."""
    only: Sequence[str] = ()
    """Parts of the keys of cases, those first that come first; none: all."""
    table: bool = False
    """The cases of the table of goals."""
    profile: bool = False
    """Look first where the engine's time goes."""
    traces: Path | None = None
    """Where to keep the profiles' traces."""

    def cases(self, shape: Shape) -> list[Case]:
        if self.only:
            return list({case.key: case for part in self.only for case in CASES if part in case.key}.values())
        if self.table and shape.name in ROWS:
            return cases_of_rows(shape.name)
        return [case for case in CASES if shape is not _TINY or case.key in SHOWING]


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """At the size of this machine."""
    benches = run(directory, progress, Plan())
    if wrong := [each for bench in benches for each in bench.disagreements()]:
        raise WrongResultError("; ".join(wrong))
    return [figure for bench in benches for figure in bench.figures()]


def run(
    directory: Path,
    progress: Progress,
    plan: Plan,
    *,
    known: Mapping[str, Any] | None = None,
    note: Callable[[Sequence[Bench]], None] = lambda _: None,
) -> list[Bench]:
    """What was measured, by shape.

    Args:
        directory: Where models are made, unless they are there.
        progress: Is told of each case as it ends.
        plan: What is measured.
        known: What an earlier run has written to its `--json` file.
        note: Is called after each case.
    """
    until = time.monotonic() + plan.budget_s
    benches: list[Bench] = []
    for shape in chosen_shapes():
        bench = Bench(shape, directory, progress, plan, until)
        bench.take_over(known or {})
        benches.append(bench)
    for bench in benches:
        bench.run(lambda: note(benches))
    return benches


def chosen_shapes() -> list[Shape]:
    """Those that BENCH_SHAPES names; by default the one for this machine."""
    import torch

    names = os.environ.get("BENCH_SHAPES", LARGE.name if torch.cuda.is_available() else _TINY.name).split(",")
    return [shape for shape in _SHAPES if shape.name in names]


def setting_of(shape: Shape, model: Path, *, seconds: float) -> dict[str, Any]:
    """What all cases of a model have in common: the fields of `engine_work.Setting`, with the sizes of its shape."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "model": str(model.absolute()),
        "device": "cuda" if cuda else "cpu",
        "dtype": "bfloat16" if cuda else "float32",
        "seconds": seconds,
        "vocabulary": shape.vocabulary,
        **(_TINY_SIZES if shape is _TINY else _SIZES),
    }


class Bench:
    """One model, and all that is measured with it."""

    def __init__(self, shape: Shape, directory: Path, progress: Progress, plan: Plan, until: float) -> None:
        self._shape, self._directory, self._progress, self._plan, self._until = shape, directory, progress, plan, until
        seconds = min(plan.seconds, _SHORT) if shape is _TINY else plan.seconds
        self._setting = setting_of(shape, directory / f"engine-{shape.name}", seconds=seconds)
        self._done: dict[str, dict[str, Any] | str] = {}
        """By the case's key: what came of it, or why nothing did."""
        self._profiles: dict[str, Profile] = {}

    @property
    def shape(self) -> str:
        return self._shape.name

    @property
    def setting(self) -> Setting:
        from benchmarks.engine_work import Setting

        return Setting(**self._setting)

    @property
    def conditions(self) -> dict[str, Any]:
        """Figures under others are not comparable."""
        return {name: each for name, each in self._setting.items() if name not in ("model", "seconds")}

    def take_over(self, known: Mapping[str, Any]) -> None:
        """What was measured before, under the same conditions, is not measured again; what failed is."""
        if known.get("conditions", {}).get(self.shape) != self.conditions:
            return
        outcomes: dict[str, Any] = known["outcomes"][self.shape]
        self._done |= {key: each for key, each in outcomes.items() if not isinstance(each, str)}

    def run(self, note: Callable[[], None]) -> None:
        """Measure what is planned, and is not known yet."""
        left = [case for case in self._plan.cases(self._shape) if case.key not in self._done]
        if left or self._plan.profile:
            self._make_model()
        if self._plan.profile:
            self._profile()
            note()
        for _, together in itertools.groupby(left, key=lambda case: case.host):
            began = time.monotonic()
            for key, outcome in self._outcomes([(case.key, case.program, case.options) for case in together]):
                self._done[key] = outcome
                self._progress(f"{key}: {_row(outcome)} ({time.monotonic() - began:.0f} s)")
                began = time.monotonic()
                note()

    def figures(self) -> list[Figure]:
        """A row for each case; ours next to the best that was found for the same work."""
        figures = []
        for case, outcome in self._cases_done():
            name = f"{self._shape.name} {case.group}: {case.what}"
            if isinstance(outcome, str):
                figures.append(Figure(name=name, measured=0.0, unit="tokens/s", note=_row(outcome)))
                continue
            measured, unit = figure_of(outcome)
            peer = None
            if case.ours and unit == "tokens/s" and (peers := self._peers(case)):
                best, value = max(peers, key=lambda pair: pair[1])
                peer = Peer(name=best.key, value=value, ours=measured)
            figures.append(Figure(name=name, measured=measured, unit=unit, peer=peer, note=_note(outcome)))
        return figures

    def table(self) -> str:
        """Against the goals, where the shape has any; the tiny one shows the rows of all."""
        shapes = [self.shape] if self.shape in ROWS else list(ROWS)
        return "\n\n".join(table_of(shape, self._done) for shape in shapes)

    def disagreements(self) -> list[str]:
        """Cases that had another loss on the same batch, as one of them does not compute what the others do; and values
        above their limits."""
        wrong = []
        by_data: dict[tuple[str, bool], list[tuple[str, float]]] = {}
        for case, outcome in self._cases_done():
            if isinstance(outcome, str):
                continue
            if outcome["limit"] is not None and not outcome["value"] <= outcome["limit"]:
                wrong.append(f"{self.shape} {case.key}: {outcome['value']:.3g} is above {outcome['limit']:g}")
            if outcome["loss"] is not None:
                by_data.setdefault(case.options["data"], []).append((case.key, outcome["loss"]))
        for data, losses in by_data.items():
            values = [loss for _, loss in losses]
            if max(values) - min(values) > SAME_LOSS * max(values):
                listed = ", ".join(f"{key} {loss:.4f}" for key, loss in losses)
                wrong.append(f"{self.shape}: losses of the same batch ({data}) differ: {listed}")
        return wrong

    def outcomes(self) -> dict[str, Any]:
        return dict(self._done)

    def profiles(self) -> dict[str, Any]:
        return {title: dataclasses.asdict(each) for title, each in self._profiles.items()}

    def _cases_done(self) -> list[tuple[Case, dict[str, Any] | str]]:
        return [(case, self._done[case.key]) for case in CASES if case.key in self._done]

    def _peers(self, case: Case) -> list[tuple[Case, float]]:
        return [
            (other, figure_of(outcome)[0])
            for other, outcome in self._cases_done()
            if other.group == case.group and not other.ours and not isinstance(outcome, str)
        ]

    def _make_model(self) -> None:
        if (Path(self._setting["model"]) / "config.json").exists():
            return
        self._progress(f"making a model of the shape {self.shape}")
        shape = {**dataclasses.asdict(self._shape), "checkpointing": []}
        [(_, made)] = self._outcomes([("the model", "make_checkpoint", {"shape": shape})])
        if isinstance(made, str):
            raise WrongResultError(f"no model could be made: {made}")
        self._progress(f"{made['seconds']:.0f} s")

    def _profile(self) -> None:
        """Where the time of a step goes; each is told at once."""
        cases = []
        for program, what, options in (
            ("profile_training", "a training step", {}),
            ("profile_sampling", "steps of 16 continuations", {"count": 16}),
            ("profile_sampling", "steps of 256 continuations", {"count": 256}),
        ):
            name = "-".join([program, self.shape, *map(str, options.values())])
            trace = None if self._plan.traces is None else str((self._plan.traces / f"{name}.json.gz").absolute())
            cases.append((f"{self.shape}: {what}", program, {**options, "trace": trace}))
        for title, outcome in self._outcomes(cases):
            if isinstance(outcome, str):
                self._progress(f"{title}: FAILED: {outcome}")
                continue
            spent = {name: [Spent(**each) for each in outcome["profile"][name]] for name in ("longest", "calls")}
            self._profiles[title] = Profile(**(outcome["profile"] | spent))
            print(told(self._profiles[title], title), flush=True)

    def _outcomes(self, cases: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Any:
        return run_cases(cases, self._setting, self._directory, until=self._until)


def _note(outcome: Mapping[str, Any]) -> str:
    peak, loss = outcome["peak_bytes"], outcome["loss"]
    parts = (
        "" if peak is None else f"peak {peak / 2**30:.1f} GiB",
        "" if loss is None else f"loss {loss:.4f}",
        outcome["note"],
    )
    return ", ".join(filter(None, parts))


def _row(outcome: Mapping[str, Any] | str) -> str:
    if isinstance(outcome, str):
        return outcome if outcome.startswith("not available") else f"FAILED: {outcome}"
    measured, unit = figure_of(outcome)
    return ", ".join(filter(None, (f"{number(measured)} {unit}", _note(outcome))))


def main() -> int:
    """The exit code: 1 when cases disagree; one that fails, or is slow, is only told."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_tokens", description=__doc__)
    parser.add_argument("--seconds", type=float, help=f"of training, for each case ({SECONDS:g}; {TABLE_SECONDS:g})")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="no case begins later")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="cases whose key has one of these in it")
    parser.add_argument("--table", action="store_true", help="measure what the table of goals needs")
    parser.add_argument("--list", action="store_true", help="print the keys of all cases, and end")
    parser.add_argument("--profile", action="store_true", help="print first where the engine's time goes")
    parser.add_argument("--traces", type=Path, metavar="DIRECTORY", help="keep the profiles' traces there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, again after every case")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="do not measure again what this --json file has")
    parser.add_argument(
        "--directory", type=Path, help="where models are made, and found again by the next run; else they are removed"
    )
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.key for case in CASES))
        return 0
    known = json.loads(options.resume.read_text()) if options.resume and options.resume.exists() else {}
    plan = Plan(
        seconds=options.seconds or (TABLE_SECONDS if options.table else SECONDS),
        budget_s=options.budget,
        only=options.only,
        table=options.table,
        profile=options.profile,
        traces=options.traces,
    )
    began = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {message}", flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        on = machine(directory) | _device()
        print(", ".join(f"{name} {value}" for name, value in on.items()), flush=True)

        def note(benches: Sequence[Bench]) -> None:
            if options.json:
                _write(options.json, on, benches, known)

        benches = run(directory, progress, plan, known=known, note=note)
        note(benches)
    for bench in benches:
        print(bench.table() if options.table else table(bench.figures()))
    wrong = [each for bench in benches for each in bench.disagreements()]
    for each in wrong:
        print(f"WRONG: {each}")
    return 1 if wrong else 0


def _write(path: Path, on: Mapping[str, Any], benches: Sequence[Bench], known: Mapping[str, Any]) -> None:
    """As a whole or not at all: the machine may be taken away at any time."""
    document = {
        "machine": on,
        "conditions": {**known.get("conditions", {}), **{bench.shape: bench.conditions for bench in benches}},
        "outcomes": {**known.get("outcomes", {}), **{bench.shape: bench.outcomes() for bench in benches}},
        "figures": [figure.to_json() for bench in benches for figure in bench.figures()],
        "tables": [bench.table() for bench in benches],
        "wrong": [each for bench in benches for each in bench.disagreements()],
        "profiles": {title: each for bench in benches for title, each in bench.profiles().items()},
    }
    written = path.with_suffix(".part")
    written.write_text(json.dumps(document, indent=2) + "\n")
    written.replace(path)


def _device() -> dict[str, str]:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "device": name}


if __name__ == "__main__":
    sys.exit(main())
