"""Workers of tests: shell scripts that leave notes."""

from __future__ import annotations

from pathlib import Path

from slurm_cluster import slurm_launch, wait_for
from trainmaster.backends.cluster.engine import EngineLaunch


class Programs:
    """Workers that leave notes in a directory, one file for each node."""

    def __init__(self, directory: Path, instance: str) -> None:
        self.directory = directory
        self._instance = instance

    def launch(self, script: str, **values: object) -> EngineLaunch:
        return slurm_launch(self._instance, f"cd {self.directory}\n{script}", **values)  # type: ignore[arg-type]

    def waiting(self, **values: object) -> EngineLaunch:
        """It notes `up`, and `TERM` when it gets that signal, and runs until there is a file `go`."""
        script = (
            "note() { echo $1 >> notes.$SLURM_NODEID; }\n"
            "trap 'note TERM' TERM\n"
            "note up\n"
            "while [ ! -e go ]; do sleep 0.2; done"
        )
        return self.launch(script, **values)

    def go(self) -> None:
        (self.directory / "go").touch()

    def notes(self, node: int = 0) -> list[str]:
        file = self.directory / f"notes.{node}"
        return file.read_text().split() if file.exists() else []

    def wait_for_note(self, note: str, *, nodes: int = 1) -> None:
        wait_for(lambda: all(note in self.notes(node) for node in range(nodes)), f"the note {note}")
