"""Run the benchmarks, or those that are named, and print one table."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks import (
    cluster_followed,
    clusters,
    engine_tokens,
    first_instruction,
    followers,
    function_start,
    idle,
    listing,
    live,
    reads,
    saving,
    scheduling,
    service_doors,
    service_front,
    service_steps,
    service_tokens,
    submissions,
    throughput,
    training,
)
from benchmarks.report import Figure, Progress, WrongResultError, machine, table

BENCHMARKS: Mapping[str, Callable[[Path, Progress], Sequence[Figure]]] = MappingProxyType(
    {
        "submissions": submissions.measure,
        "first_instruction": first_instruction.measure,
        "function_start": function_start.measure,
        "clusters": clusters.measure,
        "cluster_followed": cluster_followed.measure,
        "throughput": throughput.measure,
        "followers": followers.measure,
        "idle": idle.measure,
        "listing": listing.measure,
        "live": live.measure,
        "reads": reads.measure,
        "scheduling": scheduling.measure,
        "saving": saving.measure,
        "service_doors": service_doors.measure,
        "service_front": service_front.measure,
        "service_steps": service_steps.measure,
        "service_tokens": service_tokens.measure,
        "training": training.measure,
        "engine_tokens": engine_tokens.measure,
    }
)


def main() -> int:
    """The exit code: 1 when something was lost, doubled or never came; a missed target is told, not punished."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)}; by default all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where servers keep their data, made if it is not there; should be on the disk that counts",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--directory {options.directory} cannot be made: {error.strerror}")

    on = machine(options.directory)
    print(", ".join(f"{name} {value}" for name, value in on.items()), flush=True)
    # Removed only at the end: some file systems are slow to create files for a while after many were removed.
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-", ignore_cleanup_errors=True) as directory:
        figures, wrong = _run(options.names or list(BENCHMARKS), Path(directory))
    print(table(figures))
    for name, message in wrong.items():
        print(f"{name} WENT WRONG: {message}")
    if options.json:
        document = {"machine": on, "figures": [figure.to_json() for figure in figures], "wrong": wrong}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if wrong else 0


def _run(names: Sequence[str], directory: Path) -> tuple[list[Figure], dict[str, str]]:
    """The figures of these benchmarks, and what went wrong, by benchmark."""
    figures: list[Figure] = []
    wrong: dict[str, str] = {}
    began = time.monotonic()
    for name in names:

        def progress(message: str, name: str = name) -> None:
            print(f"[{time.monotonic() - began:5.1f} s] {name}: {message}", file=sys.stderr, flush=True)

        try:
            figures += BENCHMARKS[name](directory, progress)
        except WrongResultError as error:
            wrong[name] = str(error)
    return figures, wrong


if __name__ == "__main__":
    sys.exit(main())
