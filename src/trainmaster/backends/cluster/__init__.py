"""Backends on clusters: an existing engine places and runs attempts, and Trainmaster follows them.

`ClusterBackend` (`backend.py`) has the verbs of `Backend`; everything that knows one kind of engine is behind
`ClusterEngine` (`engine.py`), in a folder of its own (`backends/slurm`).
"""
