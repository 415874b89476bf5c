"""A server with TLS, end to end: people, workers over HTTP and the ranks' own questions all go by it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from job_server import NO_GPU
from real_server import ENDED, running, wait_for
from tls_files import TlsFiles, self_signed
from trainmaster.client import Client, UntrustedError

SAVES = """
from trainmaster.jobs import report
with report.checkpoint(step=1) as directory:
    (directory / "weights").write_text("w")
print("saved")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", params=["files", "http"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, files: TlsFiles) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("secured") / "data"
    options = {
        "--transport": request.param,
        "--tls-cert": str(files.cert),
        "--tls-key": str(files.key),
        "--data-root": str(directory.parent),
    }
    arguments = [word for option in options.items() for word in option]
    with (
        running(directory, *arguments, TRAINMASTER_CA=str(files.cert)) as server,
        Client(server.url, server.key, ca=files.cert) as client,
    ):
        yield SimpleNamespace(server=server, client=client, directory=directory)


def test_announced_address_is_https(secured: Any) -> None:
    assert secured.server.url.startswith("https://127.0.0.1:")
    assert json.loads((secured.directory / "server.json").read_text())["url"] == secured.server.url


def test_job_runs_and_saves(secured: Any) -> None:
    client: Client = secured.client
    script = secured.directory.parent / "saves.py"
    script.write_text(SAVES)
    document = {
        "name": "n",
        "workload": {"kind": "command", "argv": [sys.executable, str(script)]},
        "resource_config": NO_GPU,
    }
    job_id = client.submit(document)["job_id"]

    def ended() -> Any:
        job = client.get(job_id)
        return job if job["status"] in ENDED else None

    job = wait_for(ended, "the end of the job")
    assert job["status"] == "COMPLETED", job["error"]
    assert [line["message"] for line in client.follow_logs(job_id)] == ["saved"]
    assert [checkpoint["step"] for checkpoint in job["checkpoints"]] == [1]


def test_client_that_does_not_know_the_authority_is_told_what_to_do(secured: Any) -> None:
    with (
        Client(secured.server.url, secured.server.key) as stranger,
        pytest.raises(UntrustedError, match="TRAINMASTER_CA"),
    ):
        stranger.nodes()
