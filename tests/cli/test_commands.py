"""Commands against a real server."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from cli_server import Server, wait_for
from typer.testing import Result

from trainmaster.cli.commands import doctor
from trainmaster.cli.watch import PlainView, watch
from trainmaster.client import Client, NotFoundError, connection

pytestmark = pytest.mark.usefixtures("connected")

Tm = Callable[..., Result]
Submit = Callable[..., str]
Wait = Callable[..., Any]

WAITS = "while true; do sleep 0.05; done"


def written(tmp_path: Path, **fields: Any) -> str:
    """A job file."""
    document = {
        "name": "from a file",
        "workload": {"kind": "command", "argv": ["sh", "-c", "echo out; echo err >&2"]},
        "resource_config": {"gpu_count": 0},
        **fields,
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(document))
    return str(file)


def shell(script: str) -> dict[str, Any]:
    return {"kind": "command", "argv": ["sh", "-c", script]}


def test_submit_tells_the_job_and_how_to_follow_it(tm: Tm, tmp_path: Path, client: Client) -> None:
    result = tm("submit", written(tmp_path))

    job_id = result.stdout.split()[0]
    assert result.exit_code == 0
    assert client.get(job_id)["name"] == "from a file"
    assert f"trainmaster logs -f {job_id}" in result.stderr


MAY_WAIT = {"allow_waiting_for_nodes": True}


def test_submit_of_a_job_that_cannot_start_says_what_it_waits_for(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path, resource_config={"gpu_count": 512}, scheduling_config=MAY_WAIT))

    assert result.exit_code == 0
    assert "It needs 512 × GPU" in result.stderr


def test_submit_of_a_job_that_no_node_could_hold_fails(tm: Tm, tmp_path: Path) -> None:
    file = written(tmp_path, resource_config={"gpu_count": 0, "cpu_cores": 4096})

    result = tm("submit", file)

    assert result.exit_code == 1
    assert result.stdout == ""
    assert "no node could ever hold 4096 cores on one node" in result.stderr
    assert "the largest has" in result.stderr
    assert tm("submit", file, "--set", "scheduling_config.allow_waiting_for_nodes=true").exit_code == 0


def test_submit_takes_settings_name_and_labels(tm: Tm, tmp_path: Path, client: Client) -> None:
    result = tm(
        "submit", written(tmp_path), "--set", "scheduling_config.priority=7", "--name", "n", "-l", "a=b", "--json"
    )

    job = client.get(json.loads(result.stdout)["job_id"])
    assert (job["name"], job["priority"], job["labels"]) == ("n", 7, {"a": "b"})


def test_submit_reads_the_standard_input(tm: Tm, client: Client) -> None:
    text = "name: piped\nworkload: {kind: command, argv: [echo, hi]}\nresource_config: {gpu_count: 0}\n"

    result = tm("submit", "-", "--json", stdin=text)

    assert client.get(json.loads(result.stdout)["job_id"])["name"] == "piped"


def test_submit_ships_the_script_beside_the_file(tm: Tm, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import sys; print('hello', *sys.argv[1:])")
    workload = {"kind": "script", "path": "hello.py", "args": ["you"]}

    result = tm("submit", written(tmp_path, workload=workload), "--follow")

    assert result.exit_code == 0
    assert result.stdout == "hello you\n"


def test_submit_of_a_file_with_a_slip_names_the_field_and_the_nearest(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path, resource_config={"gpu_cont": 1}))

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: resource_config.gpu_cont")
    assert "gpu_count" in result.stderr
    assert "Traceback" not in result.stderr


def test_submit_of_a_file_with_several_slips_lists_them(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path, scheduling_config={"priority": 11}, lables={}))

    assert result.exit_code == 1
    assert "2 things are wrong" in result.stderr
    assert "\n  scheduling_config.priority: " in result.stderr
    assert "\n  lables: " in result.stderr


@pytest.mark.parametrize(
    ("script", "exit_code", "told"),
    [("echo fine", 0, "COMPLETED"), ("echo bad; exit 3", 4, "FAILED"), ("kill -TERM $$", 4, "KILLED_BY_SIGNAL")],
)
def test_submit_follow_ends_as_the_job_does(tm: Tm, tmp_path: Path, script: str, exit_code: int, told: str) -> None:
    result = tm("submit", written(tmp_path, workload=shell(script)), "--follow")

    assert result.exit_code == exit_code
    assert told in result.stderr


def test_submit_follow_of_a_failure_says_whose_it_is_and_what_to_do(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path, workload=shell("exit 3")), "--follow")

    assert "EXITED_NONZERO" in result.stderr
    assert "fault: user" in result.stderr
    assert "Read the last lines of its log" in result.stderr


@pytest.mark.parametrize(
    ("command", "exit_code", "status"), [(["cancel"], 5, "CANCELLED"), (["pause", "--no-save"], 7, "PAUSED")]
)
def test_submit_follow_notices_what_others_do_to_the_job(
    tm: Tm, tmp_path: Path, client: Client, command: list[str], exit_code: int, status: str
) -> None:
    handle = f"followed-{uuid4().hex}"  # new for each try: after a failure the job keeps its handle
    file = written(tmp_path, workload=shell(f"echo begun; {WAITS}"), handle=handle)

    def interfere() -> None:
        def begun() -> bool:
            running = any(job["handle"] == handle for job in client.list(statuses=["TRAINING"]))
            return running and bool(client.logs(handle)["lines"])

        wait_for(begun)
        if command[0] == "cancel":
            client.cancel(handle)
        else:
            client.pause(handle, save_checkpoint=False)

    other = threading.Thread(target=interfere)
    other.start()
    result = tm("submit", file, "--follow")
    other.join()

    assert result.exit_code == exit_code
    assert result.stdout == "begun\n"
    assert status in result.stderr
    client.delete(handle)


def test_watching_a_job_that_is_paused_already_shows_each_line_once(
    client: Client, submit: Submit, status: Wait, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id = submit(f"echo begun; {WAITS}")
    status(job_id, "TRAINING")
    wait_for(lambda: client.logs(job_id)["lines"])
    client.pause(job_id, save_checkpoint=False)
    status(job_id, "PAUSED")

    watch(client, job_id, PlainView(), until_paused=True)

    assert capsys.readouterr().out == "begun\n"


def test_submit_follow_as_json_is_lines_of_log_between_two_of_the_job(tm: Tm, tmp_path: Path) -> None:
    result = tm("submit", written(tmp_path), "--follow", "--json")

    first, *logs, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert first["job"]["job_id"] == last["job"]["job_id"]
    assert {line["log"]["message"] for line in logs} == {"out", "err"}
    assert last["job"]["status"] == "COMPLETED"


def test_ps_lists_what_has_not_ended(tm: Tm, submit: Submit, status: Wait) -> None:
    ended, runs = submit("true"), submit(WAITS)
    status(ended, "COMPLETED")
    status(runs, "TRAINING")

    by_default, everything = tm("ps").stdout, tm("ps", "-a").stdout

    assert runs in by_default
    assert ended not in by_default
    assert {runs, ended} <= set(everything.split())
    row = next(line for line in by_default.splitlines() if runs in line)
    assert {"test", "TRAINING", "default", "5"} <= set(row.split())


def test_ps_filters_by_status_and_label(tm: Tm, submit: Submit, status: Wait) -> None:
    one, other = submit("true", labels={"team": "a"}), submit("true", labels={"team": "b"})
    status(one, "COMPLETED")
    status(other, "COMPLETED")

    assert tm("ps", "--status", "completed", "--label", "team=a", "-q").stdout.split() == [one]
    assert [job["job_id"] for job in json.loads(tm("ps", "-a", "-l", "team=b", "--json").stdout)] == [other]
    assert tm("ps", "-a", "-l", "team=c").stdout == "No jobs.\n"


def test_ps_says_why_a_job_waits(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("true", resource_config={"gpu_count": 512}, scheduling_config=MAY_WAIT)
    waiting = status(job_id, "QUEUED")

    row = next(line for line in tm("ps").stdout.splitlines() if job_id in line)

    assert waiting["pending_reason"]
    assert waiting["pending_reason"] in row


def test_ps_with_an_unknown_status_is_refused(tm: Tm) -> None:
    result = tm("ps", "--status", "RUNING")

    assert result.exit_code == 1
    assert "status" in result.stderr


def test_show_tells_all_about_a_failure(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("echo a last word; exit 3", labels={"team": "a"})
    status(job_id, "FAILED")

    shown = tm("show", job_id).stdout

    assert "FAILED" in shown
    assert "team=a" in shown
    assert "EXITED_NONZERO" in shown
    assert "a last word" in shown
    assert "fault: user" in shown


SLOW = """
import http.server, os, time
time.sleep(3)
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def test_show_counts_how_long_a_job_ran_from_when_it_started(tm: Tm, submit: Submit, status: Wait) -> None:
    """Also one whose processes run for a while before it is TRAINING."""
    job_id = submit("", workload={"kind": "service", "argv": [sys.executable, "-c", SLOW], "port_environment": "PORT"})
    status(job_id, "TRAINING")
    tm("cancel", job_id)
    status(job_id, "CANCELLED")

    job = json.loads(tm("show", job_id, "--json").stdout)
    shown = dict(line.split(maxsplit=1) for line in tm("show", job_id).stdout.splitlines() if len(line.split()) > 1)

    started, finished = (datetime.fromisoformat(shown[name]) for name in ("started", "finished"))
    assert float(shown["ran"].removesuffix("s")) >= 3
    # Both are shown to the second.
    assert abs((finished - started).total_seconds() - job["runtime_seconds"]) <= 1.5


