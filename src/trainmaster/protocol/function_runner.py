"""Calls the function of a job on each rank. A copy of this file is the program of that step.

It runs with the job's Python, which may be older than ours and not have this package: standard library of Python 3.9
only. The function's module is a file beside it, imported by name: tracebacks show its lines, and processes that it
spawns find it.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

RUNNER_FILE = "run_function.py"
SOURCE_MODULE = "trainmaster_function"
SOURCE_FILE = f"{SOURCE_MODULE}.py"
CALL_FILE = "function.json"
"""The function's `name`, its `arguments`, and which of those are `tuples`."""
RESULT_FILE = "result.json"
"""What the function returned on rank 0; one of the job's results."""

WORKSPACE_PATHS = (("/workspace/dataset", "DATASET_PATH"), ("/workspace/model", "MODEL_PATH"))
"""Where programs for Kubeflow look for fetched data, and the variables with its real place."""
MPI_LAUNCHER = "MPI_LAUNCHER"
"""Set by an MPI runtime: the command that starts the processes, such as `mpirun -n $(WORLD_SIZE)`."""
MPI_PACKAGE = "openmpi"
MPI_LIBRARY = "libmpi.so.40"
MLX_MPI_LIBRARY = "MLX_MPI_LIBNAME"
"""Where MLX looks for MPI; it does not find a Python package by itself."""
MPI_REMEDY = f'packages_to_install=["{MPI_PACKAGE}"] brings one'
MPI_MODULE = "trainmaster_mpi_nodes"
MPI_FILE = f"{MPI_MODULE}.py"
"""The copy of `mpi_nodes`, for jobs with several nodes."""
STARTED_BY_MPI = "TRAINMASTER_STARTED_BY_MPI"
"""The Python to start this file with. Each node has its own, and its own path of the file."""
PROGRAM = ("/bin/sh", "-c", f'exec "${STARTED_BY_MPI}" "$TRAINMASTER_INPUTS_DIR/{RUNNER_FILE}"')
MPI_VARIABLES = (
    ("PMI_RANK", "RANK"),
    ("PMI_SIZE", "WORLD_SIZE"),
    ("MPI_LOCALRANKID", "LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
)
"""MPICH's and Open MPI's names for the variables of a rank."""


def main() -> None:
    by_mpi = STARTED_BY_MPI in os.environ
    if make_room_for_mpi():
        return
    try:
        run()
    except BaseException as error:
        if by_mpi:
            end_at_once(error)
        raise


def end_at_once(error: BaseException) -> None:
    """After a failure, exit without MPI's finalizer: it would wait for the other ranks, which may wait for this one."""
    if isinstance(error, SystemExit):
        if not error.code:
            return
        code = error.code if isinstance(error.code, int) else 1
        message = "" if isinstance(error.code, int) else f"{error.code}\n"
    else:
        code, message = 1, "".join(traceback.format_exception(type(error), error, own_frames(error.__traceback__)))
    sys.stderr.write(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error as Python does, without the frames of this file."""
    sys.__excepthook__(kind, error.with_traceback(own_frames(trace)), own_frames(trace))


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the leading frames of this file; all of it if there are no others."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found or trace


def run() -> None:
    inputs = os.path.dirname(os.path.abspath(__file__))
    # Files shipped with the job are in the working directory; they are imported as a script would.
    sys.path[:0] = [os.getcwd(), inputs]
    with open(os.path.join(inputs, CALL_FILE), encoding="utf-8") as file:
        call = json.load(file)
    function = getattr(importlib.import_module(SOURCE_MODULE), call["name"])
    value = call_with(function, with_tuples(placed(call["arguments"]), call.get("tuples", ())))
    if inspect.iscoroutine(value):
        import asyncio

        value = asyncio.run(value)
    if os.environ.get("RANK", "0") == "0":
        keep(value, call["name"], os.environ["TRAINMASTER_OUTPUT_DIR"])


def make_room_for_mpi() -> bool:
    """If the runtime names an MPI launcher: rank 0 becomes the launcher, which starts this file again for each rank.

    The other ranks do nothing but let the launcher in (the first rank of each node): returns True. In a process that
    the launcher started, set the variables of the rank from MPI's.
    """
    launcher = shlex.split(os.environ.pop(MPI_LAUNCHER, ""))
    if not launcher:
        if os.environ.pop(STARTED_BY_MPI, ""):
            os.environ.update({ours: os.environ[its] for its, ours in MPI_VARIABLES if its in os.environ})
            for library in files_of_mpi(MPI_LIBRARY):
                os.environ.setdefault(MLX_MPI_LIBRARY, library)
            # The launcher interleaves the output of all ranks: flush whole lines.
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):
                    stream.reconfigure(line_buffering=True, write_through=False)
        return False
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return True
    os.environ[STARTED_BY_MPI] = sys.executable
    # Open MPI may be a package of this Python, or of the one below this environment.
    beside = [os.path.dirname(file) for file in (sys.executable, *files_of_mpi(launcher[0]))]
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), *beside))
    cannot_run = f"{launcher[0]}, which starts the processes of MPI, cannot be run here"
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        try:
            os.execvp(launcher[0], [*launcher, *PROGRAM])
        except OSError as error:
            sys.exit(f"{cannot_run}: {error.strerror}; {MPI_REMEDY}")
    nodes = importlib.import_module(MPI_MODULE)
    try:
        if os.environ["NODE_RANK"] == "0":
            sys.exit(nodes.lead(launcher, list(PROGRAM)))
        nodes.follow()
    except nodes.LauncherError as error:
        sys.exit(f"{cannot_run}: {error}; {MPI_REMEDY}")
    except ConnectionError as error:
        sys.exit(str(error))
    return True


def files_of_mpi(name: str) -> list[str]:
    """The files with this name in the Open MPI package, if it is installed."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = files(MPI_PACKAGE) or []
    except PackageNotFoundError:
        return []
    return [os.path.abspath(file.locate()) for file in found if file.name == name]


def placed(value: Any) -> Any:
    """Arguments in which paths below WORKSPACE_PATHS that the worker could not make are replaced by the real ones."""
    if isinstance(value, dict):
        return {name: placed(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [placed(inner) for inner in value]
    for named, variable in WORKSPACE_PATHS:
        if isinstance(value, str) and (value == named or value.startswith(named + "/")) and not os.path.exists(named):
            return os.environ.get(variable, named) + value[len(named) :]
    return value


def with_tuples(arguments: dict[str, Any], paths: Iterable[list[Any]]) -> dict[str, Any]:
    """Arguments in which the lists at these paths are tuples. Inner lists come before outer ones."""
    for *way, last in paths:
        inside: Any = arguments
        for step in way:
            inside = inside[step]
        inside[last] = tuple(inside[last])
    return arguments


def call_with(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a function with keyword arguments; or with all of them as one dict, if it accepts only that."""
    if not arguments:
        return function()
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as by_name:
        try:
            signature.bind(arguments)
        except TypeError:
            raise TypeError(f"{function.__name__}{signature} cannot be called with its arguments: {by_name}") from None
        return function(arguments)
    return function(**arguments)


def keep(value: Any, name: str, directory: str) -> None:
    """Write what a function returned, atomically. A value that JSON cannot hold is logged and is no failure."""
    try:
        text = json.dumps(value, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        problem = f"what {name} returned is not kept, because JSON cannot hold it: {error}"
        print(problem, file=sys.stderr, flush=True)  # noqa: T201 - this is the job's log
        return
    temporary = os.path.join(directory, f".{RESULT_FILE}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(directory, RESULT_FILE))


def _plain(value: Any) -> Any:
    """Numbers and arrays of numeric libraries have `tolist`."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is none of its types")


if __name__ == "__main__":
    sys.excepthook = show
    main()
