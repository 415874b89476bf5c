"""Options of `train()`: each changes one thing of the job that is submitted.

An option is called with the job document, the trainer and the kind of backend, and changes the document in place; so
is any function of yours that is given for one. The kind of backend is None where the server chooses it; what it cannot
do, it then refuses itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.trainer.options import common, kubernetes
from trainmaster.trainer.options.common import *  # noqa: F403
from trainmaster.trainer.options.kubernetes import *  # noqa: F403

if not TYPE_CHECKING:  # type checkers cannot read a list that is computed
    __all__ = sorted({*common.__all__, *kubernetes.__all__})
