from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from trainmaster.client import Client, RefusedError, UploadError
from trainmaster.client.file_upload import submit, upload_files
from trainmaster.client.local import LocalServer
from trainmaster.protocol.processes import ProcessIdentity


class Blobs:
    """A server that only keeps blobs."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.puts = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        digest = request.url.path.rpartition("/")[2]
        if digest == "backends":
            backends = [
                {"name": "local", "default": True, "here": True},
                {"name": "hpc", "default": False, "here": False},
            ]
            return httpx.Response(200, json={"status": "ok", "data": {"backends": backends}})
        if request.method == "HEAD":
            return httpx.Response(200 if digest in self.kept else 404)
        self.kept[digest] = request.read()
        self.puts += 1
        return httpx.Response(201, json={"status": "ok", "data": {}})


class Accepting(Blobs):
    """One that takes jobs too, but for those of a name that it refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(f"{request.method} {request.url.path.replace(digest(b'print(1)'), 'DIGEST')}")
        if request.method != "POST":
            return super().__call__(request)
        document = json.loads(request.read())
        if document["name"] == "refused":
            error = {"code": "INVALID_ARGUMENT", "message": "no"}
            return httpx.Response(400, json={"status": "error", "error": error, "meta": {}})
        shipped = {file["sha256"] for file in document["workload"].get("files", ())}
        answer = {"missing_blobs": sorted(shipped - self.kept.keys()), "job_id": "job-1"}
        return httpx.Response(200, json={"status": "ok", "data": answer})


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
def client(blobs: Blobs) -> Client:
    return Client("http://server.test", "a-key", transport=httpx.MockTransport(blobs))


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_server_is_asked_before_anything_is_sent(tmp_path: Path) -> None:
    server = Accepting()
    client = Client("http://server.test", "a-key", transport=httpx.MockTransport(server))
    (tmp_path / "train.py").write_bytes(b"print(1)")
    document: dict[str, Any] = {"name": "n", "workload": {"kind": "script", "path": "train.py"}}
    told: list[str] = []

    with pytest.raises(RefusedError):
        submit(client, {**document, "name": "refused"}, tmp_path, tell=told.append)
    assert (server.asked, server.kept, told) == (["POST /v1/jobs/validate"], {}, [])

    server.asked.clear()
    assert submit(client, document, tmp_path)["job_id"] == "job-1"
    assert server.asked == ["POST /v1/jobs/validate", "HEAD /v1/blobs/DIGEST", "PUT /v1/blobs/DIGEST", "POST /v1/jobs"]
    assert server.kept == {digest(b"print(1)"): b"print(1)"}


def test_nothing_is_sent_beside_a_digest_that_nobody_uploaded(tmp_path: Path) -> None:
    server = Accepting()
    client = Client("http://server.test", "a-key", transport=httpx.MockTransport(server))
    (tmp_path / "train.py").write_bytes(b"print(1)")
    files = [{"path": "rows.jsonl", "sha256": "0" * 64}]
    submit(client, {"name": "n", "workload": {"kind": "script", "path": "train.py", "files": files}}, tmp_path)
    assert server.asked == ["POST /v1/jobs/validate", "POST /v1/jobs"]  # which says what is missing


def test_job_without_files_is_submitted_at_once(tmp_path: Path) -> None:
    server = Accepting()
    client = Client("http://server.test", "a-key", transport=httpx.MockTransport(server))
    submit(client, {"name": "n", "workload": {"kind": "command", "argv": ["true"]}}, tmp_path)
    assert server.asked == ["POST /v1/jobs"]


def test_script_beside_the_job_file_is_sent_along(client: Client, blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)")
    document = {"name": "n", "workload": {"kind": "script", "path": "./train.py", "args": ["x"]}}

    shipped = upload_files(client, document, tmp_path)

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

    shipped = upload_files(client, {"workload": {"kind": "script", "path": "../train.py"}}, tmp_path / "jobs")

    assert shipped["workload"]["path"] == "train.py"
    assert shipped["workload"]["files"][0]["path"] == "train.py"


