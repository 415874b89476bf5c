"""What is known of training before anything trains: types and frameworks, hyperparameters, what runs with what.

Tables and pure functions. The trainers themselves are in `trainmaster.training`; nothing of them is imported here.
Stands below `core.spec` and `core.workloads`, which both read these tables.
"""
