"""The picture of the losses that `engine_tokens` measured: `python -m benchmarks.loss_picture figures.json losses.svg`.

Each line is the mean of a few steps. The SVG needs no program to make it, and every browser shows it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.engine_goals import CASES, CURVES

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 44
_COLOURS = ("#1f77b4", "#2ca02c", "#d62728", "#999999")
_TICKS = 5
_SMOOTHED = 5
"""Steps of which the mean is drawn."""


def picture(curves: Mapping[str, Sequence[float]], title: str) -> str:
    """Curves by their names, as SVG."""
    smooth = {name: _means(curve) for name, curve in curves.items()}
    steps = max(map(len, smooth.values()))
    low, high = min(map(min, smooth.values())), max(map(max, smooth.values()))
    high = high if high > low else low + 1.0

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / max(steps - 1, 1)

    def y(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - loss) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for tick in range(_TICKS + 1):
        loss, step = low + (high - low) * tick / _TICKS, (steps - 1) * tick / _TICKS
        parts += [
            f'<path d="M{_LEFT} {y(loss):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>',
            f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>',
        ]
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>')
    for number, ((name, curve), colour) in enumerate(zip(smooth.items(), _COLOURS, strict=False)):
        points = "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in enumerate(curve))
        at = _TOP + 14 + 18 * number
        parts += [
            f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<path d="M{_WIDTH - 220} {at - 4}h24" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{_WIDTH - 190}" y="{at}">{name}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def apart(curve: Sequence[float], other: Sequence[float]) -> float:
    """The largest distance of the drawn lines, in nats per token."""
    return max(abs(one - two) for one, two in zip(_means(curve), _means(other), strict=True))


def _means(curve: Sequence[float]) -> list[float]:
    return [sum(curve[at : at + _SMOOTHED]) / _SMOOTHED for at in range(max(len(curve) - _SMOOTHED + 1, 1))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_picture", description=__doc__)
    parser.add_argument("figures", type=Path, help="what `engine_tokens --json` wrote")
    parser.add_argument("picture", type=Path, help="where the SVG is written")
    parser.add_argument("--shape", default="0.6B")
    options = parser.parse_args()
    outcomes = json.loads(options.figures.read_text())["outcomes"][options.shape]
    found = {key: outcomes[key]["curve"] for key in CURVES if isinstance(outcomes.get(key), dict)}
    if not found:
        parser.error(f"{options.figures} has no losses of the shape {options.shape}: run the cases `curve`")
    names = {case.key: case.what for case in CASES}
    options.picture.write_text(
        picture({names[key]: curve for key, curve in found.items()}, f"Loss of a {options.shape} model, LoRA")
    )
    for key, curve in found.items():
        if key != "curve-peft" and "curve-peft" in found:
            print(f"{names[key]}: at most {apart(curve, found['curve-peft']):.4f} nats from PEFT")


if __name__ == "__main__":
    main()
