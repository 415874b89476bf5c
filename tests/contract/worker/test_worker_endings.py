"""What a worker makes of the way its processes end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from worker_attempts import Attempts, wait_for

from trainmaster.protocol.launch import LaunchStep
from trainmaster.protocol.reasons import Reason
from trainmaster.worker.cgroups import own_group


def test_worker_exit_code_is_a_failure_with_its_last_lines(attempts: Attempts) -> None:
    ended = attempts("sh", "-c", "seq 30 >&2; exit 3").run()
    assert (ended["reason"], ended["exit_code"], ended["rank"], ended["signal"]) == (Reason.EXITED_NONZERO, 3, 0, None)
    assert ended["evidence"]["last_lines"] == [str(number) for number in range(11, 31)]
    assert "code 3" in ended["message"]


def test_worker_python_failure_names_its_frame(attempts: Attempts) -> None:
    ended = attempts.python("def train():\n    raise ValueError('bad learning rate')\ntrain()").run()
    assert ended["reason"] == Reason.EXITED_NONZERO
    assert ended["evidence"]["frame"] == 'File "<string>", line 2, in train: ValueError: bad learning rate'
    assert "bad learning rate" in ended["message"]


def test_worker_exit_code_that_the_job_wants_retried_is_transient(attempts: Attempts) -> None:
    ended = attempts("sh", "-c", "exit 75", retry_exit_codes=(75,)).run()
    assert (ended["reason"], ended["exit_code"]) == (Reason.RETRYABLE_EXIT, 75)


def test_worker_rank_that_is_killed_names_the_signal(attempts: Attempts) -> None:
    attempt = attempts("sleep", "600")
    attempt.start()
    attempt.kill_rank()
    ended = attempt.ended()
    assert (ended["reason"], ended["signal"], ended["exit_code"]) == (Reason.KILLED_BY_SIGNAL, "SIGKILL", None)
    assert attempt.record("rank_exited")["signal"] == "SIGKILL"


def test_worker_memory_error_is_out_of_memory(attempts: Attempts) -> None:
    ended = attempts.python("raise MemoryError('no more')").run()
    assert ended["reason"] == Reason.OUT_OF_MEMORY


def test_worker_error_of_a_full_disk_is_disk_full(attempts: Attempts) -> None:
    ended = attempts.python("import errno, os; raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))").run()
    assert ended["reason"] == Reason.DISK_FULL


@pytest.mark.skipif(
    own_group() is None or not os.access(str(own_group()) + "/memory.limit_in_bytes", os.W_OK),
    reason="needs a memory cgroup that we may limit",
)
def test_worker_rank_that_the_kernel_kills_for_memory_is_out_of_memory(attempts: Attempts) -> None:
    code = "input_ = open('fifo').read()\nhog = bytearray(400 << 20)\nfor i in range(0, len(hog), 4096): hog[i] = 1\n"
    attempt = attempts.python(code)
    (attempt.path / "work").mkdir()
    os.mkfifo(attempt.path / "work" / "fifo")
    attempt.start()
    name = f"trainmaster-{attempt.request.attempt_id}.0"
    cgroup = Path(f"/proc/{attempt.rank_pid()}/cgroup")
    wait_for(lambda: name in cgroup.read_text(), "the rank's move into its cgroup")
    group = Path(str(own_group())) / name
    (group / "memory.limit_in_bytes").write_text(str(100 << 20))
    (attempt.path / "work" / "fifo").write_text("eat")
    ended = attempt.ended()
    assert (ended["reason"], ended["signal"]) == (Reason.OUT_OF_MEMORY, "SIGKILL")
    assert ended["evidence"]["oom_kills"] == 1
    assert not group.exists()


def test_worker_first_failing_rank_is_the_cause_and_the_others_are_stopped(attempts: Attempts) -> None:
    script = 'if [ "$RANK" = 1 ]; then echo broken >&2; exit 7; fi; sleep 600'
    attempt = attempts("sh", "-c", script, ranks_per_node=3)
    ended = attempt.run()
    assert (ended["reason"], ended["exit_code"], ended["rank"]) == (Reason.EXITED_NONZERO, 7, 1)
    assert ended["evidence"]["last_lines"] == ["broken"]
    ends = {record["rank"]: record["signal"] for record in attempt.records("rank_exited")}
    assert ends == {0: "SIGTERM", 1: None, 2: "SIGTERM"}


def test_worker_preparing_step_that_fails_is_named_and_ends_the_attempt(attempts: Attempts) -> None:
    attempt = attempts(
        steps=(
            LaunchStep(name="fetch", argv=("sh", "-c", "echo no network >&2; exit 4")),
            LaunchStep(name="run", argv=("true",)),
        )
    )
    ended = attempt.run()
    assert (ended["reason"], ended["exit_code"], ended["step"]) == (Reason.EXITED_NONZERO, 4, "fetch")
    assert "step fetch" in ended["message"]
    assert ended["evidence"]["last_lines"] == ["no network"]
    assert (ended["started_at"], attempt.records("started")) == (None, [])


def test_worker_unknown_command_is_not_found(attempts: Attempts) -> None:
    ended = attempts("no-such-command", "--now").run()
    assert (ended["reason"], ended["exit_code"], ended["step"]) == (Reason.COMMAND_NOT_FOUND, 127, "run")
    assert "no-such-command" in ended["message"]


def test_worker_unknown_command_of_a_shell_is_the_jobs_own_failure(attempts: Attempts) -> None:
    ended = attempts("sh", "-c", "no-such-command").run()
    assert (ended["reason"], ended["exit_code"]) == (Reason.EXITED_NONZERO, 127)


@pytest.mark.parametrize(("content", "mode"), [("echo hi\n", 0o755), ("#!/bin/sh\n", 0o644), ("#!/no/shell\n", 0o755)])
def test_worker_file_that_cannot_be_executed_is_command_not_found(
    attempts: Attempts, tmp_path: Path, content: str, mode: int
) -> None:
    script = tmp_path / "script"
    script.write_text(content)
    script.chmod(mode)
    ended = attempts(os.fspath(script)).run()
    assert ended["reason"] == Reason.COMMAND_NOT_FOUND
    assert os.fspath(script) in ended["message"]


def test_worker_command_is_found_on_the_jobs_own_path(attempts: Attempts, tmp_path: Path) -> None:
    (tmp_path / "mytool").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "mytool").chmod(0o755)
    attempt = attempts("mytool", environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert attempt.run()["reason"] == Reason.SUCCEEDED
    assert attempt.log() == "mine\n"


def test_worker_command_beyond_the_systems_limits_is_bad_input(attempts: Attempts) -> None:
    ended = attempts("true", "x" * (1 << 20)).run()
    assert ended["reason"] == Reason.BAD_INPUT


@pytest.mark.parametrize("exit_code", [pytest.param(0, marks=pytest.mark.long), 3])
def test_worker_processes_that_outlive_their_rank_are_ended(attempts: Attempts, exit_code: int) -> None:
    # One in the background, one in a session of its own, one that was daemonised and ignores SIGTERM.
    script = (
        "sleep 600 & setsid sleep 600 & "
        "(setsid sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 600; done' &) ; "
        f"while [ ! -s pid ]; do sleep 0.01; done; exit {exit_code}"
    )
    attempt = attempts("sh", "-c", script)
    ended = attempt.run()
    assert ended["exit_code"] == exit_code
    assert attempt.record("strays_killed")["count"] >= 1
    assert attempts.fork_server.ask(op="sweep", attempt_id=attempt.request.attempt_id) == {"killed": 0}
