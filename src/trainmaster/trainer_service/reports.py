"""What an exception means: for the request that met it, for its model, and for the process."""

from __future__ import annotations

import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from trainmaster.engine.types import Blame, EngineError, Pass, PassResult, SampledSequence
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.report import Reporter
from trainmaster.trainer_service.messages import Reply


class FatalError(RuntimeError):
    """The engine can no longer be trusted: the process has to end."""


def reply_to_failure(request_id: str, error: BaseException) -> Reply:
    """Raises FatalError where no request can be done any more."""
    if is_fatal(error) or is_fatal(error.__cause__):
        raise FatalError(f"{type(error).__name__}: {error}") from error
    if isinstance(error, EngineError):
        return Reply(request_id=request_id, error=str(error), category=error.blame)
    if is_out_of_memory(error):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        first_line = str(error).partition("\n")[0]
        message = f"out of memory: send less at a time, or unload models ({first_line})"
    else:
        # Nobody but the log can say where it came from.
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}"
    return Reply(request_id=request_id, error=message, category=Blame.SERVER)


def is_fatal(error: BaseException | None) -> bool:
    return isinstance(error, (NotOwnerError, torch.AcceleratorError, FatalError))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


# What is reported to the server while the service runs: a few numbers, not more often than anybody looks.

EVERY_S = 1.0


class Gauges:
    """Counts what the service does, and reports it at a bounded rate."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._since = time.monotonic()
        self._steps = 0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._shown: Mapping[str, float] = {}

    def ran(self, asked: Pass, result: PassResult) -> None:
        self._sums["tokens"] += sum(len(datum.tokens) for datum in asked.data)
        self._sums["sequences"] += len(asked.data)
        if asked.backward:
            self._sums["loss"] += result.metrics["loss:sum"]
            self._sums["loss_tokens"] += sum(output["logprobs"].size for output in result.outputs)

    def stepped(self, steps: int) -> None:
        self._steps += steps

    def sampled(self, sequences: Sequence[SampledSequence]) -> None:
        self._sums["samples"] += len(sequences)
        self._sums["sampled_tokens"] += sum(len(sequence.tokens) for sequence in sequences)

    def note(self, message: str) -> None:
        self._reporter.note(message)

    def report(self, *, models: int, queued: int, sampling: int) -> None:
        """At most once in `EVERY_S`, and only where something is new."""
        seconds = time.monotonic() - self._since
        if seconds < EVERY_S:
            return
        values = {"models_loaded": float(models), "queued_requests": float(queued), "queued_samples": float(sampling)}
        for name in ("tokens", "sequences", "sampled_tokens", "samples"):
            values[f"{name}_per_s"] = self._sums[name] / seconds
        if self._sums["loss_tokens"]:
            values["loss"] = self._sums["loss"] / self._sums["loss_tokens"]
        if values != self._shown:
            # The numbers of an idle service do not change, and are reported once.
            self._reporter.metrics(values, step=self._steps)
            self._shown = values
        self._since = time.monotonic()
        self._sums.clear()
