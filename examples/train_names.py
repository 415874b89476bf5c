"""Trains a small language model of names, one character after another, in plain Python.

A softmax over the next character given the last two, trained by stochastic gradient descent on names
that it makes up from syllables. No library is needed, so it runs wherever Trainmaster does. It saves
everything that a resume needs (weights, random state, step): a run that was paused, preempted or killed
goes on as if nothing had happened.

    python examples/train_names.py --steps 400         runs by itself, too
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

from trainmaster.jobs import report, verify

ALPHABET = ".abcdefghijklmnopqrstuvwxyz"
SYLLABLES = [
    "an",
    "bel",
    "cor",
    "da",
    "el",
    "fin",
    "ga",
    "hal",
    "is",
    "jo",
    "ka",
    "lu",
    "mar",
    "ni",
    "or",
    "ra",
    "sa",
    "ti",
]


class NameModel:
    """Scores of the next character for each pair of characters before it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.step = 0
        self.weights = [[0.0] * len(ALPHABET) for _ in range(len(ALPHABET) ** 2)]

    def train(self, names: list[str], learning_rate: float) -> float:
        """One step over a batch of names; returns the mean loss of a character."""
        loss, count = 0.0, 0
        for name in names:
            context = (0, 0)
            for letter in [*name, "."]:
                target = ALPHABET.index(letter)
                row = self.weights[context[0] * len(ALPHABET) + context[1]]
                probabilities = softmax(row)
                loss -= math.log(probabilities[target])
                count += 1
                for index, probability in enumerate(probabilities):
                    row[index] -= learning_rate * (probability - (index == target))
                context = (context[1], target)
        self.step += 1
        return loss / count

    def sample(self) -> str:
        """A new name."""
        name, context = "", (0, 0)
        while len(name) < 12:
            row = self.weights[context[0] * len(ALPHABET) + context[1]]
            letter = self.rng.choices(range(len(ALPHABET)), softmax(row))[0]
            if letter == 0:
                break
            name += ALPHABET[letter]
            context = (context[1], letter)
        return name

    def save(self, directory: Path) -> None:
        """Write the whole state."""
        state = {"step": self.step, "weights": self.weights, "rng": self.rng.getstate()}
        (directory / "model.json").write_text(json.dumps(state))

    def load(self, directory: Path) -> None:
        """Read a state that `save` wrote; a damaged one is refused."""
        verify(directory)
        state = json.loads((directory / "model.json").read_text())
        self.step, self.weights = state["step"], state["weights"]
        version, internal, gauss = state["rng"]
        self.rng.setstate((version, tuple(internal), gauss))


def softmax(scores: list[float]) -> list[float]:
    """Probabilities in proportion to exp(score)."""
    highest = max(scores)
    powers = [math.exp(score - highest) for score in scores]
    total = sum(powers)
    return [power / total for power in powers]


def main() -> None:
    """Train, report, save, and stop when asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="slow each step down to at least this")
    arguments = parser.parse_args()

    model = NameModel(random.Random(7))
    resume_from = report.resume_path()
    if resume_from:
        model.load(resume_from)
        print(f"resumed at step {model.step}", flush=True)

    while model.step < arguments.steps:
        began = time.monotonic()
        names = ["".join(model.rng.choices(SYLLABLES, k=model.rng.randint(2, 3))) for _ in range(16)]
        loss = model.train(names, learning_rate=0.2)
        report.metrics(step=model.step, total_steps=arguments.steps, loss=loss)
        if model.step % 50 == 0:
            print(
                f"step {model.step}: loss {loss:.3f}, samples {', '.join(model.sample() for _ in range(3))}", flush=True
            )

        stop = report.stop_requested()
        last = model.step == arguments.steps
        if last or model.step % arguments.save_every == 0 or report.save_requested() or (stop and stop.save):
            with report.checkpoint(step=model.step, metrics={"loss": loss}) as directory:
                model.save(directory)
        if stop:
            print(f"asked to stop ({stop.cause}) at step {model.step}", flush=True)
            report.exit_stopped()
        time.sleep(max(0.0, arguments.step_seconds - (time.monotonic() - began)))

    report.finished()
    print(f"done after {model.step} steps", flush=True)


if __name__ == "__main__":
    main()
