"""What the server, the worker and the code inside a job agree on. Standard library only.

The run directory's layout and documents, the launch of a workload, the reasons for which an attempt
ends, the exit codes and the environment of a rank. Nothing here decides anything.
"""
