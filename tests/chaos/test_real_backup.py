"""A backup of a server that runs, made and restored by the commands of docs/guides/operations.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ground import Ground

from real_server import PATIENCE_S

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "operations.md").read_text()
OF_THE_SYSTEM = ("systemctl", "pkill", "chown")
"""What these do, the test does itself."""


def run(containing: str, data: Path, backup: Path) -> None:
    """Run a block of the page, for other directories and without what only an administrator may do."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (text for text in blocks if containing in text)
    lines = [line for line in found.splitlines() if not line.startswith((*OF_THE_SYSTEM, "D=", "B="))]
    script = "\n".join(["set -eu", f"D={data}", f"B={backup}", *lines])
    subprocess.run(["sh", "-c", script], check=True, timeout=PATIENCE_S)


def test_restored_server_has_the_state_of_the_backup(ground: Ground) -> None:
    server = ground.server().start()
    server.data("POST", "/v1/webhooks", {"url": "http://127.0.0.1:1/", "secret": "sixteen characters"})
    done = server.submit("sh", "-c", "echo line 1")
    server.until(done, "COMPLETED")
    running = server.submit(
        *ground.counting(3, save_every=1, gate="open", gate_at=2), scheduling_config={"max_retries": 1}
    )
    ground.until_counted(running, 1)
    run("old.backup(new)", server.directory, ground.path / "backup")
    later = server.submit("true")
    server.until(later, "COMPLETED")
    key = server.key

    server.stop()
    ground.clean_up()
    run("$D.before", server.directory, ground.path / "backup")
    server.start()

    assert server.key == key
    assert server.ask("GET", f"/v1/jobs/{later}").status_code == 404
    assert server.lines(done) == ["line 1"]
    assert len(server.data("GET", "/v1/webhooks")["webhooks"]) == 1
    ground.open_gate("open")
    job = server.until(running, "COMPLETED")
    assert [attempt["reason"] for attempt in job["attempts"]] == ["WORKER_LOST", "SUCCEEDED"]
    ground.leave()