@pytest.mark.parametrize(
    "workload",
    [
        {"kind": "script", "path": "/server/train.py"},
        {"kind": "script", "path": "train.py", "working_directory": "/srv"},
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

    assert upload_files(client, {"workload": workload}, tmp_path) == {"workload": workload}
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

    shipped = upload_files(client, {"workload": {"kind": "command", "argv": ["x"], "files": files}}, tmp_path)

    assert shipped["workload"]["files"] == [
        {"path": "in/1.txt", "sha256": digest(b"1")},
        {"path": "data/a.txt", "sha256": digest(b"a")},
        {"path": "data/deep/run.sh", "sha256": digest(b"b"), "executable": True},
        {"path": "x", "sha256": "0" * 64},
    ]


def test_what_an_ignore_file_names_is_not_sent_with_its_directory(client: Client, tmp_path: Path) -> None:
    for name in ("src/a.py", "src/.env", "src/deep/b.py", "src/deep/out.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "src" / ".gitignore").write_text(".env\n")
    (tmp_path / "src" / "deep" / ".gitignore").write_text("*.bin\n.gitignore\n")
    document = upload_files(client, {"workload": {"kind": "command", "files": [{"source": "src"}]}}, tmp_path)
    assert paths_in(document) == ["src/.gitignore", "src/a.py", "src/deep/b.py"]


def test_file_that_the_server_has_is_not_sent_again(client: Client, blobs: Blobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"print(1)")
    document = {"workload": {"kind": "script", "path": "train.py"}}

    assert upload_files(client, document, tmp_path) == upload_files(client, document, tmp_path)
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
    with pytest.raises(UploadError, match=says):
        upload_files(client, {"workload": {"kind": "command", "files": [entry]}}, tmp_path)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a job file's neighbours."""
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "data" / "a.jsonl").write_bytes(b"a")
    (project / "data" / "b.jsonl").write_bytes(b"b")
    (project / "model").mkdir()
    (project / "model" / "config.json").write_bytes(b"{}")
    (project / "model" / ".hidden").write_bytes(b"x")
    (project / "train.py").write_bytes(b"print(1)")
    (tmp_path / "above.jsonl").write_bytes(b"above")
    return project


def training(path: str = "data/a.jsonl", **changes: Any) -> dict[str, Any]:
    return {
        "name": "n",
        "training_config": {
            "training_type": "SFT",
            "base_model": {"model_id": "org/model", **changes.pop("base_model", {})},
            **changes,
        },
        "data_config": {"sources": [{"path": path}]},
    }


def path_of(document: dict[str, Any]) -> str:
    return str(document["data_config"]["sources"][0]["path"])


def paths_in(document: dict[str, Any]) -> list[str]:
    return [file["path"] for file in document["workload"]["files"]]


def test_data_beside_the_job_file_is_sent_to_another_machine(client: Client, blobs: Blobs, project: Path) -> None:
    told: list[str] = []
    document = training("./data/a.jsonl")

    shipped = upload_files(client, document, project, tell=told.append)

    assert shipped["workload"] == {"kind": "trainer", "files": [{"path": "data/a.jsonl", "sha256": digest(b"a")}]}
    assert path_of(shipped) == "data/a.jsonl"
    assert blobs.kept == {digest(b"a"): b"a"}
    assert told == ["Sends data/a.jsonl (1 B)"]
    assert path_of(document) == "./data/a.jsonl"


@pytest.mark.parametrize(
    ("path", "named", "files"),
    [
        ("data", "data", ["data/a.jsonl", "data/b.jsonl"]),
        ("data/*.jsonl", "data/*.jsonl", ["data/a.jsonl", "data/b.jsonl"]),
        ("file://data/a.jsonl", "data/a.jsonl", ["data/a.jsonl"]),
        ("../above.jsonl", "shipped/0/above.jsonl", ["shipped/0/above.jsonl"]),
        ("../*.jsonl", "shipped/0", ["shipped/0/0-above.jsonl"]),
    ],
)
def test_directories_patterns_and_what_lies_above_are_sent(
    client: Client, project: Path, path: str, named: str, files: list[str]
) -> None:
    shipped = upload_files(client, training(path), project)
    assert path_of(shipped) == named
    assert paths_in(shipped) == files


def test_model_that_lies_beside_the_job_file_is_sent_without_what_is_hidden(client: Client, project: Path) -> None:
    shipped = upload_files(client, training("hf://org/data", base_model={"model_id": "model"}), project)
    assert shipped["training_config"]["base_model"] == {"model_id": "model", "source": "local"}
    assert paths_in(shipped) == ["model/config.json"]


def test_tokenizer_that_is_sent_is_still_named_by_a_path(client: Client, project: Path) -> None:
    document = training("hf://org/data", base_model={"tokenizer_id": "model"})
    document["data_config"]["preprocess"] = {"tokenizer_id": "./model"}
    shipped = upload_files(client, document, project)
    assert shipped["training_config"]["base_model"]["tokenizer_id"] == "./model"
    assert shipped["data_config"]["preprocess"]["tokenizer_id"] == "./model"
    assert paths_in(shipped) == ["model/config.json"]


def test_script_of_ones_own_is_sent(client: Client, project: Path) -> None:
    framework = {"type": "CUSTOM", "custom_script_path": "train.py"}
    shipped = upload_files(client, training("s3://bucket/rows", framework=framework), project)
    assert shipped["training_config"]["framework"]["custom_script_path"] == "train.py"
    assert paths_in(shipped) == ["train.py"]


@pytest.mark.parametrize("path", ["hf://org/data", "s3://bucket/rows", "https://host/rows.jsonl", "/srv/rows.jsonl"])
def test_what_lies_elsewhere_is_left_alone(client: Client, project: Path, path: str) -> None:
    assert upload_files(client, training(path), project) == training(path)


def test_name_with_another_type_than_a_file_is_left_alone(client: Client, project: Path) -> None:
    document = training()
    document["data_config"]["sources"] = [{"path": "data/a.jsonl", "type": "hf"}]
    assert upload_files(client, document, project) == document


@pytest.mark.parametrize("type_", ["file", "Local", None])
def test_name_whose_type_is_a_file_is_sent(client: Client, project: Path, type_: str | None) -> None:
    document = training()
    document["data_config"]["sources"][0]["type"] = type_
    assert paths_in(upload_files(client, document, project)) == ["data/a.jsonl"]


def test_files_that_are_declared_are_not_sent_twice(client: Client, blobs: Blobs, project: Path) -> None:
    document = {**training("data/a.jsonl"), "workload": {"kind": "trainer", "files": [{"source": "data"}]}}
    shipped = upload_files(client, document, project)
    assert paths_in(shipped) == ["data/a.jsonl", "data/b.jsonl"]
    assert path_of(shipped) == "data/a.jsonl"


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (training("absent.jsonl"), "data_config.sources[0].path"),
        (training("hf://a/b", base_model={"model_id": "./absent"}), "training_config.base_model.model_id"),
        (training("hf://a/b", base_model={"model_id": "m", "source": "local"}), "training_config.base_model.model_id"),
        (
            training("hf://a/b", framework={"type": "CUSTOM", "custom_script_path": "absent.py"}),
            "training_config.framework.custom_script_path",
        ),
    ],
)
def test_file_of_a_training_that_is_not_there_is_an_error(
    client: Client, project: Path, document: dict[str, Any], field: str
) -> None:
    with pytest.raises(UploadError, match=f"{re.escape(field)}: there is no .* in {re.escape(str(project))}"):
        upload_files(client, document, project)


