"""What code reports in Kubeflow's way, with the real package."""

from __future__ import annotations

from pathlib import Path

from local_servers import LocalServer
from real_server import wait_for

KUBEFLOW = Path(__file__).parents[3] / ".venvs" / "kubeflow" / "bin" / "python"
"""An interpreter with the real kubeflow package."""

REPORTS_TO_KUBEFLOW = """
import pathlib, sys, time
from kubeflow.trainer import update_trainjob_status

sent = update_trainjob_status(
    progress_percent=42, estimated_remaining_seconds=90, metrics={"loss": 0.25, "tokens": 1000, "note": "no number"}
)
print("sent", sent, flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


def test_progress_for_kubeflow_is_progress_here(server: LocalServer, scripts: Path) -> None:
    gate = scripts / "gate"
    (scripts / "reports.py").write_text(REPORTS_TO_KUBEFLOW)
    job_id = server.submit(str(KUBEFLOW), str(scripts / "reports.py"), str(gate))
    server.wait_for_line(job_id, "sent True")
    wait_for(lambda: server.job(job_id)["progress"]["percent"] == 42.0, "the percentage")
    job = server.job(job_id)
    assert job["progress"]["eta_seconds"] == 90.0
    assert job["metrics"] == {"loss": 0.25, "tokens": 1000.0}
    gate.touch()
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.data("GET", f"/v1/jobs/{job_id}/metrics")["latest"] == {"loss": 0.25, "tokens": 1000.0}
