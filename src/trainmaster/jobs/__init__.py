"""What training code imports: `from trainmaster.jobs import report`. Standard library and protocol only.

Everything here also works outside a job: reports go nowhere, nobody asks for a stop, and checkpoints
are committed below the current directory.
"""

from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest, committed, verify
from trainmaster.jobs.control import Stop
from trainmaster.jobs.owner import NotOwnerError

__all__ = ["CorruptCheckpointError", "Manifest", "NotOwnerError", "Stop", "committed", "verify"]