def test_misspelt_file_leads_to_the_nearest_and_an_empty_directory_is_called_that(
    client: Client, project: Path
) -> None:
    (project / "train.jsonl").touch()
    (project / "nothing").mkdir()
    with pytest.raises(UploadError, match=r"trian\.jsonl; looked in .*; did you mean train\.jsonl\?$"):
        upload_files(client, training("trian.jsonl"), project)
    with pytest.raises(UploadError, match=r"sources\[0\]\.path: the directory nothing has no files"):
        upload_files(client, training("nothing"), project)


@pytest.mark.parametrize("model", ["model/nope", "model/tiny/nope", "somewhere/deep/nope"])
def test_mistyped_path_of_a_model_is_not_taken_for_a_name_on_the_hub(client: Client, project: Path, model: str) -> None:
    said = re.escape(f"there is no such file or directory: {model}; looked in {project}")
    with pytest.raises(UploadError, match=rf"^training_config\.base_model\.model_id: {said}"):
        upload_files(client, training("hf://a/b", base_model={"model_id": model}), project)
    document = training("hf://a/b")
    document["data_config"]["preprocess"] = {"tokenizer_id": model}
    with pytest.raises(UploadError, match=rf"^data_config\.preprocess\.tokenizer_id: {said}"):
        upload_files(client, document, project)


