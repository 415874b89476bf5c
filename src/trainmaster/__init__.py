"""Trainmaster runs model training on the machines that its user owns, from a laptop to a cluster."""

__version__ = "0.2.0"
