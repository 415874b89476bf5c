"""What the preparing steps have in common: how they end, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainmaster.jobs import report
from trainmaster.jobs.inputs import PREPARED_FILE
from trainmaster.protocol import environment
from trainmaster.protocol.memory_file import handed
from trainmaster.protocol.reasons import Phase, Reason
from trainmaster.server.core.training.types import TRAIN_EXTRA
from trainmaster.training.errors import PreparingError


def run(step: Callable[[], None], install: str = TRAIN_EXTRA) -> None:
    """Do a step's work; what goes wrong on purpose ends the process with its reason and one line.

    Args:
        step: the work.
        install: how the packages are installed that it needs.
    """
    report.phase(Phase.PREPARING)
    try:
        step()
    except PreparingError as error:
        report.fail(error.reason, str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("trainmaster"):
            raise
        report.fail(Reason.BAD_INPUT, f"the package {error.name} is not installed where jobs run: {install}")


HANDED = "handed"
"""The argument of a process that goes on with what `go_on_without_credentials` hands it."""


def go_on_without_credentials(module: str, document: Mapping[str, Any]) -> NoReturn:
    """Become a new process of a module, which reads a document from its standard input and holds no credentials.

    For code that comes with a model: it could read the memory and the first environment of the process that fetched.
    """
    sys.stdout.flush()
    os.dup2(handed(document), 0)
    left = {name: value for name, value in os.environ.items() if name not in environment.CREDENTIALS}
    os.execve(sys.executable, [sys.executable, "-s", "-P", "-m", module, HANDED], left)


def handed_over() -> Any:
    """The document with which this process goes on; None where it is the first one."""
    return json.load(sys.stdin) if sys.argv[1:] == [HANDED] else None


def end_when_told() -> None:
    """End at SIGTERM, as any process does but the first one of a container, which the kernel lets off."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def leave(prepared: Mapping[str, Any]) -> None:
    """Write `prepared.json` for the ranks of this node."""
    directory = Path(os.environ[environment.PREPARED_DIR])
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{PREPARED_FILE}"
    draft.write_text(json.dumps(prepared, indent=2) + "\n")
    os.replace(draft, directory / PREPARED_FILE)
