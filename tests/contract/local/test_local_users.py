"""Jobs of accounts with a uid: they run as that user, have what is theirs, and reach nothing else."""

from __future__ import annotations

import functools
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainmaster
from job_server import NO_GPU, processes_marked
from local_servers import LocalServer, is_alive, over, serving
from process_signals import kill_claimant
from real_server import ENDED, wait_for
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.worker.cgroups import own_group
from warm_server import ForkedCommand

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as other users")

UIDS = {"vision": 61001, "speech": 61002}
SOURCE = Path(trainmaster.__file__).parents[1]

TRAINS = """
import os, sys, time
from trainmaster.jobs import report, verify

step = 0
if path := report.resume_path():
    step = verify(path).step
    assert (path / "state").read_text() == str(step)
print("begins at", step, "as", os.getuid(), flush=True)
(report.output_dir() / f"from-{step}").write_text("canary of " + sys.argv[1])
while True:
    step += 1
    report.metrics(step=step, loss=1 / step)
    stop = report.stop_requested()
    if stop or step == 3:
        with report.checkpoint(step=step) as directory:
            (directory / "state").write_text(str(step))
    if stop:
        report.exit_stopped()
    time.sleep(0.01)
"""

STUBBORN = """
import os, signal, subprocess, sys, time

WAIT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [
    subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, start_new_session=True, env=environment)
    for environment in (None, {})
]
assert all(child.stdout.readline() == b"up\\n" for child in children)
print("family", os.getpid(), *(child.pid for child in children), flush=True)
while True:
    time.sleep(600)
"""

PROBE = """
import json, os, signal
from pathlib import Path

given = json.loads(Path("given.json").read_text())
own = Path(os.environ["TRAINMASTER_EVENTS_FILE"]).parents[2]
mine = {os.environ["TRAINMASTER_" + name] for name in ("EVENTS_FILE", "METRICS_FILE", "TOKEN_FILE")}
mine.add(os.environ.get("TRAINMASTER_OWNER_FILE"))
hidden = [own, own.parent, own.parent / "owner.json", own / "nodes"]
hidden += [own / name for name in ("request.json", "control.json", "claims", "claims/0.json")]
of_node = ("", "worker.jsonl", "beat.json", "logs", ".reserve", "logs/main.0.out.times")
hidden += [own / "nodes" / "0" / name for name in of_node]
done = []

def tries(what, act, *arguments):
    try:
        act(*arguments)
    except OSError:
        return
    done.append([what, *map(str, arguments)])

for path in [*given["paths"], *map(str, hidden)]:
    if path in mine:
        continue
    tries("read", lambda path: os.close(os.open(path, os.O_RDONLY)), path)
    tries("write", lambda path: os.close(os.open(path, os.O_WRONLY)), path)
    tries("list", os.listdir, path)
    tries("make", os.mkdir, path + "/planted")
    tries("link", os.symlink, "/etc", path + "/planted")
    tries("chmod", os.chmod, path, 0o777)
    tries("rename", os.rename, path, path + ".moved")
    tries("replace", os.rename, "given.json", path)
for pid in given["pids"]:
    tries("signal", os.kill, pid, 0)
    for name in ("environ", "mem"):
        tries("look", open, f"/proc/{pid}/{name}")
    for name in ("fd", "cwd", "root"):
        tries("look", os.listdir, f"/proc/{pid}/{name}")
for path in ("/etc/shadow", "/root"):
    tries("read", os.listdir if os.path.isdir(path) else open, path)
tries("root", os.setuid, 0)
tries("root", os.setgid, 0)
tries("root", os.setgroups, [])
print(json.dumps({"tried": len(given["paths"]), "done": done}), flush=True)
"""


class Tenant(LocalServer):
    """One account of a server, seen through its own key."""

    key = ""

    def __init__(self, server: LocalServer, account: str, uid: int) -> None:
        self.directory, self.url, self.transport = server.directory, server.url, server.transport
        self.account, self.uid = account, uid
        server.data("POST", "/v1/accounts", {"account_id": account, "uid": uid})
        body = {"account_id": account, "name": "test", "scopes": ["view", "manage"]}
        self.key = server.data("POST", "/v1/keys", body)["key"]

    def run(self, text: str, *arguments: str, files: dict[str, bytes] | None = None, **document: Any) -> str:
        """Submit a Python program that is shipped with the job; its id."""
        shipped = {"program.py": text.encode(), **(files or {})}
        workload = {
            "path": "program.py",
            "args": list(arguments),
            "interpreter": [interpreter()],
            "files": [{"path": path, "sha256": self.upload_files(content)} for path, content in shipped.items()],
            "environment": {"PYTHONPATH": str(SOURCE)},
            "grace_period_s": 0.5,
        }
        return self.submit_workload("script", workload, **document)

    def cancel_all(self) -> None:
        """End what still runs."""
        for job in self.data("GET", "/v1/jobs?page_size=100")["jobs"]:
            if job["status"] not in (*ENDED, "PAUSED"):
                self.ask("POST", f"/v1/jobs/{job['job_id']}/cancel")
                self.until(job["job_id"], *ENDED, "PAUSED")


