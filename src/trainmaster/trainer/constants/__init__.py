"""The names and values that programs share with Kubeflow's SDK; `constants.constants` is where it has them."""

from __future__ import annotations

from trainmaster.trainer.constants.constants import *  # noqa: F403
from trainmaster.trainer.constants.constants import __all__ as __all__
