"""The names and values that programs share with Kubeflow's SDK; `constants.constants` is where it has them."""

from trainmaster.trainer.constants.constants import *  # noqa: F403