@functools.cache
def interpreter() -> str:
    """A Python that any user may run: the one of this environment may lie in somebody's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if subprocess.run(check, user=61001, group=61001, extra_groups=[], check=False, cwd="/").returncode == 0:
                return python
        except OSError:
            continue
    pytest.skip("no Python here can be run by another user")


@pytest.fixture(scope="module")
def ground() -> Iterator[Path]:
    """A directory that every user may pass through; those of pytest are closed."""
    directory = Path(tempfile.mkdtemp(prefix="trainmaster-users-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def shared_server(transport: str, ground: Path) -> Iterator[LocalServer]:
    with serving(ground / transport / "data", transport, "--data-root", str(ground)) as server:
        (ground / transport).chmod(0o711)
        yield server


@pytest.fixture(scope="module")
def tenants(shared_server: LocalServer) -> dict[str, Tenant]:
    return {account: Tenant(shared_server, account, uid) for account, uid in UIDS.items()}


@pytest.fixture
def vision(server: LocalServer, tenants: dict[str, Tenant]) -> Iterator[Tenant]:
    yield tenants["vision"]
    tenants["vision"].cancel_all()


@pytest.fixture
def speech(server: LocalServer, tenants: dict[str, Tenant]) -> Iterator[Tenant]:
    yield tenants["speech"]
    tenants["speech"].cancel_all()


def owner_and_mode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_uid, stat.S_IMODE(status.st_mode)


def test_job_runs_as_the_user_of_its_account(vision: Tenant) -> None:
    program = 'id -u; id -G; echo "$HOME" "$USER" "$LOGNAME"; umask; pwd; echo again > /dev/stderr; echo > made'
    job_id = vision.submit("sh", "-c", program, resource_config={**NO_GPU, "node_count": 2})
    vision.until(job_id, "COMPLETED")
    for rank in range(2):
        uid, groups, login, umask, directory = vision.lines(job_id, rank=rank, stream="stdout")
        assert (uid, umask) == ("61001", "0077")
        primary, of_the_attempt = groups.split()
        assert primary == "65534"
        assert int(of_the_attempt) == vision.run_directory(job_id).request().group
        assert login.split() == [directory, "61001", "61001"]
        assert vision.lines(job_id, rank=rank, stream="stderr") == ["again"]


def test_user_whom_the_system_knows_has_its_groups_and_its_home(server: LocalServer) -> None:
    known = pwd.getpwnam("daemon")
    tenant = Tenant(server, "daemons", known.pw_uid)
    job_id = tenant.submit("sh", "-c", 'id -un; id -g; echo "$HOME $USER"')
    tenant.until(job_id, "COMPLETED")
    assert tenant.lines(job_id) == ["daemon", str(known.pw_gid), f"{known.pw_dir} daemon"]


def test_paused_job_goes_on_from_its_own_checkpoint(vision: Tenant) -> None:
    job_id = vision.run(TRAINS, "vision")
    wait_for(lambda: vision.job(job_id)["can_save"], "it to say that it saves")
    wait_for(lambda: vision.job(job_id)["checkpoints"], "a checkpoint")
    vision.control(job_id, "pause")
    saved = max(checkpoint["step"] for checkpoint in vision.until(job_id, "PAUSED")["checkpoints"])
    vision.control(job_id, "resume")
    wait_for(lambda: len(vision.job(job_id)["attempts"]) == 2, "the second attempt")
    first = wait_for(lambda: vision.lines(job_id, attempt="2"), "the second attempt's first line")[0]
    assert first == f"begins at {saved} as 61001"
    vision.control(job_id, "pause")
    job = vision.until(job_id, "PAUSED")
    assert [attempt["reason"] for attempt in job["attempts"]] == ["PAUSED", "PAUSED"]
    paths = [file["path"] for file in vision.data("GET", f"/v1/jobs/{job_id}/artifacts")["artifacts"]]
    assert f"output/from-{saved}" in paths
    assert sum(path.endswith("/state") for path in paths) == len(job["checkpoints"])
    artifacts = vision.directory / "artifacts" / job_id
    assert owner_and_mode(artifacts) == (0, 0o711)
    for name in ("checkpoints", "output"):
        assert owner_and_mode(artifacts / name) == (61001, 0o700)


CLASS = """
import os
from trainmaster.jobs import RestoreableJob

