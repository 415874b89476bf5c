"""Measurements of Trainmaster on the machine at hand: `python -m benchmarks`. See docs/explanation/benchmarks.md."""
