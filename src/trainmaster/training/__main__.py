"""One rank of a built-in trainer: `python -m trainmaster.training`."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
from pathlib import Path

from trainmaster.jobs import report
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.training.types import TRAINERS
from trainmaster.training.document import Document, DocumentError, Prepared
from trainmaster.training.steps import PreparingError


def main() -> None:
    # Everything was fetched before: a library that asks the network fails at once instead of waiting.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The ranks of a node share its cores, where the job books none. torch reads this when it is imported.
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    # Spinning threads slow each other down where a core has other work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    faulthandler.enable()
    # With this variable transformers would report everything a second time, without steps.
    os.environ.pop(environment.KUBEFLOW_URL, None)
    try:
        inputs, prepared_dir = (Path(os.environ[name]) for name in (environment.INPUTS_DIR, environment.PREPARED_DIR))
    except KeyError as error:
        raise SystemExit(f"this is a step of a job, and runs only there: {error} is not set") from None
    try:
        document = Document.read(inputs / "training.json")
        prepared = Prepared.read(prepared_dir / "prepared.json")
    except (DocumentError, OSError) as error:
        report.fail(Reason.BAD_INPUT, str(error))
    # Only now: a mistake in the documents is reported before seconds of imports. A tenth of these would go to
    # collections; later ones need not look at what was imported either.
    gc.disable()
    from trainmaster.jobs.attempt import NotOwnerError
    from trainmaster.jobs.checkpoint import CorruptCheckpointError
    from trainmaster.jobs.checkpoint_reader import InexactResumeError
    from trainmaster.jobs.checkpoint_saver import SaveError
    from trainmaster.jobs.trees import TreeError
    from trainmaster.training.run import train
    from trainmaster.training.session import Stopped
    from trainmaster.training.state import StateMismatchError

    if (trainer := TRAINERS.get(document.training.training_type)) is not None:
        importlib.import_module(trainer)
    gc.freeze()
    gc.enable()
    try:
        train(document, prepared, scratch=prepared_dir / f"rank-{report.rank()}")
    except Stopped:
        report.exit_stopped()
    except NotOwnerError as error:
        raise SystemExit(str(error)) from None
    except SaveError as error:
        report.fail(Reason.STORAGE_UNAVAILABLE, str(error))
    except PreparingError as error:
        report.fail(error.reason, str(error))
    except (DocumentError, InexactResumeError, CorruptCheckpointError, StateMismatchError, TreeError) as error:
        report.fail(Reason.BAD_INPUT, str(error))


if __name__ == "__main__":
    main()