class Count(RestoreableJob):
    step = 0

    @property
    def done(self):
        return self.step >= 3

    def run(self):
        while not self.done:
            self.step += 1
            self.save_tree_and_metadata(str(self.step), {"step": self.step}, {})
            self.register(str(self.step))
        print("ran as", os.getuid(), flush=True)

    def restore_from_path(self, rel_path):
        self.step = self.get_tree_and_metadata_from_path(rel_path, {"step": 0})[0]["step"]
"""


def test_job_classes_of_accounts_keep_their_checkpoints_apart(vision: Tenant, speech: Tenant) -> None:
    if interpreter() != sys.executable:
        pytest.skip("the Python of this environment cannot be run by another user")
    for tenant in (vision, speech):
        workload = {
            "target": "counts:Count",
            "files": [{"path": "counts.py", "sha256": tenant.upload_files(CLASS.encode())}],
            "environment": {"PYTHONPATH": str(SOURCE)},
        }
        for lines in ([f"ran as {tenant.uid}"], []):
            job_id = tenant.submit_workload("job_class", workload, name="count")
            tenant.until(job_id, "COMPLETED")
            assert [line for line in tenant.lines(job_id) if line.startswith("ran as")] == lines
        home = tenant.directory / "artifacts" / "classes" / tenant.account
        assert owner_and_mode(home) == (tenant.uid, 0o700)
        assert owner_and_mode(home.parent) == (0, 0o711)
        assert sorted(path.parent.name for path in home.rglob("manifest.json")) == ["1", "2", "3"]


FORGES = """
import json, os, sys
from pathlib import Path

given = json.loads(Path("given.json").read_text())
record = json.dumps({"type": "checkpoint", "t": 1.0, "checkpoint_id": "forged", "step": 1, "path": given["checkpoint"]})
done = []

def tries(what, path, act):
    try:
        act(path)
    except OSError:
        return
    done.append([what, path])

def forge(path):
    with open(path, "a") as file:
        file.write(record + "\\n")

for path in given["files"]:
    tries("read", path, lambda path: open(path).read())
    tries("write", path, forge)
for path in given["directories"]:
    tries("list", path, os.listdir)
    tries("plant", path, lambda path: os.mkdir(path + "/planted"))
for pid in given["pids"]:
    for number in range(64):
        if os.path.realpath(f"/proc/{pid}/fd/{number}").startswith(given["run_dir"]):
            tries("reopen", f"/proc/{pid}/fd/{number}", forge)
print(json.dumps(done), flush=True)
"""


@over("files")
def test_job_cannot_report_in_the_name_of_another_job_of_its_account(vision: Tenant) -> None:
    other = vision.run(TRAINS, "vision")
    wait_for(lambda: vision.job(other)["checkpoints"], "a checkpoint")
    before = vision.job(other)["checkpoints"]
    run = vision.run_directory(other).path
    node = run / "nodes" / "0"
    files = [node / name for name in ("rank-0.events.jsonl", "rank-0.metrics.jsonl", "token", "logs/main.0.out")]
    assert all(path.exists() for path in files)
    given = {
        "files": [*map(str, files), str(run.parent / "owner.ranks.json")],
        "directories": [str(run / "work"), *(str(node / name) for name in ("inputs", "prepared"))],
        "pids": [*vision.rank_pids(other).values()],
        "run_dir": str(run),
        "checkpoint": str(vision.directory / "artifacts" / other / "checkpoints" / "forged"),
    }
    forger = vision.run(FORGES, files={"given.json": json.dumps(given).encode()})
    vision.until(forger, "COMPLETED")
    assert json.loads(vision.lines(forger)[-1]) == []
    vision.control(other, "pause")
    after = vision.until(other, "PAUSED")["checkpoints"]
    assert {each["checkpoint_id"] for each in before} <= {each["checkpoint_id"] for each in after}
    assert "forged" not in {each["checkpoint_id"] for each in after}


@over("files")
def test_attempt_that_lost_its_job_cannot_commit(vision: Tenant) -> None:
    program = """
