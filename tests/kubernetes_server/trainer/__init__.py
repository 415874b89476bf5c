"""Kubeflow Trainer and JobSet: `--trainer 2.0`, `2.1` or `2.3`, whose TrainJobs have other fields.

| module | what is in it |
|---|---|
| `definitions` | the custom resources |
| `runtimes` | ClusterTrainingRuntimes as Kubeflow installs them |
| `webhooks` | what may be created and changed |
| `train_jobs`, `job_set_of` | from a TrainJob and its runtime to a JobSet |
| `job_sets` | from a JobSet to Jobs and a headless Service |

What it does not have: MPI and the other policies without variables (such a runtime is refused), JobSet's coordinator,
startup policy, exclusive placement and rules of failure policies, and PodGroups.
"""