@pytest.mark.long  # it waits for the 5 s before a retry
def test_show_sums_the_attempts_that_ran(tm: Tm, submit: Submit, status: Wait, tmp_path: Path) -> None:
    script = f"sleep 0.5; test -e {tmp_path}/tried || {{ touch {tmp_path}/tried; kill -9 $$; }}"
    job_id = submit(script, scheduling_config={"max_retries": 1})
    status(job_id, "COMPLETED")

    printed = tm("show", job_id).stdout
    shown = dict(line.split(maxsplit=1) for line in printed.splitlines() if len(line.split()) > 1)
    ran = re.fullmatch(r"([0-9.]+)s in 2 attempts", shown["ran"].strip())
    assert ran, printed
    started, finished = (datetime.fromisoformat(shown[name]) for name in ("started", "finished"))
    assert float(ran[1]) >= 1.0
    # The 5 s until it was tried again are not in it; both times are shown to the second.
    assert (finished - started).total_seconds() - float(ran[1]) > 3


def test_show_of_several_jobs_as_json_is_a_list(tm: Tm, submit: Submit) -> None:
    one, other = submit("true"), submit("true")

    assert json.loads(tm("show", one, "--json").stdout)["job_id"] == one
    assert [job["job_id"] for job in json.loads(tm("show", one, other, "--json").stdout)] == [one, other]


