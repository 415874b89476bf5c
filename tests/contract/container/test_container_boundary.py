"""What a job in a container tries in order to reach beyond it: the server's files, its eyes, and other accounts."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from container_engine import plain_image
from container_servers import ContainerServer
from real_server import wait_for

SECRET = "what another account keeps for itself"

TRYING = """
import errno, json, os, socket, stat
from pathlib import Path
node = Path(os.environ["TRAINMASTER_EVENTS_FILE"]).parent
run = node.parents[1]

def tried(what, act):
    try:
        act()
    except OSError as error:
        print(what, errno.errorcode[error.errno], flush=True)
    else:
        print(what, "DONE", flush=True)

def write(path):
    return lambda: path.write_text('{"attempt": 1, "token": "mine"}')

def replace(path):
    def act():
        write(node / "draft")()
        os.replace(node / "draft", path)
    return act

tried("owner", write(run.parent / "owner.json"))
tried("owner-renamed", replace(run.parent / "owner.json"))
tried("request", write(run / "request.json"))
tried("control", write(run / "control.json"))
tried("next-attempt", lambda: (run.parent / "2").mkdir())
tried("other-node", lambda: (run / "nodes" / "1").mkdir())
tried("nodes-moved", lambda: os.rename(node, run / "work" / "moved"))
tried("device", lambda: os.mknod(node / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3)))
tried("packets", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
tried("own-part", write(node / "mine"))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print("privileges", int(status["CapEff"], 16) >> 21 & 1, status["NoNewPrivs"].strip(), flush=True)
"""

PLANTING = """
import json, os, sys, time
from pathlib import Path
node, out = Path(os.environ["TRAINMASTER_EVENTS_FILE"]).parent, Path(os.environ["TRAINMASTER_OUTPUT_DIR"])
logs, secret = node / "logs", sys.argv[1]
(logs / "more.0.out").symlink_to(secret)
(logs / "more.0.err").symlink_to("../../../../../../../" + secret)
os.mkfifo(logs / "pipe.0.out")
(logs / "main.0.err.times").unlink(missing_ok=True)
os.mkfifo(logs / "main.0.err.times")
(node / "rank-0.metrics.jsonl").symlink_to(secret + ".jsonl")
(node / "beat.json").unlink()
os.mkfifo(node / "endpoint.json")
(node / "containers.json").write_text(json.dumps({"engine": "unix:///nowhere", "name": "other", "containers": {}}))
claim = node.parents[1] / "claims" / "0.json"
claim.unlink()
claim.symlink_to(secret)
(out / "leak.txt").symlink_to(secret)
(out / "own.txt").write_text("own")
print("planted", flush=True)
time.sleep(600)
"""

FORGING = """
import json, os, sys, time
from pathlib import Path
events = Path(os.environ["TRAINMASTER_EVENTS_FILE"])
node = events.parent
for place in sys.argv[1:]:
    host, port = place.split(":")
    (node / "draft").write_text(json.dumps({"host": host, "port": int(port)}))
    os.replace(node / "draft", node / "endpoint.json")
    for stream, record in ((node / "worker.jsonl", {"type": "ready"}), (events, {"type": "note", "message": place})):
        with open(stream, "a") as file:
            file.write(json.dumps({"t": time.time(), **record}) + "\\n")
    time.sleep(1.5)
time.sleep(600)
"""

LYING = """
import json, os, sys, time
from pathlib import Path
node = Path(os.environ["TRAINMASTER_EVENTS_FILE"]).parent
pid, ended_at, length = map(json.loads, sys.argv[1:])
claim = node.parents[1] / "claims" / "0.json"
claim.write_text(json.dumps({"pid": pid, "more": "x" * length}))
(node / "draft").write_text(json.dumps({"reason": "SUCCEEDED", "ended_at": ended_at}))
os.replace(node / "draft", node / "exit.json")
while not (node.parents[1] / "closed").exists():
    time.sleep(0.01)
(node / "exit.json").unlink()
time.sleep(600)
"""

SERVING = """
import http.server, os
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(os.environ["PORT"]), bind="0.0.0.0")
"""

REACHING = """
import socket, sys
for place in sys.argv[1:]:
    host, port = place.split(":")
    try:
        socket.create_connection((host, int(port)), 2).close()
        print(place, "REACHED", flush=True)
    except OSError:
        print(place, "is out of reach", flush=True)
