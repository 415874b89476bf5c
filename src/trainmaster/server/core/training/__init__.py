"""What is known of training before anything trains: tables and pure functions, below `core.spec` and `core.workloads`.

The trainers themselves are in `trainmaster.training`; nothing of them is imported here.
"""
