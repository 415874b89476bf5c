"""Checks of the source of submitted functions, in a process with limits (`core.workloads.function_source`)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from weakref import WeakValueDictionary

from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads import function_source
from trainmaster.server.core.workloads.function import FunctionSpec

SOURCE_CHECKS_AT_ONCE = 2
"""Processes of all accounts; one account has one at a time, so that it cannot keep others waiting."""
SOURCE_CHECK_TIMEOUT_S = 30.0
"""For a process that gets no CPU. One that computes ends by its own limit, long before."""
TOO_MUCH = "takes too much time or memory to parse; put most of it into files that you ship with the job"


class SourceChecks:
    """Checks the source of submitted functions in a process with limits (`core.workloads.function_source`).

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SOURCE_CHECKS_AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, request: SubmitJobRequest, account_id: str) -> None:
        """Return if a request has no function, or one whose source is fine.

        Raises:
            SpecError: the source is not Python, does not define the function, or costs too much to parse.
        """
        spec = request.workload
        if not isinstance(spec, FunctionSpec):
            return
        turn = self._turns.setdefault(account_id, asyncio.Lock())
        async with turn, self._slots:
            problem = await asyncio.to_thread(_problem_of, spec)
        if problem is not None:
            raise SpecError([Problem(field="workload.source", message=problem)])


def _problem_of(spec: FunctionSpec) -> str | None:
    # The Python of an image may be newer than the server's.
    asked = {"source": spec.source, "name": spec.name, "newer_python": spec.image is not None}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", function_source.__file__],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env={},
            cwd="/",
            timeout=SOURCE_CHECK_TIMEOUT_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return TOO_MUCH
    problem: str | None = json.loads(done.stdout)
    return problem
