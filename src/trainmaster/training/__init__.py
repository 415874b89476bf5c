"""The built-in trainers, and the steps that prepare model and data for them.

`python -m trainmaster.training` is one rank of a training. TRL and transformers have the loops; this package reads the
training document, saves checkpoints, reports and exports. torch is imported when a training starts.
"""