@pytest.mark.parametrize("model", ["org/model", "hf://model/nope", "artifacts:job-a/output/model", "gpt2"])
def test_name_on_the_hub_stays_as_it_is(client: Client, project: Path, model: str) -> None:
    document = training("hf://a/b", base_model={"model_id": model})
    assert upload_files(client, document, project) == document


@pytest.mark.parametrize("files", [[], [{"path": "other.py", "sha256": "0" * 64}]])
def test_script_that_is_not_there_says_so_and_where_it_was_looked_for(
    client: Client, project: Path, files: list[dict[str, str]]
) -> None:
    workload = {"kind": "script", "path": "absent.py", "files": files}
    said = re.escape(f"workload.path: there is no such file or directory: absent.py; looked in {project}")
    with pytest.raises(UploadError, match=said):
        upload_files(client, {"workload": workload}, project)


def test_local_server_finds_files_below_its_data_roots_where_they_are(
    client: Client, blobs: Blobs, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalServer(
        url=client.url,
        api_key="",
        version="",
        process=ProcessIdentity(pid=1, start_time=0, boot_id=""),
        data_dir=project,
        data_roots=(Path("/srv/data"), project),
    )
    monkeypatch.setattr("trainmaster.client.file_upload.running", lambda: local)
    shipped = upload_files(client, training(base_model={"model_id": "./model"}), project)
    assert path_of(shipped) == str(project / "data" / "a.jsonl")
    assert shipped["training_config"]["base_model"] == {"model_id": str(project / "model"), "source": "local"}
    assert "workload" not in shipped
    assert not blobs.kept
    there = upload_files(client, {**training(), "backend": "hpc"}, project)  # a cluster does not see them
    assert paths_in(there) == ["data/a.jsonl"]
    assert blobs.kept
    (project / "data" / "elsewhere.jsonl").symlink_to("../../above.jsonl")
    assert paths_in(upload_files(client, training("data/elsewhere.jsonl"), project)) == ["data/elsewhere.jsonl"]
    monkeypatch.setattr(
        "trainmaster.client.file_upload.running", lambda: replace(local, data_roots=(Path("/srv/data"),))
    )
    assert paths_in(upload_files(client, training(), project)) == ["data/a.jsonl"]


def test_file_that_the_server_finds_too_large_says_what_to_do(project: Path) -> None:
    def refuses(request: httpx.Request) -> httpx.Response:
        if request.method == "HEAD":
            return httpx.Response(404)
        error = {"code": "PAYLOAD_TOO_LARGE", "message": "at most 1 byte"}
        return httpx.Response(413, json={"status": "error", "error": error, "meta": {}})

    client = Client("http://server.test", "a-key", transport=httpx.MockTransport(refuses))
    with pytest.raises(UploadError, match=r"a\.jsonl: at most 1 byte; put it where the server finds it"):
        upload_files(client, training(), project)


def test_directory_of_too_many_files_says_what_to_do(
    client: Client, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.client.file_upload.MAX_FILES", 1)
    with pytest.raises(UploadError, match=r"sources\[0\]\.path: has 2 files, at most 1 go along"):
        upload_files(client, training("data"), project)
