"""A worker runs what it is told, once, and tells all about it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest
from worker_attempts import Attempts, is_running, wait_for

from trainmaster.protocol.launch import BlobFile, LaunchStep
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.run_directory import exit_document, log_stream
from trainmaster.protocol.sockets import HintListener

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


def test_worker_command_that_ends_well_succeeds(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "echo hello; echo oops >&2")
    ended = attempt.run()
    assert (ended["reason"], ended["exit_code"], ended["step"]) == (Reason.SUCCEEDED, 0, "run")
    assert ended["started_at"] <= ended["ended_at"]
    assert (attempt.log(), attempt.log(channel="err")) == ("hello\n", "oops\n")


def test_worker_records_tell_the_whole_life(attempts: Attempts) -> None:
    attempt = attempts("true")
    attempt.run()
    claimed, started, exited = (attempt.record(kind) for kind in ("claimed", "started", "rank_exited"))
    claim = attempt.directory.claimant(0)
    assert claim is not None
    assert (claimed["pid"], claimed["start_time"]) == (claim["pid"], claim["start_time"])
    assert [rank["rank"] for rank in started["ranks"]] == [0]
    assert (exited["rank"], exited["exit_code"], exited["signal"]) == (0, 0, None)
    assert attempt.record("step_started")["step"] == "run"
    assert attempt.record("staged")


def test_worker_output_is_kept_byte_for_byte(attempts: Attempts) -> None:
    code = "import os; data = bytes(range(256)) * 64\nfor _ in range(256): os.write(1, data); os.write(2, data[::-1])"
    attempt = attempts.python(code)
    ended = attempt.run()
    data = bytes(range(256)) * 64
    for channel, expected in (("out", data * 256), ("err", data[::-1] * 256)):
        stream = log_stream(0, "run", 0, channel)
        assert (attempt.path / stream).read_bytes() == expected
        assert ended["streams"][stream] == len(expected)
    assert ended["streams"] == dict(attempt.directory.streams())


def test_worker_log_times_cover_the_whole_log(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "echo first; read line < fifo; echo second")
    (attempt.path / "work").mkdir()
    os.mkfifo(attempt.path / "work" / "fifo")
    attempt.start()
    times = attempt.path / (log_stream(0, "run", 0, "out") + ".times")
    wait_for(lambda: times.exists() and times.read_text())
    (attempt.path / "work" / "fifo").write_text("go on\n")
    attempt.ended()
    entries = [(float(line.split()[0]), int(line.split()[1])) for line in times.read_text().splitlines()]
    assert [offset for _, offset in entries] == [len("first\n"), len("first\nsecond\n")]
    assert entries == sorted(entries)


def test_worker_second_claimant_runs_nothing(attempts: Attempts, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    attempt = attempts("sh", "-c", f"echo ran >> {witness}")
    workers = [attempt.start() for _ in range(5)]
    attempt.ended()
    wait_for(lambda: not any(map(is_running, workers)))
    assert witness.read_text() == "ran\n"
    assert len(attempt.records("claimed")) == 1


def test_worker_of_revoked_attempt_touches_nothing(attempts: Attempts, tmp_path: Path) -> None:
    attempt = attempts("touch", os.fspath(tmp_path / "witness"))
    assert attempt.directory.claim(0, {"nonce": "server", "revoked": True})
    worker = attempt.start()
    wait_for(lambda: not is_running(worker))
    assert not (tmp_path / "witness").exists()
    assert list(attempt.directory.streams()) == []
    assert attempt.directory.document(exit_document(0)) is None


def test_worker_without_run_directory_ends_quietly(attempts: Attempts, tmp_path: Path) -> None:
    answer = attempts.fork_server.ask(op="start", run_dir=os.fspath(tmp_path / "nowhere"), node=0)
    wait_for(lambda: not is_running(answer["pid"]))
    assert not (tmp_path / "nowhere").exists()


def test_worker_request_of_unknown_version_is_refused(attempts: Attempts) -> None:
    attempt = attempts("true")
    document = json.loads((attempt.path / "request.json").read_text())
    (attempt.path / "request.json").write_text(json.dumps({**document, "version": 99}))
    ended = attempt.run()
    assert ended["reason"] == Reason.LAUNCH_REFUSED
    assert "99" in ended["message"]


def test_worker_ranks_see_what_torchrun_would_set(attempts: Attempts) -> None:
    attempt = attempts.python(PRINT_ENVIRONMENT, ranks_per_node=2, gpus=("4", "GPU-7"), resume_from="/ckpt/5")
    attempt.run()
    seen = [json.loads(attempt.log(rank)) for rank in range(2)]
    for rank, variables in enumerate(seen):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "4,GPU-7",
            "TRAINMASTER_JOB_ID": attempt.request.job_id,
            "TRAINMASTER_ATTEMPT": "1",
            "TRAINMASTER_ATTEMPT_ID": attempt.request.attempt_id,
            "TRAINMASTER_RESUME_FROM": "/ckpt/5",
            "TRAINMASTER_OWNER_FILE": attempt.request.owner_file,
        }
        assert {name: variables.get(name) for name in expected} == expected
        assert Path(variables["TRAINMASTER_TOKEN_FILE"]).read_text() == attempt.request.rank_token
        assert Path(variables["TRAINMASTER_OUTPUT_DIR"]).is_dir()
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert seen[0]["TRAINMASTER_EVENTS_FILE"] != seen[1]["TRAINMASTER_EVENTS_FILE"]


def test_worker_environment_is_the_fork_servers_with_the_jobs_on_top(attempts: Attempts) -> None:
    attempt = attempts.python(PRINT_ENVIRONMENT, environment={"COLOR": "blue", "CUDA_VISIBLE_DEVICES": "0"})
    attempt.run()
    variables = json.loads(attempt.log())
    assert (variables["FROM_THE_SERVER"], variables["COLOR"], variables["PYTHONUNBUFFERED"]) == ("yes", "blue", "1")
    # What the node was not given it does not see, whatever the job says.
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "TRAINMASTER_LEFT_OVER" not in variables
    assert "TRAINMASTER_RESUME_FROM" not in variables


def test_worker_rank_inherits_no_descriptor_and_no_ignored_signal(attempts: Attempts) -> None:
    code = (
        "import os, signal\n"
        "print(sorted(os.listdir('/proc/self/fd'), key=int)[:-1])\n"
        "ignored = next(l for l in open('/proc/self/status') if l.startswith('SigIgn'))\n"
        "blocked = next(l for l in open('/proc/self/status') if l.startswith('SigBlk'))\n"
        "print(os.getsid(0) == os.getpid(), int(blocked.split()[1], 16))\n"
        "print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGCHLD).name)\n"
        "print(os.readlink('/proc/self/fd/0'))\n"
    )
    attempt = attempts.python(code)
    attempt.run()
    assert attempt.log().splitlines() == ["['0', '1', '2']", "True 0", "SIG_DFL SIG_DFL", "/dev/null"]


def test_worker_runs_in_a_fresh_working_directory(attempts: Attempts) -> None:
    attempt = attempts("sh", "-c", "pwd; ls -A")
    attempt.run()
    assert attempt.log() == f"{attempt.path / 'work'}\n"


def test_worker_named_working_directory_is_used(attempts: Attempts, tmp_path: Path) -> None:
    attempt = attempts("pwd", working_directory=os.fspath(tmp_path))
    attempt.run()
    assert attempt.log() == f"{tmp_path}\n"


def test_worker_missing_working_directory_is_bad_input(attempts: Attempts, tmp_path: Path) -> None:
    attempt = attempts("true", working_directory=os.fspath(tmp_path / "missing"))
    ended = attempt.run()
    assert ended["reason"] == Reason.BAD_INPUT
    assert os.fspath(tmp_path / "missing") in ended["message"]


def test_worker_places_shipped_files(attempts: Attempts, tmp_path: Path) -> None:
    script = b"#!/bin/sh\ncat data/words.txt\n"
    words = b"one two\n"
    for content in (script, words):
        (tmp_path / hashlib.sha256(content).hexdigest()).write_bytes(content)
    attempt = attempts(
        "./go.sh",
        blob_dir=tmp_path,
        blobs=(
            BlobFile(sha256=hashlib.sha256(script).hexdigest(), path="go.sh", executable=True),
            BlobFile(sha256=hashlib.sha256(words).hexdigest(), path="data/words.txt"),
        ),
    )
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "one two\n"
    assert sorted(os.listdir(attempt.path / "work")) == ["data", "go.sh"]


@pytest.mark.parametrize("content", [b"something else", None], ids=["wrong", "missing"])
def test_worker_shipped_file_that_is_not_right_is_bad_input(
    attempts: Attempts, tmp_path: Path, content: bytes | None
) -> None:
    digest = hashlib.sha256(b"what was shipped").hexdigest()
    if content is not None:
        (tmp_path / digest).write_bytes(content)
    attempt = attempts("true", blob_dir=tmp_path, blobs=(BlobFile(sha256=digest, path="data.bin"),))
    ended = attempt.run()
    assert ended["reason"] == Reason.BAD_INPUT
    assert "data.bin" in ended["message"]
    assert attempt.records("started") == []
    assert os.listdir(attempt.path / "work") == []


def test_worker_preparing_steps_run_once_each_before_all_ranks(attempts: Attempts) -> None:
    attempt = attempts(
        steps=(
            LaunchStep(name="fetch", argv=("sh", "-c", "echo fetched >> story; echo fetching")),
            LaunchStep(name="convert", argv=("sh", "-c", "echo converted >> story")),
            LaunchStep(name="run", argv=("sh", "-c", "cat story")),
        ),
        ranks_per_node=2,
    )
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log(0) == attempt.log(1) == "fetched\nconverted\n"
    assert attempt.log(step="fetch") == "fetching\n"
    assert [record["step"] for record in attempt.records("step_started")] == ["fetch", "convert", "run"]


def test_worker_python_step_runs_with_its_own_interpreter(attempts: Attempts) -> None:
    attempt = attempts.python("import sys; print(sys.executable)")
    attempt.run()
    assert attempt.log() == f"{sys.executable}\n"


def test_worker_gang_of_two_nodes_meets_where_node_0_says(attempts: Attempts) -> None:
    attempt = attempts.python(PRINT_ENVIRONMENT, nodes=2, ranks_per_node=2)
    attempt.start(1)
    attempt.record("staged", 1)
    attempt.start(0)
    assert {attempt.ended(node)["reason"] for node in range(2)} == {Reason.SUCCEEDED}
    seen = {
        (node, rank): json.loads(attempt.log(rank, node=node)) for node in range(2) for rank in (2 * node, 2 * node + 1)
    }
    assert [(v["RANK"], v["LOCAL_RANK"], v["NODE_RANK"], v["WORLD_SIZE"]) for v in seen.values()] == [
        ("0", "0", "0", "4"),
        ("1", "1", "0", "4"),
        ("2", "0", "1", "4"),
        ("3", "1", "1", "4"),
    ]
    assert len({(v["MASTER_ADDR"], v["MASTER_PORT"]) for v in seen.values()}) == 1


def test_worker_beats_while_it_lives(attempts: Attempts) -> None:
    attempt = attempts("sleep", "600")
    attempt.start()
    first = wait_for(lambda: attempt.directory.document("nodes/0/beat.json"))
    later = wait_for(
        lambda: (beat := attempt.directory.document("nodes/0/beat.json")) and beat["seq"] > first["seq"] and beat
    )
    assert later["t"] > first["t"]


def test_worker_hints_at_start_events_and_exit(attempts: Attempts) -> None:
    # A socket's path must be short.
    path = Path(f"/tmp/tm-hints-{os.getpid()}-{os.urandom(4).hex()}")
    listener = HintListener(path)
    try:
        code = (
            "import os; input_ = open('fifo')\n"
            'open(os.environ[\'TRAINMASTER_EVENTS_FILE\'], \'a\').write(\'{"type": "note", "message": "hi"}\\n\')\n'
            "input_.read()\n"
        )
        attempt = attempts.python(code, hint_socket=path)
        (attempt.path / "work").mkdir()
        os.mkfifo(attempt.path / "work" / "fifo")
        attempt.start()
        assert wait_for(listener.drain, "the hint at the start") == {attempt.request.attempt_id}
        with open(attempt.path / "work" / "fifo", "w"):
            assert wait_for(listener.drain, "the hint of an event") == {attempt.request.attempt_id}
        attempt.ended()
        assert wait_for(listener.drain, "the hint at the exit") == {attempt.request.attempt_id}
    finally:
        listener.close()