import os, pathlib, sys, time
from trainmaster.jobs import NotOwnerError, report
print("up", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
try:
    with report.checkpoint(step=1):
        pass
except NotOwnerError:
    print("refused", flush=True)
"""
    job_id = vision.run(program)
    vision.wait_for_line(job_id, "up")
    rank = vision.rank_pids(job_id)[0]
    # As the launch of a later attempt does.
    directory = vision.run_directory(job_id)
    later = AttemptRequest.from_json({**directory.request().to_json(), "attempt": 2, "rank_token": "another"})
    RunDirectory(directory.path.with_name("2")).create(later)
    Path(f"/proc/{rank}/cwd/go").touch()
    vision.until(job_id, "COMPLETED")
    assert vision.lines(job_id, attempt="1") == ["up", "refused"]


def paths_below(directory: Path, seen_through: Path) -> list[str]:
    """All paths below a directory, as they are called there, with the directory itself."""
    found = [str(directory)]
    for parent, directories, files in os.walk(seen_through):
        found += [str(directory / Path(parent, name).relative_to(seen_through)) for name in (*directories, *files)]
    return found


def test_job_reaches_neither_the_server_nor_another_account(server: LocalServer, vision: Tenant, ground: Path) -> None:
    program = 'echo canary > "$TRAINMASTER_OUTPUT_DIR/out"; mkdir "$TRAINMASTER_CHECKPOINT_DIR/c"; echo up; sleep 600'
    of_default = server.submit("sh", "-c", f"umask 000; {program}")
    server.wait_for_line(of_default, "up")
    running = vision.run(TRAINS, "vision")
    wait_for(lambda: vision.job(running)["checkpoints"], "a checkpoint")
    ended = vision.submit("sh", "-c", program.removesuffix("; sleep 600"))
    vision.until(ended, "COMPLETED")
    server.upload_files(b"a blob of the default account")

    fork_server = server._fork_server_pid()
    assert server.process is not None
    assert fork_server is not None
    pids = {
        server.process.pid,
        fork_server,
        *vision.rank_pids(running).values(),
        *server.rank_pids(of_default).values(),
    }
    for job_id in (running, of_default):
        claimant = server.run_directory(job_id).claimant(0)
        assert claimant is not None
        pids.add(claimant["pid"])
    directory = server.directory
    paths = {*paths_below(directory, directory), *paths_below(directory, Path(f"/proc/{fork_server}/root{directory}"))}
    assert any(path.endswith("/state") for path in paths)
    given = json.dumps({"paths": sorted(paths), "pids": sorted(pids)}).encode()

    stranger = Tenant(server, "stranger", 61003)  # what others left is not its own
    job_id = stranger.run(PROBE, files={"given.json": given})
    stranger.until(job_id, "COMPLETED")
    (line,) = stranger.lines(job_id, stream="stdout")
    answer = json.loads(line)
    assert answer["tried"] == len(paths)
    assert answer["done"] == []
    assert not list(ground.rglob("planted"))


def test_other_accounts_files_cannot_be_had_or_removed_through_the_server(
    server: LocalServer, vision: Tenant, speech: Tenant
) -> None:
    theirs = vision.submit("sh", "-c", 'echo canary > "$TRAINMASTER_OUTPUT_DIR/out"; echo canary')
    vision.until(theirs, "COMPLETED")
    wanted = vision.directory / "artifacts" / theirs / "output"
    plants = """
import json, os, pathlib, sys
wanted, runs = map(pathlib.Path, sys.argv[1:])
checkpoints, output = (pathlib.Path(os.environ[f"TRAINMASTER_{name}_DIR"]) for name in ("CHECKPOINT", "OUTPUT"))
(output / "file").symlink_to(wanted / "out")
(output / "directory").symlink_to(wanted)
(output / "device").symlink_to("/dev/zero")
(checkpoints / "link").symlink_to(wanted)
(checkpoints / "above").symlink_to(wanted.parent)
(checkpoints / "mine").mkdir()
(checkpoints / "mine" / "manifest.json").symlink_to(wanted / "out")
(checkpoints / "mine" / "state").write_text("mine")
paths = [checkpoints / "link", checkpoints / "above" / "output", checkpoints / "mine", wanted, runs, checkpoints]
with open(os.environ["TRAINMASTER_EVENTS_FILE"], "a") as events:
    for number, path in enumerate(paths):
        record = {"type": "checkpoint", "checkpoint_id": f"c{number}", "step": number, "path": str(path)}
        events.write(json.dumps(record) + "\\n")
"""
    job_id = speech.run(plants, str(wanted), str(vision.run_directory(theirs).path))
    job = speech.until(job_id, "COMPLETED")
    assert {checkpoint["checkpoint_id"] for checkpoint in job["checkpoints"]} == {"c0", "c2"}
    listed = speech.data("GET", f"/v1/jobs/{job_id}/artifacts")["artifacts"]
    assert [file["path"] for file in listed] == ["checkpoints/c2/state"]
    for path in (
        "output/file",
        "output/directory/out",
        "output/device",
        "checkpoints/c0/out",
        "checkpoints/c2/manifest.json",
    ):
        assert speech.ask("GET", f"/v1/jobs/{job_id}/artifacts/{path}").status_code == 404
    assert speech.ask("GET", f"/v1/jobs/{job_id}/artifacts/checkpoints/c2/state").text == "mine"

    speech.data("DELETE", f"/v1/jobs/{job_id}/checkpoints/c0")
    server.data("POST", "/v1/gc")
    planted = speech.directory / "artifacts" / job_id / "checkpoints" / "link"
    wait_for(lambda: not planted.is_symlink(), "the checkpoint to be removed")
    assert (wanted / "out").read_text() == "canary\n"
    assert vision.lines(theirs) == ["canary"]


def test_cancelled_job_that_ignores_signals_leaves_no_process(vision: Tenant) -> None:
    job_id = vision.run(STUBBORN)
    pids = [int(pid) for pid in vision.wait_for_line(job_id, "family").split()[1:]]
    vision.control(job_id, "cancel")
    vision.until(job_id, "CANCELLED")
    assert not any(is_alive(pid) for pid in pids)
    assert not processes_marked(job_id)


@pytest.mark.skipif(own_group() is None, reason="needs a cgroup that we may write to")
def test_killed_worker_takes_its_ranks_along_and_strays_are_swept(vision: Tenant) -> None:
    job_id = vision.run(STUBBORN, scheduling_config={"max_retries": 1})
    pids = [int(pid) for pid in vision.wait_for_line(job_id, "family").split()[1:]]
    # One of them dropped its environment: until the worker has moved it, nothing tells whose it is.
    group = f"trainmaster-{job_id}.1.0"
    wait_for(lambda: all(group in Path(f"/proc/{pid}/cgroup").read_text() for pid in pids), "their move")
    kill_claimant(vision.run_directory(job_id).claimant(0))
    vision.rank_pids(job_id, attempt=2)
    assert not any(is_alive(pid) for pid in pids)
    (first,) = [attempt for attempt in vision.job(job_id)["attempts"] if attempt["number"] == 1]
    assert first["reason"] == "WORKER_LOST"


def test_directory_that_the_user_cannot_pass_through_is_named(vision: Tenant, ground: Path) -> None:
    closed = ground / "closed"
    (closed / "inside").mkdir(parents=True, exist_ok=True)
    closed.chmod(0o700)
    workload = {"argv": ["true"], "working_directory": str(closed / "inside")}
    job = vision.until(vision.submit_workload("command", workload), "FAILED")
    assert job["error_type"] == "BAD_INPUT"
    assert str(closed / "inside") in job["error_message"]
    parent = vision.directory.parent
    parent.chmod(0o700)
    try:
        job = vision.until(vision.submit("true"), "FAILED")
    finally:
        parent.chmod(0o711)
    assert f"chmod o+x {parent}" in job["error_message"]


def test_account_that_would_run_as_root_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[accounts.vision]\nuid = 0\n")
    with open(tmp_path / "said", "w+") as said:
        started = ForkedCommand(["serve", "--port", "0", "--data-dir", str(tmp_path)], env=os.environ, stderr=said)
        with started.stdout:
            assert started.stdout.read() == ""
        assert started.wait() != 0
        said.seek(0)
        assert "would run as root" in said.read()


SERVES_LATER = """
import http.server, os, pathlib, time
print(os.environ["PORT"], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(os.environ["PORT"]), bind="127.0.0.1")
"""

SQUATS = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    connection, _ = listener.accept()
    with connection:
        data = connection.recv(4096)
        print("received", data, flush=True)
        if data:
            connection.send(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
"""


@over("files")
def test_service_on_whose_port_another_account_listens_is_not_ready(vision: Tenant, speech: Tenant) -> None:
    service = vision.submit_workload("service", {"argv": [interpreter(), "-c", SERVES_LATER]})
    (port,) = wait_for(lambda: vision.lines(service), "its port")
    squatter = speech.submit(interpreter(), "-c", SQUATS, port)
    # Connected to again and again, and sent nothing.
    lines = wait_for(lambda: len(found := speech.lines(squatter)) >= 3 and found, "three connections")
    assert set(lines) == {"received b''"}
    assert vision.job(service)["endpoint"] is None
    speech.cancel_all()
    (rank,) = vision.rank_pids(service).values()
    Path(f"/proc/{rank}/cwd/go").touch()
    vision.until(service, "TRAINING")
    assert vision.ask("GET", f"/v1/jobs/{service}/proxy/").status_code == 200
