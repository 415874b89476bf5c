from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replica_server import LOSE_ANSWER, LOSE_REQUEST, ReplicaServer

from patience import PATIENCE_S
from process_signals import kill_claimant
from trainmaster.protocol.documents import read_lines
from trainmaster.protocol.launch import BlobFile, Launch, LaunchStep, Lifetime, Readiness
from trainmaster.protocol.processes import identity_of
from trainmaster.protocol.reasons import EXIT_STOPPED, Reason, StopCause
from trainmaster.protocol.request import AttemptRequest, Control, NodeAssignment
from trainmaster.protocol.run_directory import RENDEZVOUS
from trainmaster.protocol.secrets import Secrets

COURIER = """
import sys
from trainmaster.worker import mirror
from trainmaster.worker.courier import run_courier
mirror.MOST_REPORT_BYTES = 1 << 20  # not to send a gigabyte
url, token, attempt_id, node, directory, *how = sys.argv[1:]
run_courier(url, token, attempt_id, int(node), directory, delivers_only="delivers" in how, echoes="echoes" in how)
"""
OUT = "nodes/0/logs/main.0.out"
TOKEN = "attempt-token"
RANK_TOKEN = "rank-token"
CANARY = "canary-5f1d"


class Site:
    """One attempt: its server, its couriers' directories, and what its ranks leave."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.left_by_ranks = root / "left"
        self.left_by_ranks.mkdir()
        self.server: ReplicaServer
        self._couriers: list[subprocess.Popen[bytes]] = []

    def serve(self, *argv: str, nodes: int = 1, listen: bool = True, **launch: Any) -> ReplicaServer:
        """Declare what runs, and start the server."""
        environment = {"LEFT": str(self.left_by_ranks)}
        request = AttemptRequest(
            job_id=f"job-{self.root.name}-{os.getpid()}",
            attempt=1,
            token=TOKEN,
            rank_token=RANK_TOKEN,
            launch=Launch(
                kind="command", steps=(LaunchStep(name="main", argv=argv),), **{"environment": environment, **launch}
            ),
            nodes=tuple(NodeAssignment(node_id=f"node-{number}") for number in range(nodes)),
            checkpoint_dir=str(self.root / "checkpoints"),
            output_dir=str(self.root / "output"),
            owner_file=str(self.root / "not-for-the-worker" / "owner.json"),
        )
        self.server = ReplicaServer(self.root / "runs", request)
        if listen:
            self.server.start()
        else:
            self.server.reserve_port()
        return self.server

    def home(self, node: int = 0) -> Path:
        return self.root / "couriers" / str(node)

    def courier(
        self, node: int = 0, token: str = TOKEN, *, delivers_only: bool = False, echoes: bool = False
    ) -> subprocess.Popen[bytes]:
        arguments = [self.server.url, token, self.server.request.attempt_id, str(node), str(self.home(node))]
        arguments += ["delivers"] if delivers_only else []
        arguments += ["echoes"] if echoes else []
        pipe = subprocess.PIPE if echoes else None
        courier = subprocess.Popen([sys.executable, "-c", COURIER, *arguments], stdout=pipe, stderr=pipe)
        self._couriers.append(courier)
        return courier

    def deliver(self) -> dict[str, Any]:
        """Run one courier to its end; the exit that the server has."""
        assert self.courier().wait(PATIENCE_S) == 0
        end = self.server.exit()
        assert end is not None
        return end

    def close(self) -> None:
        for courier in self._couriers:
            courier.kill()
            courier.wait()
        self.server.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()


def eventually(found: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return value


def ended(pid: int) -> bool:
    return identity_of(pid) is None


def pid_in(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text().strip()))


def test_secrets_reach_the_ranks_and_no_file(site: Site) -> None:
    script = 'printf %s "$PASSWORD" | sha256sum; env'
    server = site.serve("sh", "-c", script, secrets={"PASSWORD": "secret:env.PASSWORD"})
    server.secrets = Secrets(environment={"PASSWORD": CANARY}, tokens={"scaidrive_token": f"token-{CANARY}"})
    during = []

    def look(method: str, path: str) -> None:
        during.extend(found for found in site.home().rglob("*") if found.is_file() and b"canary" in found.read_bytes())

    server.fault = look
    # The job's own output is its own: what it prints is kept.
    assert site.deliver()["reason"] == Reason.SUCCEEDED
    printed = site.server.stream(OUT).decode()
    assert hashlib.sha256(CANARY.encode()).hexdigest() in printed
    assert f"token-{CANARY}" not in printed
    assert {path.name for path in during} <= {"main.0.out"}
    assert sum(path.endswith("/secrets") for _, path in site.server.calls) == 1


def test_secret_that_the_server_does_not_hand_over_is_missed_by_name(site: Site) -> None:
    site.serve("true", secrets={"PASSWORD": "secret:env.PASSWORD"})
    end = site.deliver()
    assert (end["reason"], end["started_at"]) == (Reason.BAD_INPUT, None)
    assert "PASSWORD" in end["message"]


def records(site: Site, name: str) -> list[dict[str, Any]]:
    return read_lines(site.server.stream(name))[0]


def test_job_ends_with_everything_at_the_server(site: Site) -> None:
    site.serve("sh", "-c", "echo hello; echo oops >&2; printf no-newline")
    end = site.deliver()
    assert end["reason"] == Reason.SUCCEEDED
    assert site.server.stream(OUT) == b"hello\nno-newline"
    assert site.server.stream("nodes/0/logs/main.0.err") == b"oops\n"
    assert {name: size for name, size in end["streams"].items() if size} == dict(site.server.run.streams())
    assert {"claimed", "started", "rank_exited"} <= {record["type"] for record in records(site, "nodes/0/worker.jsonl")}
    assert site.server.run.document("nodes/0/beat.json") is not None
    uploads = [path for method, path in site.server.calls if method in ("POST", "PUT")]
    assert uploads[-1].endswith("/documents/nodes/0/exit.json")
    assert not site.home().exists()


def test_reports_without_an_end_do_not_fill_the_servers_disk(site: Site) -> None:
    site.serve("sh", "-c", 'truncate -s 20G "$TRAINMASTER_EVENTS_FILE" "$TRAINMASTER_METRICS_FILE"; echo done')
    assert site.deliver()["reason"] == Reason.SUCCEEDED
    sizes = dict(site.server.run.streams())
    assert {sizes[f"nodes/0/rank-0.{kind}.jsonl"] for kind in ("events", "metrics")} == {1 << 20}
    assert site.server.stream(OUT) == b"done\n"


def test_ranks_hold_a_token_of_their_own_and_cannot_find_the_attempts(site: Site) -> None:
    site.serve("sh", "-c", f'cat "$TRAINMASTER_TOKEN_FILE"; grep -rl {TOKEN[:-1]}[{TOKEN[-1]}] ../.. >&2')
    assert site.deliver()["exit_code"] == 1  # grep found nothing
    assert site.server.stream(OUT) == RANK_TOKEN.encode()
    assert site.server.stream("nodes/0/logs/main.0.err") == b""


def test_courier_whose_end_was_taken_in_leaves_when_it_asks_again(site: Site) -> None:
    site.serve("sh", "-c", "echo hello")
    exits = []

    def fault(method: str, path: str) -> str | int | None:
        if site.server.exit() is not None:
            return 410
        if path.endswith("/exit.json"):
            exits.append(path)
            return LOSE_ANSWER
        return None

    site.server.fault = fault
    assert site.deliver()["reason"] == Reason.SUCCEEDED
    assert len(exits) == 1
    assert site.server.stream(OUT) == b"hello\n"
    assert not site.home().exists()


def test_claim_names_the_courier(site: Site) -> None:
    site.serve("sh", "-c", 'while [ ! -e "$LEFT/go" ]; do sleep 0.05; done')
    courier = site.courier()
    claim = eventually(lambda: site.server.run.claimant(0))
    identity = identity_of(courier.pid)
    assert identity is not None
    assert {name: claim[name] for name in identity.to_json()} == identity.to_json()
    (site.left_by_ranks / "go").touch()
    assert courier.wait(PATIENCE_S) == 0


def test_node_that_another_claimed_is_left_alone(site: Site) -> None:
    site.serve("sh", "-c", 'touch "$LEFT/ran"')
    assert site.server.run.claim(0, {"nonce": "somebody else"})
    assert site.courier().wait(PATIENCE_S) == 0
    assert site.server.exit() is None
    assert not list(site.left_by_ranks.iterdir())
    assert not site.home().exists()


def test_courier_beside_another_in_the_same_directory_leaves(site: Site) -> None:
    site.serve("sh", "-c", 'echo run >> "$LEFT/runs"; while [ ! -e "$LEFT/go" ]; do sleep 0.05; done')
    first = site.courier()
    eventually((site.left_by_ranks / "runs").exists)
    assert site.courier().wait(PATIENCE_S) == 0
    (site.left_by_ranks / "go").touch()
    assert first.wait(PATIENCE_S) == 0
    assert (site.left_by_ranks / "runs").read_text() == "run\n"
    assert site.server.exit()["reason"] == Reason.SUCCEEDED  # type: ignore[index]


def test_courier_with_a_token_that_is_not_valid_leaves(site: Site) -> None:
    site.serve("sh", "-c", 'touch "$LEFT/ran"')
    assert site.courier(token="wrong").wait(PATIENCE_S) == 0
    assert not list(site.left_by_ranks.iterdir())


def test_server_that_comes_late_is_waited_for(site: Site) -> None:
    site.serve("sh", "-c", "echo hello", listen=False)
    courier = site.courier()
    eventually(site.home().exists)
    assert courier.poll() is None
    site.server.start()
    assert courier.wait(PATIENCE_S) == 0
    assert site.server.stream(OUT) == b"hello\n"


def test_server_away_in_the_middle_loses_nothing(site: Site) -> None:
    site.serve(
        "sh",
        "-c",
        'n=0; until [ -e "$LEFT/go" ]; do n=$((n+1)); echo line $n; echo $n > "$LEFT/count"; sleep 0.01; done',
    )
    courier = site.courier()
    eventually(lambda: len(site.server.stream(OUT)) > 100)
    site.server.stop()
    received = len(site.server.stream(OUT))
    count = site.left_by_ranks / "count"
    before = int(count.read_text() or 0)
    eventually(lambda: int(count.read_text() or 0) > before + 50)
    (site.left_by_ranks / "go").touch()
    # The worker has ended while the server is away.
    eventually((site.home() / "run" / "nodes" / "0" / "exit.json").exists)
    assert courier.poll() is None
    assert len(site.server.stream(OUT)) == received
    site.server.start()
    assert courier.wait(PATIENCE_S) == 0
    last = int(count.read_text())
    assert site.server.stream(OUT) == b"".join(b"line %d\n" % number for number in range(1, last + 1))
    assert site.server.exit()["reason"] == Reason.SUCCEEDED  # type: ignore[index]


@pytest.mark.parametrize("fault", [pytest.param(LOSE_REQUEST, marks=pytest.mark.long), LOSE_ANSWER, 503])
def test_requests_that_fail_are_repeated_without_doubling(site: Site, fault: str | int) -> None:
    site.serve("sh", "-c", "seq 1 2000; echo done >&2")
    seen: set[str] = set()

    def first_time_only(method: str, path: str) -> str | int | None:
        key = f"{method} {path}"
        if key in seen or "/control" in path:
            return None
        seen.add(key)
        return fault

    site.server.fault = first_time_only
    assert site.deliver()["reason"] == Reason.SUCCEEDED
    assert site.server.stream(OUT) == b"".join(b"%d\n" % number for number in range(1, 2001))
    assert len([record for record in records(site, "nodes/0/worker.jsonl") if record["type"] == "claimed"]) == 1


def test_stream_that_the_server_lost_in_part_is_sent_again_from_there(site: Site) -> None:
    site.serve("sh", "-c", 'seq 1 1000; until [ -e "$LEFT/go" ]; do sleep 0.02; done; seq 1001 2000')
    courier = site.courier()
    eventually(lambda: site.server.stream(OUT).endswith(b"\n1000\n"))
    os.truncate(site.server.run.path / OUT, 100)
    (site.left_by_ranks / "go").touch()
    assert courier.wait(PATIENCE_S) == 0
    assert site.server.stream(OUT) == b"".join(b"%d\n" % number for number in range(1, 2001))


def test_output_of_many_chunks_arrives_whole(site: Site) -> None:
    site.serve("sh", "-c", "head -c 5000000 /dev/zero")
    site.deliver()
    assert site.server.stream(OUT) == bytes(5_000_000)


def test_stop_comes_down_and_ends_the_job(site: Site) -> None:
    site.serve("sh", "-c", 'echo up; trap "exit 0" TERM; while true; do sleep 0.05; done')
    courier = site.courier()
    eventually(lambda: site.server.stream(OUT))
    site.server.control(Control(seq=1, stop=StopCause.CANCEL, grace_s=30))
    assert courier.wait(PATIENCE_S) == 0
    end = site.server.exit()
    assert end is not None
    assert (end["reason"], end["stop_cause"]) == (Reason.CANCELLED, StopCause.CANCEL)


def test_shipped_files_are_fetched(site: Site) -> None:
    content = b"#!/bin/sh\necho shipped\n"
    digest = hashlib.sha256(content).hexdigest()
    server = site.serve("./bin/tool", blobs=(BlobFile(sha256=digest, path="bin/tool", executable=True),))
    server.blobs[digest] = content
    assert site.deliver()["reason"] == Reason.SUCCEEDED
    assert server.stream(OUT) == b"shipped\n"


@pytest.mark.parametrize("held", [{}, {"a" * 64: b"not what it says"}])
def test_shipped_file_that_the_server_does_not_have_is_bad_input(site: Site, held: dict[str, bytes]) -> None:
    server = site.serve("sh", "-c", 'touch "$LEFT/ran"', blobs=(BlobFile(sha256="a" * 64, path="data"),))
    server.blobs.update(held)
    assert site.deliver()["reason"] == Reason.BAD_INPUT
    assert not list(site.left_by_ranks.iterdir())


def test_stop_while_shipped_files_are_fetched_ends_the_job(site: Site) -> None:
    server = site.serve("sh", "-c", 'touch "$LEFT/ran"', blobs=(BlobFile(sha256="a" * 64, path="data"),))
    server.fault = lambda method, path: 503 if "/blobs/" in path else None
    server.control(Control(seq=1, stop=StopCause.CANCEL))
    assert site.deliver()["reason"] == Reason.CANCELLED
    assert not list(site.left_by_ranks.iterdir())


def test_worker_that_is_killed_is_reported_lost_and_leaves_nothing_behind(site: Site) -> None:
    site.serve(
        "sh",
        "-c",
        'setsid sh -c "echo \\$\\$ > $LEFT/stray; sleep 1000" & echo before the end; echo $$ > $LEFT/rank; wait',
    )
    courier = site.courier()
    pids = [pid_in(site.left_by_ranks / "stray"), pid_in(site.left_by_ranks / "rank")]
    (worker,) = eventually(
        lambda: [record for record in records(site, "nodes/0/worker.jsonl") if record["type"] == "claimed"]
    )
    kill_claimant(worker)
    assert courier.wait(PATIENCE_S) == 0
    assert all(ended(pid) for pid in pids)
    end = site.server.exit()
    assert end is not None
    assert end["reason"] == Reason.WORKER_LOST
    assert "SIGKILL" in end["message"]
    assert (end["step"], end["stop_cause"]) == ("main", None)
    assert site.server.stream(OUT) == b"before the end\n"
    assert {name: size for name, size in end["streams"].items() if size} == dict(site.server.run.streams())


def test_courier_that_is_killed_takes_the_worker_along_and_another_delivers_the_rest(site: Site) -> None:
    site.serve(
        "sh", "-c", 'setsid sh -c "echo \\$\\$ > $LEFT/stray; sleep 1000" & seq 1 500; echo $$ > $LEFT/rank; wait'
    )
    site.server.fault = lambda method, path: 503 if "/streams/" in path else None
    courier = site.courier()
    pids = [pid_in(site.left_by_ranks / "stray"), pid_in(site.left_by_ranks / "rank")]
    courier.kill()
    courier.wait()
    eventually(lambda: ended(pids[1]))
    site.server.fault = lambda method, path: None
    end = site.deliver()
    assert end["reason"] == Reason.WORKER_LOST
    assert all(ended(pid) for pid in pids)
    assert site.server.stream(OUT) == b"".join(b"%d\n" % number for number in range(1, 501))
    assert not site.home().exists()


def test_attempt_that_the_server_no_longer_knows_is_ended(site: Site) -> None:
    site.serve("sh", "-c", "echo $$ > $LEFT/rank; exec sleep 1000")
    courier = site.courier()
    pid = pid_in(site.left_by_ranks / "rank")
    site.server.fault = lambda method, path: 404
    assert courier.wait(PATIENCE_S) == 0
    assert ended(pid)
    assert not site.home().exists()


def test_two_nodes_meet_where_the_first_one_says(site: Site) -> None:
    site.serve("sh", "-c", "echo $NODE_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT", nodes=2)
    couriers = [site.courier(1), site.courier(0)]
    assert [courier.wait(PATIENCE_S) for courier in couriers] == [0, 0]
    rendezvous = site.server.run.document(RENDEZVOUS)
    assert rendezvous is not None
    outputs = [site.server.stream(f"nodes/{node}/logs/main.{node}.out").decode().split() for node in (0, 1)]
    assert [output[:2] for output in outputs] == [["0", "2"], ["1", "2"]]
    assert outputs[0][2] == outputs[1][2]
    assert [site.server.exit(node)["reason"] for node in (0, 1)] == [Reason.SUCCEEDED] * 2  # type: ignore[index]


def test_service_is_announced_where_it_answers(site: Site) -> None:
    site.serve(
        sys.executable,
        "-c",
        "import http.server, os;"
        "http.server.HTTPServer(('127.0.0.1', int(os.environ['PORT'])),"
        " http.server.SimpleHTTPRequestHandler).serve_forever()",
        lifetime=Lifetime.SERVICE,
        port_environment="PORT",
        readiness=Readiness(),
    )
    courier = site.courier()
    endpoint = eventually(lambda: site.server.run.document("nodes/0/endpoint.json"))
    assert endpoint["port"] > 0
    site.server.control(Control(seq=1, stop=StopCause.CANCEL, grace_s=30))
    assert courier.wait(PATIENCE_S) == 0


CHECKPOINT = """
from trainmaster.jobs import NotOwnerError, report
with report.checkpoint(step=1) as directory:
    (directory / "weights").write_bytes(b"1")