"""


class Tenant(ContainerServer):
    """The same server, asked with the key of another account."""

    def __init__(self, server: ContainerServer, account: str, **fields: int) -> None:
        self.__dict__.update(server.__dict__)
        server.data("POST", "/v1/accounts", {"account_id": account, **fields})
        body = {"account_id": account, "name": account, "scopes": ["view", "manage"]}
        self._key = str(server.data("POST", "/v1/keys", body)["key"])

    @property
    def key(self) -> str:
        return self._key


@pytest.fixture(scope="module")
def vision(container_server: ContainerServer) -> Tenant:
    """An account without a user of its own, whose jobs stay in containers."""
    return Tenant(container_server, "vision")


@pytest.fixture(scope="module")
def speech(container_server: ContainerServer) -> Tenant:
    """Another one."""
    return Tenant(container_server, "speech")


@pytest.fixture(scope="module")
def login(container_server: ContainerServer) -> Tenant:
    """An account that is a user of the machine, and has no containers."""
    return Tenant(container_server, "login", uid=61001)


def cancel(server: ContainerServer, job_id: str) -> None:
    server.data("POST", f"/v1/jobs/{job_id}/cancel")
    assert server.until(job_id)["status"] == "CANCELLED"
    server.wait_until_cleared(job_id)


def test_a_container_writes_to_its_own_part_of_the_run_directory_alone(vision: Tenant) -> None:
    job_id = vision.run("python3", "-c", TRYING)
    assert vision.until(job_id)["status"] == "COMPLETED"
    outcomes = dict(line.split(" ", 1) for line in vision.lines(job_id))
    refused = ("owner", "owner-renamed", "request", "control", "next-attempt", "other-node", "nodes-moved", "device")
    # A rename onto another mount is refused as such, before it is seen that nothing may be written there.
    assert {outcomes.pop(name) for name in refused} <= {"EROFS", "EXDEV", "EBUSY", "EPERM"}
    assert outcomes == {"packets": "EPERM", "own-part": "DONE", "privileges": "0 1"}
    request = json.loads((vision.directory / f"runs/{job_id}/1/request.json").read_text())
    assert (request["job_id"], request["confined"]) == (job_id, True)
    assert json.loads((vision.directory / f"runs/{job_id}/owner.json").read_text())["token"] == request["rank_token"]


def test_no_user_of_the_machine_gets_to_what_root_of_a_container_leaves(login: Tenant, vision: Tenant) -> None:
    """It could be a setuid program of root's."""
    # From here on, users of the machine pass through the server's directories to their own.
    login.until(login.submit(workload={"kind": "command", "argv": ["true"]}, backend="local"))
    assert (vision.directory / "cache").stat().st_mode & 0o777 == 0o711
    plants = """
import os
for name in ("OUTPUT_DIR", "CHECKPOINT_DIR", "CACHE_DIR", "PREPARED_DIR"):
    directory = os.environ[f"TRAINMASTER_{name}"]
    os.close(os.open(f"{directory}/program", os.O_CREAT, 0o755))
    os.chmod(f"{directory}/program", 0o4755)
    os.chmod(directory, 0o755)
    print(directory, flush=True)
"""
    job_id = vision.run("python3", "-c", plants)
    assert vision.until(job_id)["status"] == "COMPLETED"
    assert len(vision.lines(job_id)) == 4
    for line in vision.lines(job_id):
        directory = Path(line)
        assert (directory / "program").stat().st_mode & 0o7777 == 0o4755
        above = [parent for parent in directory.parents if parent.is_relative_to(vision.directory)]
        assert any(not parent.stat().st_mode & 0o001 for parent in above), f"{directory} can be reached"


