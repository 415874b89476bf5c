"""A backend that the next server does not have: its jobs wait, and nobody else does."""

from __future__ import annotations

from pathlib import Path

from real_server import RealServer, wait_for
from trainmaster.protocol.launch import CONTAINER


def message_of(server: RealServer, job_id: str) -> str:
    return server.job(job_id)["status_message"] or ""


def test_jobs_of_a_backend_that_is_gone_wait_with_the_reason_and_hold_up_no_others(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "config.toml").write_text(f'backends = ["local", "container"]\ncontainer_host = "unix://{tmp_path}/none"\n')
    server = RealServer(data)
    try:
        server.start()
        workload = {"kind": "command", "argv": ["true"], "image": "image"}
        left = server.submit(backend=CONTAINER, workload=workload)
        wait_for(lambda: f"tried unix://{tmp_path}/none" in message_of(server, left), "what was tried")
        server.stop()
        (data / "config.toml").write_text('backends = ["local"]\n')
        server.start()
        assert server.until(server.submit("true"))["status"] == "COMPLETED"
        wait_for(lambda: "the setting `backends` leaves it out" in message_of(server, left), "the reason")
        assert server.data("POST", f"/v1/jobs/{left}/cancel")["status"] == "CANCELLED"
        assert "Traceback" not in server.log_text(), server.log_text()[-4000:]
    finally:
        server.clean_up()
