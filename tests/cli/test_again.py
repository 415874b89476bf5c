"""Finding jobs by name, and running them again: rerun, clone, a shown job submitted; diff and compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from trainmaster.client import Client

Tm = Callable[..., Result]
Submit = Callable[..., str]
Wait = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("connected")


def shown(tm: Tm, job: str) -> Any:
    result = tm("show", job, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def made(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["job_id"])


def test_job_is_found_by_its_name_in_every_command(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("echo hello", name="only one")
    status(job_id, "COMPLETED")

    assert shown(tm, "only one")["job_id"] == job_id
    assert tm("logs", "only one").stdout == "hello\n"
    for command in ("events", "metrics", "why", "checkpoints"):
        assert tm(command, "only one").exit_code == 0, command
    assert tm("edit", "only one", "--priority", "3").exit_code == 1  # found, and refused as it has ended
    assert tm("delete", "only one", "--yes").exit_code == 0
    assert "was deleted" in tm("download", "only one").stderr


def test_name_of_several_jobs_names_the_candidates(tm: Tm, submit: Submit) -> None:
    one, other = (submit("true", name="twins") for _ in range(2))

    result = tm("show", "twins")

    assert result.exit_code == 1
    assert "2 jobs are called 'twins'" in result.stderr
    assert one in result.stderr
    assert other in result.stderr


def test_handle_wins_over_a_name(tm: Tm, submit: Submit) -> None:
    submit("true", name="first-one")
    with_handle = submit("true", handle="first-one")

    assert shown(tm, "first-one")["job_id"] == with_handle


def test_rerun_works_on_a_completed_job(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit('echo "secret $TOKEN"', name="again", workload=with_token('echo "secret $TOKEN"'))
    status(job_id, "COMPLETED")
    refused = tm("retry", job_id)
    assert refused.exit_code == 1
    assert "trainmaster rerun" in refused.stderr

    second = made(tm("rerun", job_id, "--json"))

    assert second != job_id
    status(second, "COMPLETED")
    assert tm("logs", second).stdout == "secret s3cret\n"


def with_token(script: str) -> dict[str, Any]:
    return {"kind": "command", "argv": ["sh", "-c", script], "environment": {"TOKEN": "s3cret", "OTHER": "x"}}


def test_clone_changes_fields_and_keeps_secrets(tm: Tm, submit: Submit, status: Wait) -> None:
    job_id = submit("", name="original", labels={"team": "a"}, workload=with_token("exit 3"))
    status(job_id, "FAILED")

    cloned = made(
        tm(
            *("clone", job_id, "--set", 'workload.argv=[sh, -c, "echo $TOKEN $OTHER"]'),
            *("--set", "workload.environment.OTHER=y", "--set", "scheduling_config.priority=7"),
            *("--name", "changed", "--label", "try=2", "--json"),
        )
    )

    job = status(cloned, "COMPLETED")
    assert tm("logs", cloned).stdout == "s3cret y\n"
    assert (job["name"], job["priority"], job["labels"]) == ("changed", 7, {"team": "a", "try": "2"})
    assert "s3cret" not in tm("show", cloned, "--json").stdout
    assert job["parent_job_id"] is None


def test_shown_job_can_be_submitted_again(tm: Tm, submit: Submit, status: Wait, tmp_path: Path) -> None:
    job_id = submit("", name="shown", handle="a-handle", workload=with_token("echo $TOKEN"))
    file = tmp_path / "shown.json"
    file.write_text(tm("show", job_id, "--json").stdout)
    assert "s3cret" not in file.read_text()

    again = made(tm("submit", str(file), "--json"))

    assert again != job_id
    assert status(again, "COMPLETED")["handle"] is None
    assert tm("logs", again).stdout == "s3cret\n"


def test_clone_of_a_script_has_its_files(tm: Tm, status: Wait, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("import sys; print('hello', *sys.argv[1:])")
    file = tmp_path / "job.yaml"
    file.write_text("name: script\nworkload: {kind: script, path: hello.py}\nresource_config: {gpu_count: 0}\n")
    first = made(tm("submit", str(file), "--json"))
    (tmp_path / "hello.py").unlink()

    second = made(tm("clone", first, "--set", "workload.args=[there]", "--json"))

    status(second, "COMPLETED")
    assert tm("logs", second).stdout == "hello there\n"


def test_diff_names_the_fields_that_differ(tm: Tm, submit: Submit) -> None:
    one = submit("echo 1", name="one", scheduling_config={"priority": 3})
    other = submit("echo 2", name="other")

    result = tm("diff", "one", "other", "--json")

    document = json.loads(result.stdout)
    assert document["jobs"] == [one, other]
    assert document["differences"] == [
        {"field": "workload.argv", "values": [["sh", "-c", "echo 1"], ["sh", "-c", "echo 2"]]},
        {"field": "scheduling_config.priority", "values": [3, 5]},
    ]
    table = tm("diff", "one", "other").stdout
    assert "scheduling_config.priority" in table
    assert "do not differ" in tm("diff", one, one).stdout


def test_compare_shows_metrics_side_by_side(tm: Tm, client: Client, status: Wait, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\nfrom trainmaster.jobs import report\nreport.metrics(step=1, loss=float(sys.argv[1]))\n"
    )
    ids = []
    for loss in ("0.5", "0.25"):
        file = tmp_path / "job.yaml"
        file.write_text(
            f"name: loss-{loss}\nworkload: {{kind: script, path: train.py, args: ['{loss}']}}\n"
            "resource_config: {gpu_count: 0}\n"
        )
        ids.append(made(tm("submit", str(file), "--json")))
        status(ids[-1], "COMPLETED")

    rows = {line.split()[0]: line.split()[1:] for line in tm("compare", *ids).stdout.splitlines()[1:]}
    document = json.loads(tm("compare", *ids, "--json").stdout)

    assert rows["loss"] == ["0.5", "0.25"]
    assert rows["status"] == ["COMPLETED", "COMPLETED"]
    assert rows["workload.args"] == ['["0.5"]', '["0.25"]']
    assert [job["metrics"]["loss"] for job in document["jobs"]] == [0.5, 0.25]
    assert [each["field"] for each in document["differences"]] == ["workload.args"]
    assert tm("compare", ids[0]).exit_code == 2
    for job_id in ids:
        client.delete(job_id, purge=True)


def test_show_and_download_agree_about_the_output(tm: Tm, submit: Submit, status: Wait, tmp_path: Path) -> None:
    without, with_output = submit("true"), submit('echo x > "$TRAINMASTER_OUTPUT_DIR/x.txt"')
    status(without, "COMPLETED")
    status(with_output, "COMPLETED")

    assert "download" not in tm("show", without).stdout
    assert shown(tm, without)["output"]["model_uri"] is None
    assert "has left no output and no checkpoints" in tm("download", without).stderr
    assert "is COMPLETED" in tm("download", without).stderr
    assert f"trainmaster download {with_output}" in tm("show", with_output).stdout
    assert shown(tm, with_output)["output"]["model_uri"]
    assert tm("download", with_output, "-o", str(tmp_path / "out")).exit_code == 0
