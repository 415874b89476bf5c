"""Tokens per second of the trainer service's engine, against what a user would write instead.

Training: LoRA steps of `trainmaster.engine` over packed sequences, against a plain loop over transformers and PEFT,
compiled and not. Sampling: the engine's sampler against transformers' `generate`. Each case runs in a process of its
own; one that fails, or has no room, is told as a row.

    BENCH_SHAPES=8B python -m benchmarks.engine_tokens --profile --json figures.json

needs PyTorch, NumPy, safetensors, tokenizers, transformers and PEFT, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels import Profile, Spent, told
from benchmarks.models import LARGE, SMALL, Shape
from benchmarks.report import Figure, Peer, Progress, WrongResultError, machine, table

SECONDS = 15.0
CASE_TIMEOUT_S = 240.0
GRACE_S = 60.0
"""A case that has begun may go on for so long after the run's time is up."""
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
_SHAPES = (_TINY, SMALL, LARGE)
_LENGTHS = {"sequences": 16, "shortest": 512, "longest": 4096, "equal": 2048, "together": 8192}
_TINY_LENGTHS = {"sequences": 16, "shortest": 16, "longest": 128, "equal": 64, "together": 256}


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

    @property
    def ours(self) -> bool:
        return self.program.endswith("_engine")


def _training(key: str, what: str, program: str, **options: Any) -> Case:
    return Case(key, f"LoRA, lengths {options['data']}", what, program, options)


def _sampling(key: str, what: str, program: str, **options: Any) -> Case:
    return Case(f"{key}-{options['count']}", f"sampling, {options['count']} at once", what, program, options)


