"""What jobs are made of and shown as, by Kubeflow's names; `types.types` is where its SDK has them."""

from __future__ import annotations

from trainmaster.trainer.types.types import *  # noqa: F403
from trainmaster.trainer.types.types import __all__ as __all__
