"""Services: a port of their own, readiness, an endpoint; and reports in Kubeflow's form."""

from __future__ import annotations

import urllib.request
from typing import Any

from worker_attempts import Attempts, wait_for

from patience import PATIENCE_S
from trainmaster.protocol.launch import Lifetime, Readiness
from trainmaster.protocol.reasons import Reason, StopCause
from trainmaster.protocol.run_directory import endpoint_document

SERVER = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path != '/health' or pathlib.Path('ready').exists()
        self.send_response(200 if ready else 503)
        self.send_header('Content-Length', '2')
        self.end_headers()
        self.wfile.write(b'ok')
    def log_message(self, *_): print('asked', flush=True)
http.server.HTTPServer(('127.0.0.1', int(os.environ['PORT'])), Handler).serve_forever()
"""
SERVICE: dict[str, Any] = {"lifetime": Lifetime.SERVICE, "port_environment": "PORT"}


def test_service_that_answers_is_ready_and_has_an_endpoint(attempts: Attempts) -> None:
    attempt = attempts.python(SERVER, readiness=Readiness(path="/health", interval_s=0.02), **SERVICE)
    attempt.start()
    attempt.says("asked")
    assert attempt.directory.document(endpoint_document(0)) is None
    (attempt.path / "work" / "ready").touch()
    ready = attempt.record("ready")
    endpoint = attempt.directory.document(endpoint_document(0))
    assert endpoint is not None
    assert (endpoint["host"], endpoint["port"]) == (ready["host"], ready["port"])
    with urllib.request.urlopen(f"http://{endpoint['host']}:{endpoint['port']}/", timeout=PATIENCE_S) as answer:
        assert answer.read() == b"ok"
    attempt.stop(StopCause.INACTIVE)
    assert attempt.ended()["reason"] == Reason.INACTIVE


def test_service_of_a_gang_may_have_one_node_that_answers(attempts: Attempts) -> None:
    serve = f"import os, time\nif os.environ['RANK'] != '0': time.sleep(600)\n{SERVER}"
    readiness = Readiness(interval_s=0.02, timeout_s=60, first_node_only=True)
    attempt = attempts.python(serve, nodes=2, readiness=readiness, **SERVICE)
    attempt.start(0)
    attempt.start(1)
    assert "port" not in attempt.record("ready", node=1)
    assert attempt.directory.document(endpoint_document(1)) is None
    assert attempt.record("ready")["port"]


def test_service_that_does_not_answer_in_time_is_not_ready(attempts: Attempts) -> None:
    attempt = attempts(
        "sh", "-c", "echo still loading >&2; sleep 600", readiness=Readiness(timeout_s=0.5, interval_s=0.05), **SERVICE
    )
    ended = attempt.run()
    assert ended["reason"] == Reason.NOT_READY
    assert "refused" in ended["message"]
    assert ended["evidence"]["last_lines"] == ["still loading"]
    assert attempt.directory.document(endpoint_document(0)) is None


def test_service_that_never_has_a_good_answer_is_not_ready(attempts: Attempts) -> None:
    attempt = attempts.python(SERVER, readiness=Readiness(path="/health", timeout_s=3.0), **SERVICE)
    ended = attempt.run()
    assert ended["reason"] == Reason.NOT_READY
    assert "503" in ended["message"]


def test_service_that_accepts_but_says_nothing_does_not_hold_the_worker_up(attempts: Attempts) -> None:
    code = (
        "import os, socket, time\n"
        "server = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))\n"
        "connection = server.accept(); print('accepted', flush=True); time.sleep(600)\n"
    )
    attempt = attempts.python(code, **SERVICE)
    attempt.start()
    attempt.says("accepted")
    attempt.stop()
    assert attempt.ended()["reason"] == Reason.CANCELLED


def test_service_that_fails_before_it_is_ready_failed(attempts: Attempts) -> None:
    ended = attempts("sh", "-c", "exit 6", **SERVICE).run()
    assert (ended["reason"], ended["exit_code"]) == (Reason.EXITED_NONZERO, 6)


def test_service_that_ends_by_itself_succeeded(attempts: Attempts) -> None:
    assert attempts("true", **SERVICE).run()["reason"] == Reason.SUCCEEDED


def test_kubeflow_status_becomes_metrics_of_the_rank(attempts: Attempts) -> None:
    code = """
import json, os, urllib.error, urllib.request
def post(document, token, method='POST'):
    request = urllib.request.Request(
        os.environ['KUBEFLOW_TRAINER_SERVER_URL'], json.dumps(document).encode(), method=method,
        headers={'Authorization': f'Bearer {token}', 'Content-Type': 'application/json'})
    try:
        return urllib.request.urlopen(request, timeout=300).status
    except urllib.error.HTTPError as error:
        return error.code
token = open(os.environ['KUBEFLOW_TRAINER_SERVER_TOKEN']).read()
status = {'progressPercentage': 40, 'estimatedRemainingSeconds': 90, 'metrics': [
    {'name': 'loss', 'value': '0.25'}, {'name': 'note', 'value': 'fine'}, {'name': 'worse', 'value': 'nan'}]}
print(post({'trainerStatus': status}, token))
print(post({'trainerStatus': status}, 'stolen'))
print(post({'status': 1}, token))
print(post({'trainerStatus': {}}, token, 'PUT'))
"""
    attempt = attempts.python(code, environment={"no_proxy": "*"})
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log().split() == ["200", "401", "400", "405"]
    (record,) = wait_for(attempt.metrics)
    assert {name: record[name] for name in ("percent", "eta_s", "values")} == {
        "percent": 40.0,
        "eta_s": 90.0,
        "values": {"loss": 0.25},
    }
