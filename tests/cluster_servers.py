"""Servers whose backends are clusters, which they declare in their settings files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from engine_under_test import EngineUnderTest, wait_until_nothing_is_left
from job_server import JobServer
from real_server import ENDED


class ClusterServer(JobServer):
    """The first of its clusters is its default backend."""

    def __init__(
        self,
        directory: Path,
        port: int,
        engines: Mapping[str, EngineUnderTest],
        *arguments: str,
        changes: Mapping[str, object] | None = None,
        **environment: str,
    ) -> None:
        """`changes`: options of all clusters that are not those of the engine."""
        directory.mkdir(parents=True)
        lines = [f"backends = {json.dumps(list(engines))}"]
        for name, engine in engines.items():
            options = {"kind": engine.kind, **engine.options(), **(changes or {})}
            lines += ["", f"[clusters.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in options.items())]
            environment = {**engine.environment(), **environment}
        (directory / "config.toml").write_text("\n".join([*lines, ""]))
        # Workers know one address: it has to stay the same when the server is started again.
        super().__init__(directory, "--port", str(port), *arguments, environment=environment)
        self.engines = engines

    def end_all_jobs(self) -> None:
        """Cancel what still runs; nothing of it may be left on any engine."""
        listed = self.data("GET", "/v1/jobs?page_size=100")["jobs"]
        live = [job["job_id"] for job in listed if job["status"] not in (*ENDED, "PAUSED")]
        for job_id in live:
            self.ask("POST", f"/v1/jobs/{job_id}/cancel")
        for job_id in live:
            self.until(job_id, *ENDED, "PAUSED")
        for engine in self.engines.values():
            wait_until_nothing_is_left(engine)