_COMPILED, _NARROW = {"compiled": True}, {"compiled": True, "narrow": True}
CASES = (
    _training("engine-mixed", "engine, packed", "train_engine", data="mixed"),
    _training("engine-equal", "engine, packed", "train_engine", data="equal"),
    _training("engine-16-adapters", "engine, packed, 16 adapters", "train_engine", data="mixed", adapters=16),
    _training("engine-unembedding", "engine, unembedding adapted", "train_engine", data="mixed", unembedding=True),
    _training("peft-mixed-compiled", "PEFT, padded, compiled", "train_peft", data="mixed", **_COMPILED),
    _training("peft-equal-compiled", "PEFT, compiled", "train_peft", data="equal", **_COMPILED),
    _training("peft-mixed", "PEFT, padded", "train_peft", data="mixed"),
    _training("peft-equal", "PEFT", "train_peft", data="equal"),
    _training(
        "peft-mixed-16-bits", "PEFT, padded, compiled, adapters in 16 bits", "train_peft", data="mixed", **_NARROW
    ),
    _training("peft-equal-16-bits", "PEFT, compiled, adapters in 16 bits", "train_peft", data="equal", **_NARROW),
    _training("peft-packed", "PEFT, packed by flash-attention", "train_peft", data="mixed", packed=True),
    *(_sampling("sampler", "engine", "sample_engine", count=count) for count in (1, 16, 64)),
    _sampling("sampler-1-adapter", "engine, an adapter", "sample_engine", count=16, adapters=1),
    _sampling("sampler-16-adapters", "engine, 16 adapters", "sample_engine", count=16, adapters=16),
    *(_sampling("generate", "generate", "sample_generate", count=count) for count in (1, 16, 64)),
    *(_sampling("generate-static", "generate, compiled", "sample_generate", count=n, static=True) for n in (1, 16, 64)),
)
_SHOWING = {
    "engine-mixed",
    "engine-equal",
    "engine-16-adapters",
    "peft-mixed",
    "peft-equal-compiled",
    "sampler-16",
    "sampler-16-adapters-16",
    "generate-16",
}
"""Those that show, with a tiny model, that all of it works."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """At the size of this machine."""
    figures, wrong, _ = run(directory, progress)
    if wrong:
        raise WrongResultError("; ".join(wrong))
    return figures


def run(
    directory: Path,
    progress: Progress,
    *,
    seconds: float = SECONDS,
    budget_s: float = float("inf"),
    only: Sequence[str] = (),
    profile: bool = False,
    traces: Path | None = None,
) -> tuple[list[Figure], list[str], dict[str, Profile]]:
    """The figures, what is wrong with them, and profiles by what they are of.

    Args:
        directory: Where models are made, unless they are there.
        progress: Is told of each case as it ends.
        seconds: Of training, for each case that trains.
        budget_s: No case begins later, or goes on for long after it.
        only: Parts of the keys of cases, those first that come first; none: all.
        profile: Look first where the engine's time goes.
        traces: Where to keep the profiles' traces.
    """
    until = time.monotonic() + budget_s
    figures: list[Figure] = []
    wrong: list[str] = []
    profiles: dict[str, Profile] = {}
    for shape in _shapes():
        bench = _Bench(shape, directory, progress, seconds, until)
        bench.make_model()
        if profile:
            profiles |= bench.profiles(traces)
        for case in _chosen(only, tiny=shape is _TINY):
            bench.measure(case)
        figures += bench.figures()
        wrong += bench.disagreements()
    return figures, wrong, profiles


def _chosen(only: Sequence[str], *, tiny: bool) -> list[Case]:
    """Those whose keys have one of some parts in them, in the order of the parts."""
    if not only:
        return [case for case in CASES if not tiny or case.key in _SHOWING]
    found = {case.key: case for part in only for case in CASES if part in case.key}
    return list(found.values())


def _shapes() -> list[Shape]:
    import torch

    names = os.environ.get("BENCH_SHAPES", LARGE.name if torch.cuda.is_available() else _TINY.name).split(",")
    return [shape for shape in _SHAPES if shape.name in names]


class _Bench:
    """One model, and all that is measured with it."""

    def __init__(self, shape: Shape, directory: Path, progress: Progress, seconds: float, until: float) -> None:
        import torch

        tiny, cuda = shape is _TINY, torch.cuda.is_available()
        self._shape, self._directory, self._progress, self._until = shape, directory, progress, until
        self._setting: dict[str, Any] = {
            "model": str(directory / f"engine-{shape.name}"),
            "device": "cuda" if cuda else "cpu",
            "dtype": "bfloat16" if cuda else "float32",
            "seconds": min(seconds, _SHORT) if tiny else seconds,
            "vocabulary": shape.vocabulary,
            **(_TINY_LENGTHS if tiny else _LENGTHS),
            "prompt": 16 if tiny else 128,
            "new_tokens": 16 if tiny else 512,
        }
        self._done: dict[str, tuple[Case, dict[str, Any] | str]] = {}
        """By key: what came of it, or why nothing did."""

    def make_model(self) -> None:
        if (Path(self._setting["model"]) / "config.json").exists():
            return
        self._progress(f"making a model of the shape {self._shape.name}")
        shape = {**dataclasses.asdict(self._shape), "checkpointing": []}
        made = self._run("make_checkpoint", {"shape": shape}, "the model")
        if isinstance(made, str):
            raise WrongResultError(f"no model could be made: {made}")
        self._progress(f"{made['seconds']:.0f} s")

    def profiles(self, traces: Path | None) -> dict[str, Profile]:
        """Where the time of a step goes; each is told at once."""
        found = {}
        for program, title, options in (
            ("profile_training", "a training step", {}),
            ("profile_sampling", "steps of 16 continuations", {"count": 16}),
        ):
            title = f"{self._shape.name}: {title}"
            trace = None if traces is None else str(traces / f"{program}-{self._shape.name}.json.gz")
            outcome = self._run(program, {**options, "trace": trace}, title)
            if isinstance(outcome, str):
                self._progress(f"{title}: FAILED: {outcome}")
                continue
            spent = {name: [Spent(**each) for each in outcome["profile"][name]] for name in ("longest", "calls")}
            found[title] = Profile(**(outcome["profile"] | spent))
            print(told(found[title], title), flush=True)
        return found

    def measure(self, case: Case) -> None:
        if time.monotonic() >= self._until:
            outcome: dict[str, Any] | str = "there was no time left for it"
        else:
            began = time.monotonic()
            outcome = self._run(case.program, case.options, case.key)
            took = f" ({time.monotonic() - began:.0f} s)"
            self._progress(f"{case.key}: {_row(outcome)}{took}")
        self._done[case.key] = case, outcome

    def figures(self) -> list[Figure]:
        """A row for each case; ours next to the best that was found for the same work."""
        figures = []
        for case, outcome in self._done.values():
            name = f"{self._shape.name} {case.group}: {case.what}"
            if isinstance(outcome, str):
                figures.append(Figure(name=name, measured=0.0, unit="tokens/s", note=f"FAILED: {outcome}"))
                continue
            rate = _rate(outcome)
            peer = None
            if case.ours and (peers := self._peers(case)):
                best, value = max(peers, key=lambda pair: pair[1])
                peer = Peer(name=best.key, value=value, ours=rate)
            figures.append(Figure(name=name, measured=rate, unit="tokens/s", peer=peer, note=_note(outcome)))
        return figures

    def disagreements(self) -> list[str]:
        """Cases that had another loss on the same batch: one of them does not compute what the others do."""
        wrong = []
        by_data: dict[str, list[tuple[str, float]]] = {}
        for case, outcome in self._done.values():
            if not isinstance(outcome, str) and outcome["loss"] is not None:
                by_data.setdefault(case.options["data"], []).append((case.key, outcome["loss"]))
        for data, losses in by_data.items():
            values = [loss for _, loss in losses]
            if max(values) - min(values) > SAME_LOSS * max(values):
                listed = ", ".join(f"{key} {loss:.4f}" for key, loss in losses)
                wrong.append(f"{self._shape.name}: losses of the same batch ({data}) differ: {listed}")
        return wrong

    def _peers(self, case: Case) -> list[tuple[Case, float]]:
        return [
            (other, _rate(outcome))
            for other, outcome in self._done.values()
            if other.group == case.group and not other.ours and not isinstance(outcome, str)
        ]

    def _run(self, program: str, options: Mapping[str, Any], what: str) -> dict[str, Any] | str:
        """What a case gave, or why it gave nothing."""
        limit_s = min(CASE_TIMEOUT_S, max(0.0, self._until - time.monotonic()) + GRACE_S)
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            outcome, log = Path(scratch) / "outcome.json", Path(scratch) / "log"
            document = json.dumps({"program": program, "setting": self._setting, "options": options})
            argv = [sys.executable, "-m", "benchmarks.engine_cases", document, str(outcome)]
            with log.open("wb") as output:
                try:
                    ended = subprocess.run(
                        argv,
                        stdout=output,
                        stderr=output,
                        timeout=limit_s,
                        cwd=Path(__file__).parents[1],
                        check=False,
                    )
                except subprocess.TimeoutExpired:
                    return f"not done after {limit_s:.0f} s"
            if ended.returncode == 0 and outcome.exists():
                found: dict[str, Any] = json.loads(outcome.read_text())
                return found
            said = log.read_text(errors="replace").strip()
            print(f"--- {what} failed ({ended.returncode}); its last words:\n{said[-3000:]}\n---", file=sys.stderr)
            lines = [line for line in said.splitlines() if line and not line.startswith(" ")]
            return (lines[-1] if lines else f"exit code {ended.returncode}")[:200]


def _rate(outcome: Mapping[str, Any]) -> float:
    return float(outcome["tokens"]) / float(outcome["seconds"])


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
        return f"FAILED: {outcome}"
    return ", ".join(filter(None, (f"{_rate(outcome):,.0f} tokens/s", _note(outcome))))


def main() -> int:
    """The exit code: 1 when cases disagree; one that fails, or is slow, is only told."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_tokens", description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training, for each case that trains")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="no case begins later")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="cases whose key has one of these in it")
    parser.add_argument("--list", action="store_true", help="print the keys of all cases, and end")
    parser.add_argument("--profile", action="store_true", help="print first where the engine's time goes")
    parser.add_argument("--traces", type=Path, metavar="DIRECTORY", help="keep the profiles' traces there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--directory", type=Path, help="where models are made, and found again by the next run; else they are removed"
    )
    options = parser.parse_args()
    if options.list:
        print("\n".join(case.key for case in CASES))
        return 0
    began = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {message}", flush=True)

    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as scratch:
        directory = options.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        on = machine(directory) | _device()
        print(", ".join(f"{name} {value}" for name, value in on.items()), flush=True)
        figures, wrong, profiles = run(
            directory,
            progress,
            seconds=options.seconds,
            budget_s=options.budget,
            only=options.only,
            profile=options.profile,
            traces=options.traces,
        )
    print(table(figures))
    for each in wrong:
        print(f"WRONG: {each}")
    if options.json:
        document = {
            "machine": on,
            "figures": [figure.to_json() for figure in figures],
            "wrong": wrong,
            "profiles": {title: dataclasses.asdict(each) for title, each in profiles.items()},
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if wrong else 0


def _device() -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"torch": torch.__version__, "device": name}


if __name__ == "__main__":
    sys.exit(main())
