"""Commands about what jobs leave: download, checkpoints, usage, gc, and the plot of metrics."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.client import Client
from trainmaster.client.errors import DownloadError
from trainmaster.client.results import DownloadTarget, Results
from trainmaster.jobs import committed, verify
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import open_root

TRAIN = f"""
{sys.executable} - <<'PY'
from trainmaster.jobs import report
for step in range(1, 31):
    report.metrics(step=step, loss=1 / step, rate=0.1)
    if step % 10 == 0:
        with report.checkpoint(step=step, metrics={{"entropy": 3, "loss": 1 / step}}) as directory:
            (directory / "weights.bin").write_bytes(bytes([step]) * 3_000_000)
output = report.output_dir()
(output / "model").mkdir()
(output / "model" / "big.bin").write_bytes(bytes(range(256)) * 20_000)
(output / "notes.txt").write_text("notes")
PY
"""


@pytest.fixture(scope="module")
def trained(server: Server) -> str:
    """A job that has ended and left things."""
    document = {
        "name": "train",
        "labels": {"team": "vision"},
        "workload": {"kind": "command", "argv": ["sh", "-c", TRAIN]},
        "resource_config": {"gpu_count": 0, "cpu_cores": 1},
    }
    with Client(server.url, server.api_key) as client:
        job_id = client.submit(document)["job_id"]
        list(client.follow_logs(job_id))
        job = client.get(job_id)
        assert job["status"] == "COMPLETED", job["error"]
        return job_id


def test_download_brings_the_output(tm: Callable[..., Result], connected: Server, trained: str, tmp_path: Path) -> None:
    target = tmp_path / "here"
    result = tm("download", trained, "-o", str(target))
    assert result.exit_code == 0, result.output
    assert "2 files" in result.stdout
    assert (target / "notes.txt").read_text() == "notes"
    assert (target / "model" / "big.bin").read_bytes() == bytes(range(256)) * 20_000
    assert sorted(os.listdir(target)) == ["model", "notes.txt"]  # and no parts
    again = tm("download", trained, "-o", str(target), "--json")
    assert [each["file"] for each in json.loads(again.stdout)] == [
        str(target / "model" / "big.bin"),
        str(target / "notes.txt"),
    ]


def test_download_takes_patterns_and_says_when_none_fits(
    tm: Callable[..., Result], connected: Server, trained: str, tmp_path: Path
) -> None:
    assert tm("download", trained, "*.txt", "-o", str(tmp_path / "a")).exit_code == 0
    assert os.listdir(tmp_path / "a") == ["notes.txt"]
    assert tm("download", trained, "model/", "-o", str(tmp_path / "b")).exit_code == 0
    assert os.listdir(tmp_path / "b") == ["model"]
    nothing = tm("download", trained, "*.pt", "-o", str(tmp_path / "c"))
    assert nothing.exit_code == 1
    assert "no file matches *.pt; there are model/big.bin, notes.txt" in nothing.stderr


def test_download_to_where_nothing_can_be_made_says_so(
    tm: Callable[..., Result], connected: Server, trained: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = tm("download", trained, "--output", str(tmp_path / "file" / "below"))
    assert result.exit_code == 1
    assert "cannot make" in result.stderr


def test_download_of_a_checkpoint_is_a_checkpoint(
    tm: Callable[..., Result], connected: Server, trained: str, tmp_path: Path
) -> None:
    target = tmp_path / "latest"
    assert tm("download", trained, "--checkpoint", "latest", "-o", str(target)).exit_code == 0
    assert committed(target)
    assert verify(target).step == 30
    missing = tm("download", trained, "--checkpoint", "nope", "-o", str(tmp_path / "x"))
    assert (missing.exit_code, "no files of a checkpoint nope" in missing.stderr) == (1, True)
    no_best = tm("download", trained, "--checkpoint", "best", "-o", str(tmp_path / "x"))
    assert (no_best.exit_code, "no best checkpoint" in no_best.stderr) == (1, True)


def part_of(target: DownloadTarget) -> Path:
    version = hashlib.sha256(target.artifact["etag"].encode()).hexdigest()[:12]
    return target.path.with_name(f".{target.path.name}.{version}.part")


def test_download_goes_on_where_it_broke_off(client: Client, trained: str, tmp_path: Path) -> None:
    (target,) = client.results.targets(trained, tmp_path, patterns=["weights.bin"], checkpoint="latest")
    part_of(target).write_bytes(bytes([30]) * 1_000_000)
    came: list[int] = []
    client.results.fetch(trained, [target], tmp_path, progress=came.append)
    assert came[0] == 1_000_000  # were there already
    assert sum(came) == 3_000_000
    assert target.path.read_bytes() == bytes([30]) * 3_000_000


def test_download_that_differs_from_the_manifest_is_refused(client: Client, trained: str, tmp_path: Path) -> None:
    (target,) = client.results.targets(trained, tmp_path, patterns=["weights.bin"], checkpoint="latest")
    part_of(target).write_bytes(b"wrong" * 1000)
    with pytest.raises(DownloadError, match="digest differs"):
        client.results.fetch(trained, [target], tmp_path, progress=lambda _: None)
    assert list(tmp_path.iterdir()) == []
    client.results.download(trained, tmp_path, checkpoint="latest")  # the next try is a fresh one
    assert committed(tmp_path)


def test_download_never_writes_outside_its_directory(
    client: Client, trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    outside.mkdir()
    (home / "model").symlink_to(outside)
    with pytest.raises(DownloadError, match="leads out"):
        client.results.download(trained, home)
    assert list(outside.iterdir()) == []
    (artifact,) = [each for each in client.results.artifacts(trained) if each["path"] == "output/notes.txt"]
    for path in ("output/../../x", "output//etc/x", "output/./x"):
        hostile = {**artifact, "path": path}
        monkeypatch.setattr(Results, "artifacts", lambda *_, hostile=hostile, **__: iter([hostile]))
        with pytest.raises(DownloadError, match="out of the directory"):
            client.results.targets(trained, home)


def test_checkpoints_are_pinned_and_deleted(
    tm: Callable[..., Result], connected: Server, client: Client, trained: str
) -> None:
    first, second, third = (each["checkpoint_id"] for each in client.get(trained)["checkpoints"])
    listed = tm("checkpoints", trained, "--pin", first)
    assert "pinned" in listed.stdout
    assert "loss 0.1" in listed.stdout
    assert "entropy" not in listed.stdout  # --json has it
    refused = tm("checkpoints", trained, "--delete", first)
    assert (refused.exit_code, "pinned; unpin it first" in refused.stderr) == (1, True)
    done = json.loads(tm("checkpoints", trained, "--unpin", first, "--delete", second, "--json").stdout)
    assert [(each["checkpoint_id"], each["pinned"]) for each in done] == [(first, False), (third, False)]
    both = tm("checkpoints", trained, "--pin", first, "--delete", first)
    assert both.exit_code == 2


def test_checkpoints_verify_reads_all_and_tells_what_is_corrupt(
    tm: Callable[..., Result], connected: Server, client: Client, trained: str, tmp_path: Path
) -> None:
    fine = tm("checkpoints", "verify", trained)
    assert (fine.exit_code, fine.stdout.count(" ok"), "corrupt" in fine.stdout) == (0, 2, False), fine.output
    ids = [each["checkpoint_id"] for each in client.get(trained)["checkpoints"]]
    latest = json.loads(tm("checkpoints", "verify", trained, "latest", "--json").stdout)
    assert latest == [{"checkpoint": ids[-1], "step": 30, "size_bytes": 3_000_000, "ok": True, "problems": []}]

    weights = connected.directory / "artifacts" / trained / "checkpoints" / "checkpoint-30" / "weights.bin"
    whole = weights.read_bytes()
    for damage in (lambda: weights.write_bytes(b"x" + whole[1:]), lambda: weights.write_bytes(b"x"), weights.unlink):
        damage()
        result = tm("checkpoints", "verify", trained)
        assert result.exit_code == 1
        (corrupt,) = [line for line in result.stdout.splitlines() if "corrupt" in line]
        assert ids[-1] in corrupt
        assert "weights.bin" in corrupt
        assert tm("checkpoints", "verify", trained, ids[0]).exit_code == 0
    weights.write_bytes(whole)
    missing = tm("checkpoints", "verify", trained, "nope")
    assert (missing.exit_code, "no checkpoint nope" in missing.stderr) == (1, True)


def test_checkpoints_verify_takes_a_directory_and_a_store(
    tm: Callable[..., Result], tmp_path: Path, s3_root: str
) -> None:
    for where in (str(tmp_path / "root"), s3_root):
        root = open_root(where)
        for step in (1, 2):
            manifest = Reporter({}).new_manifest(step=step)
            with root.draft(f"run/{step}", job_id="job", attempt=1) as draft:
                (draft / "weights").write_bytes(bytes([step]) * 100)
                root.commit(draft, f"run/{step}", manifest, check_owner=lambda: None)
        result = tm("checkpoints", "verify", where)
        assert result.exit_code == 0, result.output
        assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == ["run/1", "run/2"]
        one = json.loads(tm("checkpoints", "verify", f"{where}/run/2", "--json").stdout)
        assert [(each["checkpoint"], each["ok"]) for each in one] == [("2", True)]
        nothing = tm("checkpoints", "verify", f"{where}/elsewhere")
        assert (nothing.exit_code, "no committed checkpoint" in nothing.stderr) == (1, True)
        assert tm("checkpoints", "verify", where, "latest").exit_code == 2
    (tmp_path / "root" / "run" / "1" / "weights").write_bytes(b"other")
    (tmp_path / "root" / "run" / "2" / "manifest.json").write_bytes(b"other")
    result = tm("checkpoints", "verify", str(tmp_path / "root"), "--json")
    assert result.exit_code == 1
    told = {each["checkpoint"]: (each["ok"], each["problems"][0].split(":")[0]) for each in json.loads(result.stdout)}
    assert told == {"run/1": (False, "weights"), "run/2": (False, "manifest.json")}


def test_checkpoints_list_may_be_said(tm: Callable[..., Result], connected: Server, trained: str) -> None:
    listed = [tm("checkpoints", *words).stdout for words in (("list", trained, "--json"), ("--json", trained))]
    assert listed[0] == listed[1] == tm("checkpoints", trained, "--json").stdout
    assert len(json.loads(listed[0])) == 2


def test_usage_is_a_table_and_a_document(tm: Callable[..., Result], connected: Server, trained: str) -> None:
    table = tm("usage", "--by", "label:team").stdout.splitlines()
    assert table[0].split() == ["TEAM", "JOBS", "ATTEMPTS", "GPU-HOURS", "CPU-HOURS", "HOURS"]
    assert table[1].split()[:3] == ["vision", "1", "1"]
    assert table[-1].startswith("total")
    document = json.loads(tm("usage", "--since", "1h", "--by", "job", "--json").stdout)
    assert trained in [row["key"] for row in document["rows"]]
    assert "Nothing ran" in tm("usage", "--since", "2001-01-01", "--until", "2001-01-02").stdout
    assert tm("usage", "--since", "soon").exit_code == 2
    wrong = tm("usage", "--by", "colour")
    assert (wrong.exit_code, "label:KEY" in wrong.stderr) == (1, True)


def test_gc_keeps_everything_by_default(tm: Callable[..., Result], connected: Server, trained: str) -> None:
    assert "Nothing to remove" in tm("gc", "--dry-run").stdout
    assert json.loads(tm("gc", "--json").stdout) == {"dry_run": False, "kinds": []}


def test_metrics_are_columns_in_a_pipe_and_a_plot_on_a_terminal(
    tm: Callable[..., Result], connected: Server, trained: str
) -> None:
    piped = tm("metrics", trained).stdout
    assert piped.splitlines()[0].split() == ["METRIC", "LAST", "LEAST", "MOST", "COURSE"]
    assert "┤" not in piped
    command = f"{sys.executable} -m trainmaster metrics {trained}"
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    shown: Any = subprocess.run(
        ["script", "-qec", command, "/dev/null"], capture_output=True, text=True, env=environment, check=True
    )
    assert "┤" in shown.stdout
    assert "└──" in shown.stdout
    assert json.loads(tm("metrics", trained, "--json").stdout)["series"][0]["name"] == "loss"