def test_job_is_found_by_handle_and_by_the_beginning_of_its_id(tm: Tm, submit: Submit) -> None:
    job_id = submit("true", handle="a-handle")

    for name in (job_id, "a-handle", job_id[:-2], job_id.removeprefix("job-")[:-2]):
        assert json.loads(tm("show", name, "--json").stdout)["job_id"] == job_id


def test_job_whose_beginning_fits_several_is_not_guessed(tm: Tm, submit: Submit) -> None:
    submit("true")
    submit("true")

    result = tm("show", "job-")

    assert result.exit_code == 1
    assert "have an id that begins with 'job-'; name one by its id" in result.stderr


def test_unknown_job_leads_to_the_list(tm: Tm) -> None:
    result = tm("show", "job-000000000000")

    assert result.exit_code == 1
    assert "trainmaster ps -a" in result.stderr


def test_logs_show_lines_the_last_ones_and_one_stream(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("for n in 1 2 3; do echo out $n; done; echo err >&2")
    status(job_id, "COMPLETED")

    assert sorted(tm("logs", job_id).stdout.splitlines()) == ["err", "out 1", "out 2", "out 3"]
    assert len(tm("logs", job_id, "--tail", "2").stdout.splitlines()) == 2
    assert tm("logs", job_id, "--stderr").stdout == "err\n"
    assert tm("logs", job_id, "--stderr", "-t").stdout.startswith("20")
    assert [line["message"] for line in json.loads(tm("logs", job_id, "--stderr", "--json").stdout)] == ["err"]


def test_logs_and_download_of_a_job_that_waits_or_wrote_nothing_say_so(tm: Tm, submit: Submit, status: Wait) -> None:
    waits = submit("true", scheduling_config={"allow_waiting_for_nodes": True}, resource_config={"gpu_count": 900})
    silent = submit("true")
    reason = status(waits, "QUEUED")["pending_reason"]
    status(silent, "COMPLETED")

    assert f"has written nothing yet; it is QUEUED: {reason}" in tm("logs", waits).stderr
    assert "is COMPLETED and has written nothing" in tm("logs", silent).stderr
    assert "No line of the log matches" in tm("logs", silent, "--stderr").stderr
    assert json.loads(tm("logs", waits, "--json").stdout) == []
    assert f"is QUEUED and has no output and no checkpoints yet; `trainmaster logs -f {waits}`" in (
        tm("download", waits).stderr
    )


def test_logs_of_many_pages_are_whole(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("seq 1 2500")
    status(job_id, "COMPLETED")

    assert tm("logs", job_id).stdout.split() == [str(number) for number in range(1, 2501)]


def test_logs_of_several_ranks_say_whose_line_it_is(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("", workload={**shell("echo rank $RANK"), "ranks_per_node": 2})
    status(job_id, "COMPLETED")

    assert sorted(tm("logs", job_id).stdout.splitlines()) == ["[rank 0] rank 0", "[rank 1] rank 1"]
    assert tm("logs", job_id, "--rank", "1").stdout == "rank 1\n"


def test_logs_follow_goes_on_to_the_end(tm: Tm, submit: Submit) -> None:
    job_id = submit("for n in $(seq 20); do echo line $n; sleep 0.02; done")

    result = tm("logs", "-f", job_id)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"line {n}" for n in range(1, 21)]
    assert "COMPLETED" in result.stderr


def test_logs_of_an_attempt_that_was_not_made_are_refused(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("true")
    status(job_id, "COMPLETED")

    result = tm("logs", job_id, "--attempt", "7")

    assert result.exit_code == 1
    assert "attempt 7" in result.stderr


def test_events_show_the_life_of_a_job(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("true")
    status(job_id, "COMPLETED")

    table, followed, as_json = (tm("events", job_id, *option).stdout for option in ([], ["-f"], ["--json"]))

    for step in ("PENDING → QUEUED", "QUEUED → SCHEDULING", "→ COMPLETED"):
        assert step in table
        assert step in followed
    assert [event["seq"] for event in json.loads(as_json)] == list(range(1, len(json.loads(as_json)) + 1))


REPORTS = """
from trainmaster.jobs import report
for step in range(1, 6):
    report.metrics(step=step, loss=1 / step)
    report.progress(step=step, total_steps=5)
"""


@pytest.fixture
def reporting(tm: Tm, tmp_path: Path) -> str:
    """A job that has reported its loss and has ended."""
    (tmp_path / "report.py").write_text(REPORTS)
    file = written(tmp_path, workload={"kind": "script", "path": "report.py"})
    result = tm("submit", file, "--follow", "--json")
    assert result.exit_code == 0, result.stdout
    return str(json.loads(result.stdout.splitlines()[0])["job"]["job_id"])


def test_metrics_show_the_course_of_each(tm: Tm, reporting: str) -> None:
    row = next(line for line in tm("metrics", reporting).stdout.splitlines() if line.startswith("loss"))
    followed = tm("metrics", reporting, "-f").stdout.splitlines()

    assert row.split()[:4] == ["loss", "0.2", "0.2", "1"]
    assert json.loads(tm("metrics", reporting, "--json").stdout)["step"] == 5
    assert [line.split() for line in followed][-1] == ["step", "5", "loss", "0.2"]


def test_metrics_of_another_name_say_which_there_are(tm: Tm, reporting: str) -> None:
    result = tm("metrics", reporting, "--name", "los")
    assert result.exit_code == 2
    assert "no metric los; it reports: loss" in result.stderr


def test_metrics_of_a_job_that_reports_none_say_so(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("true")
    status(job_id, "COMPLETED")

    assert tm("metrics", job_id).stdout == "No metrics.\n"


def test_ps_shows_progress(tm: Tm, reporting: str) -> None:
    row = next(line for line in tm("ps", "-a").stdout.splitlines() if reporting in line)

    assert "100% 5/5   0.2 " in row


def test_metrics_come_in_the_order_in_which_they_are_looked_for(tm: Tm, tmp_path: Path) -> None:
    script = "from trainmaster.jobs import report\n"
    for name in ("prepare_percent", "mfu", "eval_loss", "grad_norm", "loss"):
        script += f"report.metrics(step=1, {name}=1)\n"
    (tmp_path / "report.py").write_text(script)
    result = tm("submit", written(tmp_path, workload={"kind": "script", "path": "report.py"}), "--follow", "--json")
    job_id = json.loads(result.stdout.splitlines()[0])["job"]["job_id"]

    names = [line.split()[0] for line in tm("metrics", job_id).stdout.splitlines()[1:]]

    assert names == ["loss", "eval_loss", "grad_norm", "mfu", "prepare_percent"]


def test_checkpoints_of_a_job_without_any_say_so(tm: Tm, submit: Submit) -> None:
    assert tm("checkpoints", submit("true")).stdout == "No checkpoints.\n"


def test_cancel_of_several_jobs_does_what_it_can(tm: Tm, submit: Submit, status: Wait) -> None:
    one, other = submit(WAITS), submit(WAITS)

    result = tm("cancel", one, "job-000000000000", other, "--reason", "enough")

    assert result.exit_code == 1
    assert result.stdout.count("cancelled") == 2
    assert "ps -a" in result.stderr
    assert status(one, "CANCELLED")
    assert status(other, "CANCELLED")


def test_cancel_of_a_job_that_ended_says_why_not(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("true")
    status(job_id, "COMPLETED")

    result = tm("cancel", job_id)

    assert result.exit_code == 1
    assert "COMPLETED" in result.stderr


def test_pause_and_resume_name_the_checkpoint_or_that_there_is_none(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit(WAITS)
    status(job_id, "TRAINING")

    refused = tm("pause", job_id)
    assert refused.exit_code == 1
    assert "save" in refused.stderr
    assert "stops without saving" in tm("pause", job_id, "--no-save").stdout
    status(job_id, "PAUSED")
    assert "from the start" in tm("resume", job_id).stdout
    status(job_id, "TRAINING")


SAVES = """
import time
from trainmaster.jobs import report
for step in range(1, 100_000):
    report.metrics(step=step, loss=1 / step)
    stop = report.stop_requested()
    if step == 1 or stop:
        with report.checkpoint(step=step, metrics={"loss": 1 / step}) as directory:
            (directory / "state").write_text(str(step))
    if stop:
        report.exit_stopped()
    time.sleep(0.02)
"""


def test_job_that_saves_is_paused_and_resumed_from_its_checkpoint(
    tm: Tm, tmp_path: Path, client: Client, status: Wait
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    submitted = tm("submit", written(tmp_path, workload={"kind": "script", "path": "saves.py"}), "--json")
    job_id = json.loads(submitted.stdout)["job_id"]
    wait_for(lambda: client.get(job_id)["checkpoints"] and client.get(job_id)["can_save"])

    assert "saves and stops" in tm("pause", job_id).stdout
    latest = status(job_id, "PAUSED")["latest_checkpoint_id"]
    table = tm("checkpoints", job_id).stdout
    resumed = tm("resume", job_id).stdout

    assert f"from checkpoint {latest}" in resumed
    assert next(line for line in table.splitlines() if latest in line).split()[-1] == "latest"
    assert [one["is_latest"] for one in json.loads(tm("checkpoints", job_id, "--json").stdout)].count(True) == 1
    client.delete(job_id, purge=True)


def test_retry_makes_a_child_with_other_resources(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("exit 1")
    status(job_id, "FAILED")

    child = json.loads(tm("retry", job_id, "--set", "cpu_cores=1", "--json").stdout)

    assert child["parent_job_id"] == job_id
    assert child["resource_config"]["cpu_cores"] == 1
    assert child["resource_config"]["gpu_count"] == 0


def test_edit_changes_one_label_and_leaves_the_others(tm: Tm, submit: Submit, client: Client) -> None:
    labels = {"a": "1", "b": "2", "c": "3"}
    job_id = submit("true", resource_config={"gpu_count": 512}, scheduling_config=MAY_WAIT, labels=labels)

    result = tm("edit", job_id, "--priority", "9", "--label", "b=x", "--unlabel", "c")

    assert result.exit_code == 0
    job = client.get(job_id)
    assert (job["priority"], job["labels"]) == (9, {"a": "1", "b": "x"})


def test_edit_without_a_change_is_refused(tm: Tm, submit: Submit) -> None:
    result = tm("edit", submit("true"))

    assert result.exit_code == 2
    assert "--priority" in result.stderr


def test_delete_needs_a_word(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("true")
    status(job_id, "COMPLETED")

    refused = tm("delete", job_id)
    assert refused.exit_code == 2
    assert "--yes" in refused.stderr
    assert tm("delete", job_id, "-y").exit_code == 0
    assert tm("show", job_id).exit_code == 1


def test_nodes_tell_what_is_free(tm: Tm) -> None:
    table, as_json = tm("nodes").stdout, json.loads(tm("nodes", "--json").stdout)

    assert as_json[0]["id"] in table
    assert "READY" in table


def test_doctor_finds_the_server_well(tm: Tm, connected: Server) -> None:
    result = tm("doctor", "--json")

    verdicts = {finding["check"]: finding["verdict"] for finding in json.loads(result.stdout)}
    assert verdicts["server"] == "ok"
    assert verdicts["API key"] == "ok"
    assert "ready at" in tm("doctor").stdout


@pytest.mark.parametrize(("package", "found"), [("json", "json 1.0"), ("no_such_package", "not installed")])
def test_doctor_says_whether_the_built_in_trainers_can_run(
    tm: Tm, monkeypatch: pytest.MonkeyPatch, package: str, found: str
) -> None:
    monkeypatch.delenv("TRAINMASTER_URL")
    monkeypatch.setattr(doctor, "TRAINERS", (package,))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.0")

    (finding,) = (each for each in doctor.examine() if each.check == "training")

    assert found in finding.found
    assert ("trainmaster[train]" in finding.remedy) == (found == "not installed")


def test_server_that_does_not_answer_is_exit_code_3(tm: Tm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_DELAYS_S", ())
    monkeypatch.setenv("TRAINMASTER_URL", "http://127.0.0.1:1")

    result = tm("ps")

    assert result.exit_code == 3
    assert "TRAINMASTER_URL" in result.stderr
    assert tm("doctor").exit_code == 1


def test_wrong_key_says_where_the_right_one_is(tm: Tm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_API_KEY", "eyJwrong")

    result = tm("ps")

    assert result.exit_code == 1
    assert "TRAINMASTER_API_KEY" in result.stderr


def test_traceback_is_there_for_whoever_asks_for_it(tm: Tm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_DEBUG", "1")

    assert isinstance(tm("show", "job-000000000000").exception, NotFoundError)


def test_completion_knows_ids_and_handles(submit: Submit) -> None:
    from trainmaster.cli.options import complete_job

    job_id = submit("true", handle="complete-me")

    assert job_id in [name for name, _ in complete_job("job-")]
    assert [name for name, _ in complete_job("complete-")] == ["complete-me"]


def test_completion_without_a_server_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmaster.cli.options import complete_job

    monkeypatch.setattr(connection, "RETRY_DELAYS_S", ())
    monkeypatch.setenv("TRAINMASTER_URL", "http://127.0.0.1:1")

    assert complete_job("") == []
