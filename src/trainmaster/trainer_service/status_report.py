"""What the server is told while the service runs: a few numbers, not more often than anybody looks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from trainmaster.engine.types import Pass, PassResult, SampledSequence
from trainmaster.jobs.reporter import Reporter

EVERY_S = 1.0


class Gauges:
    """Counts what the service does, and reports it at a bounded rate."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._since = time.monotonic()
        self._steps = 0
        self._tokens = 0
        self._sequences = 0
        self._loss = 0.0
        self._loss_tokens = 0
        self._sampled_tokens = 0
        self._samples = 0
        self._shown: Mapping[str, float] = {}

    def ran(self, asked: Pass, result: PassResult) -> None:
        """A pass was run."""
        self._tokens += sum(len(datum.tokens) for datum in asked.data)
        self._sequences += len(asked.data)
        if asked.backward:
            self._loss += result.metrics["loss:sum"]
            self._loss_tokens += sum(output["logprobs"].size for output in result.outputs)

    def stepped(self, steps: int) -> None:
        """Optimizers made steps."""
        self._steps += steps

    def sampled(self, sequences: Sequence[SampledSequence]) -> None:
        """Samples were completed."""
        self._samples += len(sequences)
        self._sampled_tokens += sum(len(sequence.tokens) for sequence in sequences)

    def note(self, message: str) -> None:
        """Leave a remark among the job's events."""
        self._reporter.note(message)

    def report(self, *, models: int, queued: int, sampling: int) -> None:
        """Tell how it goes, if it is time to and there is anything new.

        Args:
            models: that are loaded.
            queued: requests of models that wait.
            sampling: samples that are not answered.
        """
        seconds = time.monotonic() - self._since
        if seconds < EVERY_S:
            return
        values = {
            "models_loaded": float(models),
            "queued_requests": float(queued),
            "queued_samples": float(sampling),
            "tokens_per_s": self._tokens / seconds,
            "sequences_per_s": self._sequences / seconds,
            "sampled_tokens_per_s": self._sampled_tokens / seconds,
            "samples_per_s": self._samples / seconds,
        }
        if self._loss_tokens:
            values["loss"] = self._loss / self._loss_tokens
        if values != self._shown:
            # Of an idle service the numbers stay what they are, and are told once.
            self._reporter.metrics(values, step=self._steps)
            self._shown = values
        self._since = time.monotonic()
        self._tokens = self._sequences = self._sampled_tokens = self._samples = self._loss_tokens = 0
        self._loss = 0.0