def test_links_and_pipes_of_a_job_lead_the_server_nowhere(vision: Tenant) -> None:
    secret = vision.home / "secret"
    secret.write_text(SECRET + "\n")
    Path(f"{secret}.jsonl").write_text(json.dumps({"t": 1, "step": 1, "values": {"stolen": 1}}) + "\n")
    job_id = vision.run("python3", "-c", PLANTING, str(secret))
    vision.wait_for_line(job_id, "planted")
    vision.until(job_id, "TRAINING")
    assert SECRET not in vision.ask("GET", f"/v1/jobs/{job_id}/logs?since=0").text
    metrics = vision.ask("GET", f"/v1/jobs/{job_id}/metrics")
    assert (metrics.status_code, "stolen" in metrics.text) == (200, False)
    assert "stolen" not in json.dumps(vision.job(job_id))
    artifacts = vision.ask("GET", f"/v1/jobs/{job_id}/artifacts").text
    assert ("own.txt" in artifacts, "leak.txt" in artifacts) == (True, False)
    assert vision.ask("GET", f"/v1/jobs/{job_id}/artifacts/output/leak.txt").status_code == 404
    (name,) = [name for name in vision.containers(job_id) if name.endswith("-0")]
    # The job is seen, stopped and cleared away as any other, by what the server itself knows of it.
    cancel(vision, job_id)
    assert vision.engine.podman("ps", "--all", "--filter", f"name={name}", "--format", "{{.Names}}") == ""
    assert SECRET not in "\n".join(vision.lines(job_id))


def test_a_job_that_forges_its_end_has_ended_and_keeps_nothing_of_others(vision: Tenant, speech: Tenant) -> None:
    lies = [("1", "1e18", "0"), ("1e400", '"x"', str(64 << 20))]
    forging = [vision.run("python3", "-c", LYING, *lie) for lie in lies]
    kept = speech.run("true", workload={"container": {"auto_remove": False}})
    for job_id in forging:
        assert vision.until(job_id)["status"] == "COMPLETED"
        # Its container and its network: nothing runs on beyond what the account is charged for.
        vision.wait_until_cleared(job_id)
    assert speech.until(kept)["status"] == "COMPLETED"
    wait_for(lambda: len(speech.containers(kept)) == 1, "the removal of the network of a container that is kept")
    (name,) = speech.containers(kept)
    assert speech.engine.podman("inspect", "--format", "{{.State.Status}}", name) == "exited"
    speech.engine.podman("rm", name)


