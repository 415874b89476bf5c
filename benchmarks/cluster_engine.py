"""A real engine in a process of its own: the one that the tests start, from nothing to a cluster that takes jobs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import WrongResultError
from benchmarks.server import environment, free_port

TESTS = Path(__file__).parents[1] / "tests"
_OF_TESTS = frozenset({"poll_s", "node_lost_after_s"})
"""Options that the tests set to wait less; a measured server has the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine that runs, or why it cannot run here."""

    kind: str
    missing: str
    options: Mapping[str, Any]
    """What a server's settings say of the cluster."""
    environment: Mapping[str, str]
    """Variables of the server."""

    def settings(self) -> str:
        """The settings of a server whose only backend is this engine."""
        options = {"kind": self.kind, **self.options}
        lines = [f"backends = {json.dumps([self.kind])}", "", f"[clusters.{self.kind}]"]
        return "\n".join([*lines, *(f"{name} = {json.dumps(value)}" for name, value in options.items()), ""])

    def server_options(self, directory: Path) -> tuple[str, ...]:
        """The options of a server that uses it."""
        file = directory / f"{self.kind}.toml"
        file.write_text(self.settings())
        # Workers know one address.
        return "--config", str(file), "--port", str(free_port())


@contextlib.contextmanager
def running_engine(kind: str) -> Iterator[Engine]:
    """An engine for the length of a block; nothing of it is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster_engines", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "PYTHONPATH": str(TESTS)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise WrongResultError(f"{kind} does not start; run `PYTHONPATH=tests python -m cluster_engines {kind}`")
        said = json.loads(line)
        options = {name: value for name, value in said.get("options", {}).items() if name not in _OF_TESTS}
        yield Engine(
            kind=kind,
            missing=said.get("missing", ""),
            options=options,
            environment=said.get("environment", {}),
        )
    finally:
        process.stdin.close()
        process.wait()
