from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from trainmaster.jobs.attempt import RecordStream, Stop
from trainmaster.jobs.report import Reporter
from trainmaster.protocol import environment
from trainmaster.protocol.documents import read_lines
from trainmaster.protocol.reasons import EXIT_STOPPED, StopCause
from trainmaster.protocol.request import Control


def eventually(found: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return value


def test_progress_and_metrics_land_in_the_metrics_stream(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    reporter.progress(3, total_steps=10, epoch=0.5)
    reporter.metrics({"loss": 0.25}, step=3, lr=1)
    reporter.metrics()
    first, second = rank.metrics()
    assert {name: first[name] for name in ("step", "total_steps", "epoch", "values")} == {
        "step": 3,
        "total_steps": 10,
        "epoch": 0.5,
        "values": {},
    }
    assert second["values"] == {"loss": 0.25, "lr": 1.0}
    assert second["step"] == 3
    assert second["t"] >= first["t"] > 0


def test_metrics_not_finite_become_one_note(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    for step in (7, 8):
        reporter.metrics(step=step, loss=float("nan"), accuracy=0.5)
    assert [record["values"] for record in rank.metrics()] == [{"accuracy": 0.5}] * 2
    assert [event["message"] for event in rank.events_of("note")] == ["loss is nan at step 7"]


def test_metrics_without_numbers_are_left_out_with_one_warning(rank: Any, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(rank.environ)
    reporter.metrics({"loss": 1.0, "name": "x", "list": [1]}, step=1)  # type: ignore[dict-item]
    assert rank.metrics()[0]["values"] == {"loss": 1.0}
    assert capsys.readouterr().err.count("\n") == 1


def test_report_is_never_longer_than_the_server_reads(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    reporter.note("x" * 2_000_000)
    reporter.metrics({"n" * 2_000_000: 1.0})
    assert len(rank.events_of("note")[0]["message"]) == 10_000
    assert list(rank.metrics()[0]["values"]) == ["n" * 200]


def test_number_that_nobody_can_keep_does_not_end_the_loop(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    reporter.metrics({"loss": 10**400, "lr": 0.1}, step=1, epoch=float("nan"))
    reporter.progress(2, epoch=float("inf"))
    first, second = rank.metrics()
    assert (first["values"], second["step"]) == ({"lr": 0.1}, 2)
    assert "epoch" not in {*first, *second}


def test_phase_as_a_block_returns_to_the_phase_before(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    reporter.phase("preparing")
    reporter.phase("training")
    with reporter.phase("evaluating"):
        reporter.note("in between")
    with reporter.phase("evaluating"), reporter.phase("checkpointing"):
        pass
    assert [event["phase"] for event in rank.events_of("phase")] == [
        "preparing",
        "training",
        "evaluating",
        "training",
        "evaluating",
        "checkpointing",
        "evaluating",
        "training",
    ]


def test_save_in_the_background_shows_while_the_rank_trains(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    reporter.phase("training")
    with reporter.saving():
        with reporter.phase("evaluating"):
            reporter.note("evaluates while it saves")
        reporter.note("trains while it saves")
    with reporter.phase("evaluating"), reporter.saving():
        reporter.note("evaluates")
    shown = [event.get("phase") or event["message"] for event in rank.events()]
    assert shown == [
        *("training", "checkpointing", "evaluating", "evaluates while it saves", "checkpointing"),
        *("trains while it saves", "training", "evaluating", "evaluates", "training"),
    ]


def test_save_in_the_background_ends_in_the_phase_of_that_moment(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    with reporter.saving(), reporter.saving():
        reporter.phase("exporting")
    assert [event["phase"] for event in rank.events_of("phase")] == ["checkpointing", "exporting"]


def test_phase_of_another_name_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match="dreaming"):
        Reporter(rank.environ).phase("dreaming")
    assert rank.events() == []


def test_finished_is_an_event(rank: Any) -> None:
    Reporter(rank.environ).finished()
    assert [event["type"] for event in rank.events()] == ["finished"]


def test_stop_requested_tells_cause_save_and_time_left(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    assert reporter.stop_requested() is None
    assert [event["save"] for event in rank.events_of("capable")] == [True]
    rank.control(Control(seq=1, stop=StopCause.PAUSE, save=True, grace_s=600))
    stop: Stop = eventually(reporter.stop_requested)
    assert (stop.cause, stop.save) == (StopCause.PAUSE, True)
    assert 0 < stop.seconds_left <= 600
    rank.control(Control(seq=2, stop=StopCause.CANCEL, grace_s=0))
    stop = eventually(lambda: (found := reporter.stop_requested()) and found.cause is StopCause.CANCEL and found)
    assert stop.seconds_left == 0
    assert len(rank.events_of("capable")) == 1


def test_save_requested_is_true_once_per_request(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    assert not reporter.save_requested()
    rank.control(Control(seq=1, save=True))
    eventually(reporter.save_requested)
    assert not reporter.save_requested()
    rank.control(Control(seq=2, save=True))
    eventually(reporter.save_requested)
    rank.control(Control(seq=3, stop=StopCause.PAUSE, save=True))
    eventually(reporter.stop_requested)
    assert not reporter.save_requested()


def test_control_that_cannot_be_read_is_no_stop(rank: Any) -> None:
    Path(rank.environ[environment.CONTROL_FILE]).write_text("{")
    assert Reporter(rank.environ).stop_requested() is None


def test_reports_that_cannot_be_written_are_dropped_with_one_warning(
    rank: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {**rank.environ, environment.EVENTS_FILE: "/dev/full", environment.METRICS_FILE: "/dev/full"}
    reporter = Reporter(environ)
    reporter.note("lost")
    reporter.progress(1)
    reporter.finished()
    assert reporter.stop_requested() is None
    assert capsys.readouterr().err.count("\n") == 1


def test_journal_ends_a_torn_record_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = RecordStream(str(tmp_path / "stream.jsonl"))
    journal.append({"n": 1})
    with monkeypatch.context() as patch:
        write = os.write
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
        with pytest.raises(OSError, match="wrote 7 of"):
            journal.append({"n": 2})
    journal.append({"n": 3})
    records, _ = read_lines((tmp_path / "stream.jsonl").read_bytes())
    assert [record["n"] for record in records] == [1, 3]


def test_reports_of_threads_and_forked_children_are_whole_lines(rank: Any) -> None:
    code = """
import os, threading
from trainmaster.jobs import report
def work(name):
    for step in range(200):
        report.metrics({"x" * 300: 1.0}, step=step)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
children = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        work("child")
        os._exit(0)
    children.append(pid)
for thread in threads: thread.start()
for thread in threads: thread.join()
for pid in children: assert os.waitpid(pid, 0)[1] == 0
"""
    assert rank.start(code).wait(PATIENCE_S) == 0
    data = Path(rank.environ[environment.METRICS_FILE]).read_bytes()
    assert len(rank.metrics()) == data.count(b"\n") == 7 * 200


def test_lock_held_at_a_fork_does_not_hang_the_child(rank: Any) -> None:
    code = """
import os, threading
from trainmaster.jobs import report
held, done = threading.Event(), threading.Event()
def hold():
    with report.reporter._lock:
        held.set(); done.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
pid = os.fork()
if pid == 0:
    report.note("from the child")
    os._exit(0)
os.waitpid(pid, 0); done.set(); thread.join()
"""
    assert rank.start(code).wait(PATIENCE_S) == 0
    assert [event["message"] for event in rank.events_of("note")] == ["from the child"]


def test_import_inside_a_job_prints_stacks_on_a_signal(rank: Any) -> None:
    code = """
import time
from trainmaster.jobs import report
def deep_in_training():
    while True: time.sleep(0.05)
deep_in_training()
"""
    with rank.start(code, stderr=subprocess.PIPE) as process:
        eventually(lambda: [event for event in rank.events_of("capable") if event.get("stacks")])
        process.send_signal(signal.SIGUSR1)
        lines = [process.stderr.readline() for _ in range(3)]
        assert process.poll() is None
        process.kill()
        assert "deep_in_training" in "".join(lines) + process.stderr.read()


def test_import_leaves_a_signal_handler_of_the_job_alone(rank: Any) -> None:
    code = """
import os, signal
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
from trainmaster.jobs import report
os.kill(os.getpid(), signal.SIGUSR1)
assert seen == [1]
"""
    assert rank.start(code).wait(PATIENCE_S) == 0
    assert rank.events_of("capable") == []


STOPS_WHEN_ASKED = """
import sys, time
from trainmaster.jobs import report
if "asks" in sys.argv[1:]:
    assert report.stop_requested() is None
print("up", flush=True)
while "asks" not in sys.argv[1:] or not (stop := report.stop_requested()): time.sleep(0.01)
print(stop.cause, stop.save, flush=True)
report.exit_stopped()
"""


def test_sigterm_of_an_engine_is_a_request_to_stop_for_a_rank_that_asks_for_those(rank: Any) -> None:
    rank.environ[environment.ENGINE_STOPS] = "1"
    code = f"import sys; sys.argv.append('asks')\n{STOPS_WHEN_ASKED}"
    with rank.start(code, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE_S)[0] == f"{StopCause.ENGINE} True\n"
        assert process.returncode == EXIT_STOPPED


@pytest.mark.parametrize("stopped_by_engine", [True, False])
def test_sigterm_ends_a_rank_that_does_not_ask_for_stops_or_has_no_engine(rank: Any, stopped_by_engine: bool) -> None:
    code = STOPS_WHEN_ASKED
    if stopped_by_engine:
        rank.environ[environment.ENGINE_STOPS] = "1"
    else:
        code = f"import sys; sys.argv.append('asks')\n{code}"
    with rank.start(code, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_sigterm_handler_of_the_job_is_left_alone(rank: Any) -> None:
    rank.environ[environment.ENGINE_STOPS] = "1"
    code = """
import os, signal
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
from trainmaster.jobs import report
assert report.stop_requested() is None
os.kill(os.getpid(), signal.SIGTERM)
assert seen == [1] and report.stop_requested() is None
"""
    assert rank.start(code).wait(PATIENCE_S) == 0


def test_exit_stopped_flushes_and_leaves_with_its_code(rank: Any) -> None:
    code = "from trainmaster.jobs import report; print('last words', end=''); report.exit_stopped()"
    with rank.start(code, stdout=subprocess.PIPE) as process:
        assert process.communicate(timeout=PATIENCE_S)[0] == "last words"
        assert process.returncode == EXIT_STOPPED


def test_questions_about_the_job_are_answered(rank: Any) -> None:
    reporter = Reporter({**rank.environ, environment.RESUME_FROM: "/somewhere/checkpoint-1"})
    assert reporter.job_id() == "job-1"
    assert reporter.rank() == 3
    assert reporter.resume_path() == Path("/somewhere/checkpoint-1")
    assert Reporter(rank.environ).resume_path() is None
    assert reporter.output_dir() == rank.directory / "output"
    assert reporter.output_dir().is_dir()


def test_outside_a_job_everything_is_harmless(tmp_path: Path) -> None:
    code = """
import signal
from trainmaster.jobs import committed, report, verify
report.progress(1, total_steps=2)
report.metrics(loss=1.0)
report.note("x")
with report.phase("evaluating"): pass
assert report.stop_requested() is None and not report.save_requested()
assert report.resume_path() is None and report.job_id() is None and report.rank() == 0
with report.checkpoint(step=1) as directory:
    (directory / "weights").write_bytes(b"1")
report.finished()
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMASTER_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    assert (tmp_path / "checkpoints" / "checkpoint-1" / "weights").read_bytes() == b"1"


def test_reporter_from_several_threads_takes_a_save_once(rank: Any) -> None:
    reporter = Reporter(rank.environ)
    rank.control(Control(seq=1, save=True))
    taken: list[int] = []

    def ask() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not taken and time.monotonic() < deadline:
            if reporter.save_requested():
                taken.append(1)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [1]


def test_metrics_may_say_of_how_many_steps(rank: Any) -> None:
    Reporter(rank.environ).metrics(step=3, total_steps=10, loss=0.5)
    (record,) = rank.metrics()
    assert (record["step"], record["total_steps"], record["values"]) == (3, 10, {"loss": 0.5})


def test_phase_of_an_export_is_the_last(rank: Any) -> None:
    with Reporter(rank.environ).phase("exporting"):
        pass
    assert [event["phase"] for event in rank.events_of("phase")] == ["exporting"]