@pytest.fixture
def bystander() -> Iterator[tuple[str, list[str]]]:
    """A program of this machine that listens on its loopback address, and what it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield str(server.server_address[1]), asked
        finally:
            server.shutdown()
            thread.join()


def test_requests_go_to_a_service_where_it_was_put_and_nowhere_else(
    vision: Tenant, bystander: tuple[str, list[str]]
) -> None:
    port, asked = bystander
    own_port = vision.url.rpartition(":")[2]
    places = [f"127.0.0.1:{port}", f"node-0:{port}", f"127.0.0.1:{own_port}"]
    job_id = vision.submit(workload={"kind": "service", "argv": ["python3", "-c", FORGING, *places]})
    for place in places:
        # The place and this word of it are read in one look.
        wait_for(lambda: place in json.dumps(vision.events(job_id)), place)  # noqa: B023 - called at once
        assert vision.job(job_id)["endpoint"] is None
        answer = vision.ask("GET", f"/v1/jobs/{job_id}/proxy/v1/jobs")
        assert answer.status_code >= 400, answer.text
    assert asked == []
    cancel(vision, job_id)


def test_accounts_reach_neither_each_others_containers_nor_their_jobs(vision: Tenant, speech: Tenant) -> None:
    serving = vision.submit(workload={"kind": "service", "argv": ["python3", "-c", SERVING]})
    vision.until(serving, "TRAINING")
    assert vision.ask("GET", f"/v1/jobs/{serving}/proxy/").status_code == 200
    (name,) = [name for name in vision.containers(serving) if name.endswith("-0")]
    facts = json.loads(vision.engine.podman("inspect", name))[0]
    ((port, published),) = facts["NetworkSettings"]["Ports"].items()
    assert [each["HostIp"] for each in published] == ["127.0.0.1"]
    (network,) = facts["NetworkSettings"]["Networks"].values()
    port = port.removesuffix("/tcp")
    places = [f"{network['IPAddress']}:{port}", f"{network['Gateway']}:{port}"]
    reaching = speech.run("python3", "-c", REACHING, *places)
    assert speech.until(reaching)["status"] == "COMPLETED"
    assert speech.lines(reaching) == [f"{place} is out of reach" for place in places]
    for path in ("", "/logs", "/proxy/"):
        assert speech.ask("GET", f"/v1/jobs/{serving}{path}").status_code == 404
    cancel(vision, serving)


def test_an_account_without_a_user_has_containers_and_nothing_else_of_the_machine(vision: Tenant) -> None:
    body = {"name": "n", "backend": "local", "workload": {"kind": "command", "argv": ["true"]}}
    refused = vision.ask("POST", "/v1/jobs", {**body, "resource_config": {"gpu_count": 0}})
    assert refused.status_code == 400
    assert "use the backend container" in refused.json()["error"]["message"]
    shown = vision.home / "shown-to-all"
    shown.mkdir(exist_ok=True)
    (shown / "given.txt").write_text("given")
    reading = ("python3", "-c", "print(open('/shown/given.txt').read())")
    volume = {"source": str(shown), "target": "/shown"}
    job_id = vision.run(*reading, workload={"volumes": [volume]})
    assert "can only be read by jobs of this account" in vision.until(job_id)["error"]["error_message"]
    job_id = vision.run(*reading, workload={"volumes": [{**volume, "read_only": True}]})
    assert vision.until(job_id)["status"] == "COMPLETED"
    assert vision.lines(job_id) == ["given"]
    for target in ("/trainmaster", "/trainmaster/secrets", "/x/../trainmaster"):
        workload = {"kind": "command", "argv": ["true"], "volumes": [{"source": "kept", "target": target}]}
        answer = vision.ask("POST", "/v1/jobs", {"name": "n", "workload": workload})
        assert (answer.status_code, "target" in answer.text) == (422, True)


def test_a_worker_on_the_machine_runs_nothing_of_the_jobs_and_writes_where_no_job_does(vision: Tenant) -> None:
    marker = vision.home / "ran-outside"
    content = f"open({str(marker)!r}, 'w')\n".encode()
    digest = hashlib.sha256(content).hexdigest()
    assert vision.ask("PUT", f"/v1/blobs/{digest}", content=content).is_success
    files = [
        {"path": name, "sha256": digest} for name in ("sitecustomize.py", "docker.py", "json.py", "trainmaster.py")
    ]
    script = (
        "node=${TRAINMASTER_EVENTS_FILE%/*}; for path in $node/x $node/logs/x $node/../../claims/x $node/../../x; do "
        "(echo x > $path) 2>/dev/null && echo wrote $path; done; "
        'echo \'{"type": "note", "message": "from inside"}\' >> $TRAINMASTER_EVENTS_FILE; '
        "echo x > $TRAINMASTER_OUTPUT_DIR/own.txt; ls; echo $PYTHONPATH $LD_PRELOAD"
    )
    workload = {
        "kind": "command",
        "image": plain_image(vision.engine),
        "argv": ["sh", "-c", script],
        "files": files,
        "environment": {"PYTHONPATH": ".", "PYTHONSTARTUP": "json.py", "DOCKER_HOST": "unix:///nowhere"},
    }
    job_id = vision.submit(workload=workload)
    assert vision.until(job_id)["status"] == "COMPLETED", vision.lines(job_id)
    assert vision.lines(job_id) == [*sorted(file["path"] for file in files), "."]
    assert not marker.exists()
    assert any("from inside" in str(event) for event in vision.events(job_id))
    vision.wait_until_cleared(job_id)
