"""A service that is used is not parked."""

from __future__ import annotations

import time

import pytest

from local_servers import LocalServer, over

SERVES = b"""
import http.server, os
place = (os.environ["TRAINMASTER_SERVICE_HOST"], int(os.environ["PORT"]))
http.server.HTTPServer(place, http.server.SimpleHTTPRequestHandler).serve_forever()
"""


@over("files")
@pytest.mark.long  # tests/unit/core/test_decisions.py decides who is parked
def test_used_service_stays(server: LocalServer) -> None:
    files = [{"path": "serves.py", "sha256": server.upload_files(SERVES)}]
    workload = {"argv": ["serves.py"], "python": True, "files": files, "inactivity_timeout_s": 5.0}
    job_id = server.submit_workload("service", workload)
    server.until(job_id, "TRAINING")
    began = latest = time.monotonic()
    # Longer than the time-out without a long gap: on a busy machine that takes more than one try.
    while latest - began < 7.0:
        answer = server.ask("GET", f"/v1/jobs/{job_id}/proxy/")
        if time.monotonic() - latest > 1.0:
            began = time.monotonic()
        latest = time.monotonic()
        assert answer.status_code == 200
        time.sleep(0.1)
    job = server.job(job_id)
    assert (job["status"], job["attempt"]) == ("TRAINING", 1)
    assert job["last_activity_at"] is not None