open(report.output_dir() / "saved", "w").close()
while not report.save_requested(): pass
try:
    with report.checkpoint(step=2) as directory: pass
except NotOwnerError:
    report.finished()
"""


def test_checkpoints_are_committed_only_while_the_server_says_so(site: Site) -> None:
    site.serve(sys.executable, "-c", CHECKPOINT)
    courier = site.courier()
    eventually((site.root / "output" / "saved").exists)
    site.server.owner = False
    site.server.control(Control(seq=1, save=True))
    assert courier.wait(PATIENCE_S) == 0
    events = records(site, "nodes/0/rank-0.events.jsonl")
    assert [event["step"] for event in events if event["type"] == "checkpoint"] == [1]
    assert "finished" in [event["type"] for event in events]
    assert [path.name for path in (site.root / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert site.server.exit()["reason"] == Reason.SUCCEEDED  # type: ignore[index]


PAUSABLE = """
import time
from trainmaster.jobs import report
step = 0
while not (stop := report.stop_requested()):
    step += 1
    report.progress(step)
    time.sleep(0.01)
assert stop.save
with report.checkpoint(step=step) as directory:
    (directory / "weights").write_bytes(b"1")
report.exit_stopped()
"""


def test_pause_saves_before_the_job_leaves(site: Site) -> None:
    site.serve(sys.executable, "-c", PAUSABLE)
    courier = site.courier()
    eventually(lambda: records(site, "nodes/0/rank-0.metrics.jsonl"))
    site.server.control(Control(seq=1, stop=StopCause.PAUSE, save=True, grace_s=60))
    assert courier.wait(PATIENCE_S) == 0
    end = site.server.exit()
    assert end is not None
    assert (end["reason"], end["exit_code"]) == (Reason.PAUSED, EXIT_STOPPED)
    (saved,) = [event for event in records(site, "nodes/0/rank-0.events.jsonl") if event["type"] == "checkpoint"]
    assert records(site, "nodes/0/rank-0.metrics.jsonl")[-1]["step"] == saved["step"]


def test_directory_that_cannot_be_laid_out_is_reported(site: Site) -> None:
    site.serve("true")
    site.home().mkdir(parents=True)
    (site.home() / "blobs").write_text("in the way")
    end = site.deliver()
    assert end["reason"] == Reason.STORAGE_UNAVAILABLE
    assert not site.home().exists()


def test_courier_that_died_while_it_fetched_files_is_followed_by_an_end_and_no_second_run(site: Site) -> None:
    data = b"x"
    digest = hashlib.sha256(data).hexdigest()
    server = site.serve("touch", str(site.left_by_ranks / "ran"), blobs=(BlobFile(path="f", sha256=digest),))
    server.blobs[digest] = data
    asked = threading.Event()

    def hang(method: str, path: str) -> str | None:
        if path.startswith("/v1/blobs/"):
            asked.set()
            return LOSE_REQUEST
        return None

    server.fault = hang
    first = site.courier()
    assert asked.wait(PATIENCE_S)
    first.kill()
    first.wait()
    assert server.run.claimant(0) is not None
    server.fault = lambda method, path: None
    assert site.courier(delivers_only=True).wait(PATIENCE_S) == 0
    end = server.exit()
    assert end is not None
    assert end["reason"] == Reason.WORKER_LOST
    assert "never started" in end["message"]
    assert not (site.left_by_ranks / "ran").exists()


def test_courier_that_echoes_prints_what_the_first_rank_of_its_node_writes(site: Site) -> None:
    program = (
        "import os, sys; print('rank', os.environ['RANK'], flush=True); "
        "print('careful', file=sys.stderr); print('no end of line', end='')"
    )
    site.serve(sys.executable, "-c", program, ranks_per_node=2)
    courier = site.courier(echoes=True)
    out, err = courier.communicate(timeout=PATIENCE_S)
    assert courier.returncode == 0
    assert (out, err) == (b"rank 0\nno end of line", b"careful\n")
