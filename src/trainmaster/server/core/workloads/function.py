"""The `function` workload: a Python function, sent as its source, and called once on each rank."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import Field, Strict, StringConstraints

from trainmaster.protocol import function_runner, mpi_nodes
from trainmaster.protocol.function_runner import CALL_FILE, MPI_FILE, RUNNER_FILE, SOURCE_FILE
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.server.core.fields import JsonObject, Matches, RuleViolation
from trainmaster.server.core.workloads.base import JobConfigs, PackagedSpec

MAX_SOURCE = 128 << 10
"""In characters. A larger program goes into files."""
MAX_ARGUMENTS = 256 << 10
"""In characters, as JSON. They are stored with the job; data goes into files."""

CALL = LaunchStep(name="node", argv=(RUNNER_FILE,), python=True, from_inputs=True)

Source = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_SOURCE), Matches(r"[^\x00]*", "must not hold a NUL character")
]
FunctionName = Annotated[
    str, StringConstraints(max_length=256), Matches(r"[^\W\d]\w*", "must be the name of a function")
]
TuplePath = Annotated[
    tuple[Annotated[str, Strict()] | Annotated[int, Strict()], ...], Field(min_length=1, max_length=64)
]


class FunctionSpec(PackagedSpec):
    """A Python function; what it returns on rank 0 is kept as `result.json` among the job's results."""

    kind: Literal["function"]
    source: Source = Field(description="The text of a Python module that defines the function.")
    name: FunctionName = Field(description="The name of the function in that module.")
    arguments: JsonObject = Field(
        default_factory=dict,
        description="Keyword arguments; if the function takes no such keywords, the object is its only argument.",
    )
    tuples: Annotated[tuple[TuplePath, ...], Field(max_length=10_000)] = Field(
        default=(),
        description='Which lists in the arguments are tuples in Python: the path to each, such as `["shape"]` or '
        '`["rows", 0]`, inner ones first.',
    )

    def broken_rules(self) -> Iterator[RuleViolation]:
        yield from super().broken_rules()
        yield from _wrong_arguments(self.arguments)
        yield from _wrong_tuples(self.arguments, self.tuples)

    def compile(self, job: JobConfigs) -> Launch:
        """The runner, with the function and how to call it; the source was checked by `function_source`."""
        inputs = {
            RUNNER_FILE: _text_of(function_runner),
            SOURCE_FILE: self.source,
            CALL_FILE: json.dumps({"name": self.name, "arguments": self.arguments, "tuples": self.tuples}) + "\n",
        }
        if job.resource_config.node_count > 1:
            inputs[MPI_FILE] = _text_of(mpi_nodes)
        return self.launch(job, CALL, inputs=inputs)


@functools.cache
def _text_of(module: ModuleType) -> str:
    return inspect.getsource(module)


def _wrong_arguments(arguments: JsonObject) -> Iterator[RuleViolation]:
    try:
        length = len(json.dumps(arguments, allow_nan=False))
    except ValueError:
        yield RuleViolation(("arguments",), "JSON has no infinite numbers, and none that is not a number")
    else:
        if length > MAX_ARGUMENTS:
            yield RuleViolation(("arguments",), f"have {length} characters as JSON; the most is {MAX_ARGUMENTS}")


def _wrong_tuples(arguments: JsonObject, paths: Iterable[tuple[str | int, ...]]) -> Iterator[RuleViolation]:
    for index, path in enumerate(paths):
        found: Any = arguments
        try:
            for step in path:
                found = found[step]
        except (LookupError, TypeError):
            found = None
        if not isinstance(found, list):
            yield RuleViolation(("tuples", index), "leads to no list of the arguments")
