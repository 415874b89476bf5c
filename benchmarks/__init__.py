"""Measurements of Trainmaster on the machine at hand: `python -m benchmarks`. See docs/benchmarks.md."""
