from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest

from trainmaster.sdk import Client, ShippingError
from trainmaster.sdk.shipping import ship


class Blobs:
    """A server that only keeps blobs."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.puts = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        digest = request.url.path.rpartition("/")[2]
        if request.method == "HEAD":
            return httpx.Response(200 if digest in self.kept else 404)
        self.kept[digest] = request.read()
        self.puts += 1
        return httpx.Response(201, json={"status": "ok", "data": {}})


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
def client(blobs: Blobs) -> Client:
    return Client("http://server.test", "a-key", transport=httpx.MockTransport(blobs))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_script_beside_the_job_file_is_sent_along(client: Client, blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)")
    document = {"name": "n", "workload": {"kind": "script", "path": "./train.py", "args": ["x"]}}

    shipped = ship(client, document, tmp_path)

    assert shipped["workload"] == {
        "kind": "script",
        "path": "train.py",
        "args": ["x"],
        "files": [{"path": "train.py", "sha256": digest(b"print(1)")}],
    }
    assert blobs.kept == {digest(b"print(1)"): b"print(1)"}
    assert "files" not in document["workload"]


def test_script_above_the_job_file_goes_by_its_name(client: Client, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)")
    (tmp_path / "jobs").mkdir()

    shipped = ship(client, {"workload": {"kind": "script", "path": "../train.py"}}, tmp_path / "jobs")

    assert shipped["workload"]["path"] == "train.py"
    assert shipped["workload"]["files"][0]["path"] == "train.py"


@pytest.mark.parametrize(
    "workload",
    [
        {"kind": "script", "path": "/server/train.py"},
        {"kind": "script", "path": "train.py", "working_directory": "/srv"},
        {"kind": "script", "path": "absent.py"},
        {"kind": "script", "path": "train.py", "files": [{"path": "train.py", "sha256": "0" * 64}]},
        {"kind": "command", "argv": ["train.py"]},
        {"kind": "script"},
        {"kind": "script", "path": 3, "files": "nonsense"},
    ],
)
def test_workload_without_local_files_stays_as_it_is(
    client: Client, blobs: Blobs, tmp_path: Path, workload: dict[str, object]
) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)")

    assert ship(client, {"workload": workload}, tmp_path) == {"workload": workload}
    assert blobs.puts == 0


def test_sources_are_sent_files_and_directories_alike(client: Client, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_bytes(b"a")
    (tmp_path / "data" / "__pycache__").mkdir()
    (tmp_path / "data" / "__pycache__" / "x.pyc").write_bytes(b"junk")
    (tmp_path / "data" / "deep").mkdir()
    (tmp_path / "data" / "deep" / "run.sh").write_bytes(b"b")
    (tmp_path / "data" / "deep" / "run.sh").chmod(0o755)
    (tmp_path / "one.txt").write_bytes(b"1")
    files = [{"source": "one.txt", "path": "in/1.txt"}, {"source": "data"}, {"path": "x", "sha256": "0" * 64}]

    shipped = ship(client, {"workload": {"kind": "command", "argv": ["x"], "files": files}}, tmp_path)

    assert shipped["workload"]["files"] == [
        {"path": "in/1.txt", "sha256": digest(b"1")},
        {"path": "data/a.txt", "sha256": digest(b"a")},
        {"path": "data/deep/run.sh", "sha256": digest(b"b"), "executable": True},
        {"path": "x", "sha256": "0" * 64},
    ]


def test_file_that_the_server_has_is_not_sent_again(client: Client, blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)")
    document = {"workload": {"kind": "script", "path": "train.py"}}

    assert ship(client, document, tmp_path) == ship(client, document, tmp_path)
    assert blobs.puts == 1


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"source": "absent.txt"}, "No such file"),
        ({"source": "../outside.txt"}, "say with `path`"),
        ({"source": "/etc/hostname"}, "say with `path`"),
        ({"source": "a", "sha256": "0" * 64}, "not both"),
    ],
)
def test_source_that_cannot_be_sent_is_named(client: Client, tmp_path: Path, entry: dict[str, str], says: str) -> None:
    with pytest.raises(ShippingError, match=says):
        ship(client, {"workload": {"kind": "command", "files": [entry]}}, tmp_path)
