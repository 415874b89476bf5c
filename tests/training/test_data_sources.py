"""Models and data from every kind of source, each with a real server behind it."""

from __future__ import annotations

import io
import json
import os
import socket
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_servers import FileServer, Hub, serving

from trainmaster.jobs import objects
from trainmaster.protocol import sockets
from trainmaster.server.core.spec.configs import BaseModelConfig
from trainmaster.server.core.spec.data import DataSource
from trainmaster.training.document import LocalSource
from trainmaster.training.fetching import cache, fetch_source, http
from trainmaster.training.fetching.access import Access, Service
from trainmaster.training.fetching.file_choice import card_data, choose, choose_from_hub
from trainmaster.training.fetching.models import fetch_model, fetch_tokenizer, left_to_the_script
from trainmaster.training.steps import CredentialsError, InputError, SourceUnavailableError

ROWS = b'{"text": "a"}\n{"text": "b"}\n'
MODEL = {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": b"weights", "tokenizer.json": b"{}"}


@pytest.fixture
def access(tmp_path: Path) -> Access:
    for name in ("work", "root", "cache"):
        (tmp_path / name).mkdir()
    return Access(cache=tmp_path / "cache", working_directory=tmp_path / "work", data_roots=(tmp_path / "root",))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(http, "BACK_OFF_S", (0.0, 0.0))
    with serving(FileServer()) as started:
        yield started


def content(local: LocalSource) -> list[bytes]:
    return [file.read_bytes() for file in local.files]


# Files


def test_relative_path_is_a_shipped_file(access: Access) -> None:
    (access.working_directory / "a.jsonl").write_bytes(ROWS)
    found = fetch_source(DataSource(path="a.jsonl"), access)
    assert (content(found), found.format) == ([ROWS], "jsonl")


def test_absolute_path_and_file_uri_lie_below_a_data_root(access: Access, tmp_path: Path) -> None:
    path = tmp_path / "root" / "a.csv"
    path.write_text("text\na\n")
    for name in (str(path), f"file://{path}"):
        assert fetch_source(DataSource(path=name), access).files == (path,)


def test_directory_and_pattern_mean_all_files_of_the_format_sorted(access: Access, tmp_path: Path) -> None:
    directory = tmp_path / "root" / "set"
    (directory / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl.gz", "README.md", ".hidden.jsonl", "dataset_info.json"):
        (directory / name).write_bytes(ROWS)
    names = [file.name for file in fetch_source(DataSource(path=str(directory)), access).files]
    assert names == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]
    names = [file.name for file in fetch_source(DataSource(path=f"{directory}/*.jsonl"), access).files]
    assert names == ["a.jsonl", "b.jsonl"]


def test_split_chooses_files_by_their_names(access: Access) -> None:
    for name in ("train.jsonl", "test.jsonl", "valid-0.jsonl"):
        (access.working_directory / name).write_bytes(ROWS)
    for split, file in (("train", "train.jsonl"), ("test", "test.jsonl"), ("validation", "valid-0.jsonl")):
        found = fetch_source(DataSource(path="*.jsonl", split=split), access)
        assert [path.name for path in found.files] == [file]
    with pytest.raises(InputError, match="has no split 'dev2'; it has train, validation, test"):
        fetch_source(DataSource(path="*.jsonl", split="dev2"), access)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", "no such file in the job's working directory; was it shipped"),
        ("{root}/missing.jsonl", "no such file or directory on the machine that runs the job"),
        ("{root}/*.csv", "no file matches this pattern"),
        ("{root}/empty", "the directory is empty"),
        ("{outside}/secret.jsonl", "lets jobs read below its data roots alone"),
        ("{outside}/*.jsonl", "lets jobs read below its data roots alone"),
        ("../outside/secret.jsonl", "lets jobs read below its data roots alone"),
        ("{root}/link.jsonl", "lets jobs read below its data roots alone"),
        ("{root}/mixed", r"several formats \(csv, jsonl\); say which with `format`"),
        ("{root}/rows.xlsx", "spreadsheets are not read; save it as CSV"),
        ("{root}/odd", "the name odd does not tell the format; say it with `format`: arrow, csv, json"),
    ],
)
def test_path_that_cannot_be_read_is_refused(path: str, message: str, access: Access, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "empty").mkdir()
    (root / "mixed").mkdir()
    for name in ("a.csv", "a.jsonl"):
        (root / "mixed" / name).write_bytes(ROWS)
    for name in ("odd", "rows.xlsx"):
        (root / name).write_bytes(ROWS)
    outside.mkdir()
    (outside / "secret.jsonl").write_bytes(ROWS)
    (root / "link.jsonl").symlink_to(outside / "secret.jsonl")
    with pytest.raises(InputError, match=message):
        fetch_source(DataSource(path=path.format(root=root, outside=outside)), access)


def test_format_that_is_said_wins_over_the_name(access: Access, tmp_path: Path) -> None:
    (tmp_path / "root" / "odd").write_bytes(ROWS)
    assert fetch_source(DataSource(path=f"{tmp_path}/root/odd", format="jsonl"), access).format == "jsonl"
    (tmp_path / "root" / "a.json").write_bytes(ROWS)
    assert fetch_source(DataSource(path=f"{tmp_path}/root/a.json", format="jsonl"), access).format == "jsonl"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DataSource(path="a.jsonl", type="ftp"), "unknown type 'ftp'; choices: file, local, hf"),
        (DataSource(path="s3://b/a.jsonl", type="hf"), "its type is hf, and its path begins with s3://"),
        (DataSource(path="scaidrive://a.jsonl"), "this server knows no scaidrive; its operator sets scaidrive_url"),
        (DataSource(path="hf:///justaname"), "write it as hf://owner/name"),
    ],
)
def test_source_that_makes_no_sense_is_refused(source: DataSource, message: str, access: Access) -> None:
    with pytest.raises(InputError, match=message):
        fetch_source(source, access)


# http


def test_url_is_fetched_once_while_it_stays_the_same(server: FileServer, access: Access) -> None:
    server.files["/data/a.jsonl"] = ROWS
    source = DataSource(path=f"{server.url}/data/a.jsonl?signature=secret")
    first, second = (fetch_source(source, access) for _ in range(2))
    assert content(first) == [ROWS]
    assert first.files == second.files
    assert "secret" not in first.path
    assert [headers.get("if-none-match") is not None for _, headers in server.requests] == [False, True]


def test_url_that_changed_is_fetched_again_and_the_old_file_stays(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS
    first = fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)
    server.files["/a.jsonl"] = ROWS * 2
    second = fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)
    assert (content(first), content(second)) == ([ROWS], [ROWS * 2])


def test_download_that_breaks_off_goes_on_where_it_was(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS * 1000
    server.cut_after = [5000, 2000]
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [ROWS * 1000]
    ranges = [headers.get("range") for _, headers in server.requests]
    assert ranges == [None, "bytes=5000-", "bytes=7000-"]


def test_download_goes_on_in_another_process_after_a_crash(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS * 1000
    server.cut_after = [5000, 0, 0]
    with pytest.raises(SourceUnavailableError, match="the transfer broke off"):
        fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [ROWS * 1000]
    assert server.requests[-1][1]["range"] == "bytes=5000-"


def test_file_that_changed_in_between_is_fetched_from_its_beginning(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS * 1000
    server.cut_after = [5000, 0, 0]
    with pytest.raises(SourceUnavailableError):
        fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)
    server.files["/a.jsonl"] = b"{}\n" + ROWS * 1000
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [b"{}\n" + ROWS * 1000]


def test_server_without_etags_is_asked_for_the_whole_file_again(server: FileServer, access: Access) -> None:
    server.validators = False
    server.files["/a.jsonl"] = ROWS * 1000
    server.cut_after = [5000]
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [ROWS * 1000]
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [ROWS * 1000]
    assert len(server.requests) == 3


def test_two_fetch_once(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS * 100_000
    found: list[LocalSource] = []

    def fetch() -> None:
        found.append(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access))

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.files for each in found}) == 1
    assert sum("if-none-match" not in headers for _, headers in server.requests) == 1


@pytest.mark.parametrize(
    ("statuses", "error", "message"),
    [
        ([404], InputError, "the server answers 404 Not Found; check the address"),
        ([410], InputError, "answers 410"),
        ([401], CredentialsError, "answers 401 Unauthorized: it wants other credentials than none"),
        ([403], CredentialsError, "answers 403"),
        ([503, 429, 500], SourceUnavailableError, "answers 500 Internal Server Error"),
    ],
)
def test_refusal_of_a_server_is_told_by_its_kind(
    statuses: list[int], error: type[Exception], message: str, server: FileServer, access: Access
) -> None:
    server.files["/a.jsonl"] = ROWS
    server.statuses = statuses
    with pytest.raises(error, match=message):
        fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)


def test_server_that_comes_back_is_asked_again(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS
    server.statuses = [503, 502]
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [ROWS]


def test_server_that_is_not_there_is_unavailable(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACK_OFF_S", (0.0,))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(SourceUnavailableError, match=r"127\.0\.0\.1 does not answer"):
            fetch_source(DataSource(path=f"http://127.0.0.1:{free.getsockname()[1]}/a.jsonl"), access)


def test_private_addresses_are_refused_unless_allowed(server: FileServer, access: Access) -> None:
    server.files["/a.jsonl"] = ROWS
    strict = replace(access, private_urls=False)
    for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433"):
        port = server.url.rpartition(":")[2]
        with pytest.raises(InputError, match="which is not a public address"):
            fetch_source(DataSource(path=f"http://{host}:{port}/a.jsonl"), strict)
    assert not server.requests


def test_redirect_is_followed_and_checked_like_any_address(
    server: FileServer, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a.jsonl"] = ROWS
    server.redirects["/moved"] = "/a.jsonl"
    server.redirects["/away"] = server.url.replace("127.0.0.1", "localhost") + "/a.jsonl"
    server.redirects["/loop"] = "/loop"
    server.redirects["/odd"] = "file:///etc/passwd"
    for path in ("/moved", "/away"):
        assert content(fetch_source(DataSource(path=server.url + path, format="jsonl"), access)) == [ROWS]
    with pytest.raises(InputError, match="redirected more than 10 times"):
        fetch_source(DataSource(path=f"{server.url}/loop", format="jsonl"), access)
    with pytest.raises(InputError, match="only http and https are read"):
        fetch_source(DataSource(path=f"{server.url}/odd", format="jsonl"), access)
    # The first address counts as public here, as one of the Internet would; the second does not.
    monkeypatch.setattr(sockets, "is_public", lambda address: str(address) == "127.0.0.1")
    server.redirects["/inside"] = server.url.replace("127.0.0.1", "127.0.0.2") + "/a.jsonl"
    strict = replace(access, private_urls=False)
    assert content(fetch_source(DataSource(path=f"{server.url}/moved", format="jsonl"), strict)) == [ROWS]
    with pytest.raises(InputError, match=r"it leads to 127\.0\.0\.2, which is not a public address"):
        fetch_source(DataSource(path=f"{server.url}/inside", format="jsonl"), strict)


@pytest.mark.parametrize("url", ["https://host:99999/a", "https://[::1/a", "https://me:hunter2/x@host/a"])
def test_url_that_is_none_is_refused_without_showing_it(access: Access, url: str) -> None:
    with pytest.raises(InputError, match="what begins with https:// here is not a URL") as caught:
        fetch_source(DataSource(path=url), access)
    assert "hunter2" not in str(caught.value)


def test_url_with_a_password_is_refused_without_showing_it(access: Access) -> None:
    with pytest.raises(InputError, match="must not hold a user or a password") as caught:
        fetch_source(DataSource(path="https://me:hunter2@example.com/a.jsonl"), access)
    assert "hunter2" not in str(caught.value)


def test_file_that_does_not_fit_on_the_disk_is_refused_before_it_is_fetched(
    server: FileServer, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a.jsonl"] = ROWS
    monkeypatch.setattr(cache, "SPARE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="No space left on device"):
        fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)


def test_check_fetches_the_beginning_alone(server: FileServer, access: Access) -> None:
    server.files |= {"/a.jsonl": ROWS * 300_000, "/small.jsonl": ROWS, "/a.parquet": b"PAR1" * 1_000_000}
    look = replace(access, beginning_bytes=1 << 20)
    found = fetch_source(DataSource(path=f"{server.url}/a.jsonl"), look)
    assert not found.whole
    assert found.files[0].stat().st_size < 3 << 20
    assert fetch_source(DataSource(path=f"{server.url}/small.jsonl"), look).whole
    with pytest.raises(InputError, match="more than 1 MiB, and rows of parquet cannot be read from its beginning"):
        fetch_source(DataSource(path=f"{server.url}/a.parquet"), look)
    # What a check left behind is not taken for the file.
    assert content(fetch_source(DataSource(path=f"{server.url}/a.jsonl"), access)) == [ROWS * 300_000]


# ScaiDrive and ScaiAtlas


def with_service(access: Access, server: FileServer, name: str, token: str = "good") -> Access:
    return replace(
        access, services={name: Service(name=name, url=f"{server.url}/api", token=token)}, private_urls=False
    )


@pytest.mark.parametrize("name", ["scaidrive", "scaiatlas"])
def test_service_is_asked_with_the_forwarded_token(name: str, server: FileServer, access: Access) -> None:
    server.token = "good"
    server.files["/api/team/my data.jsonl"] = ROWS
    found = fetch_source(DataSource(path=f"{name}://team/my data.jsonl"), with_service(access, server, name))
    assert content(found) == [ROWS]
    with pytest.raises(CredentialsError, match="answers 401 Unauthorized: it wants other credentials than it got"):
        fetch_source(DataSource(path=f"{name}://team/my data.jsonl"), with_service(access, server, name, "bad"))
    with pytest.raises(CredentialsError, match=r"no token for .* came with the job; send it as the header X-Scai"):
        fetch_source(DataSource(path=f"{name}://team/my data.jsonl"), with_service(access, server, name, ""))
    with pytest.raises(InputError, match=r"without '\.' and '\.\.'"):
        fetch_source(DataSource(path=f"{name}://team/../a.jsonl"), with_service(access, server, name))


def test_token_of_a_service_stays_with_the_service(
    server: FileServer, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "is_public", lambda address: True)
    with serving(FileServer(files={"/b.jsonl": ROWS})) as elsewhere:
        server.redirects["/api/b.jsonl"] = f"{elsewhere.url}/b.jsonl"
        assert content(
            fetch_source(DataSource(path="scaidrive://b.jsonl"), with_service(access, server, "scaidrive"))
        ) == [ROWS]
        assert "authorization" not in elsewhere.requests[0][1]
        assert server.requests[0][1]["authorization"] == "Bearer good"


def test_model_of_scaiatlas_is_an_archive_at_a_revision(server: FileServer, access: Access) -> None:
    server.token = "good"
    server.files["/api/models/tiny"] = tar_of(MODEL, top="tiny/")
    base = BaseModelConfig(model_id="models/tiny", source="scaiatlas", revision="v2")
    assert names_in(fetch_model(base, with_service(access, server, "scaiatlas"))) == sorted(MODEL)
    assert server.requests[0][0] == "/api/models/tiny?revision=v2"


# Archives


def tar_of(files: dict[str, bytes], *, top: str = "", mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(top + name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes], *, top: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(top + name, data)
    return buffer.getvalue()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def tar_with(member: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member)
    return buffer.getvalue()


def link(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("config.json")
    member.type, member.linkname = kind, "/etc/passwd"
    return member


def zip_link() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        member = zipfile.ZipInfo("config.json")
        member.external_attr = 0o120777 << 16
        archive.writestr(member, "/etc/passwd")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        tar_of(MODEL),
        tar_of(MODEL, mode="w"),
        tar_of(MODEL, top="./"),
        tar_of(MODEL, top="deep/model/"),
        zip_of(MODEL),
        zip_of(MODEL, top="m/"),
    ],
)
def test_model_in_an_archive_is_unpacked_once(archive: bytes, server: FileServer, access: Access) -> None:
    server.files["/model.bin"] = archive
    base = BaseModelConfig(model_id=f"{server.url}/model.bin")
    first, second = fetch_model(base, access), fetch_model(base, access)
    assert first == second
    assert names_in(first) == sorted(MODEL)
    assert fetch_tokenizer(base.model_id, base, access) == first


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (b"no archive", "is not an archive; expected .tar, .tar.gz or .zip"),
        (tar_of(MODEL)[:-30], "the archive cannot be read"),
        (tar_of({"../config.json": b"{}"}), "would be unpacked outside"),
        (tar_of({"/config.json": b"{}"}), "would be unpacked outside"),
        (zip_of({"../config.json": b"{}"}), "would be unpacked outside"),
        (tar_with(link(tarfile.SYMTYPE)), "is not a plain file; links and devices are not unpacked"),
        (tar_with(link(tarfile.LNKTYPE)), "is not a plain file"),
        (tar_with(link(tarfile.CHRTYPE)), "is not a plain file"),
        (zip_link(), "is not a plain file"),
        (tar_of({"weights.safetensors": b""}), "holds no config.json"),
        (tar_of({"a/config.json": b"", "b/config.json": b""}), "holds several models"),
    ],
)
def test_archive_that_is_none_or_reaches_out_is_refused(
    archive: bytes, message: str, server: FileServer, access: Access, tmp_path: Path
) -> None:
    server.files["/model.tar"] = archive
    with pytest.raises(InputError, match=message):
        fetch_model(BaseModelConfig(model_id=f"{server.url}/model.tar"), access)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("archive", [tar_of, zip_of])
def test_archive_that_unpacks_to_much_is_refused_for_a_check(
    archive: Callable[[dict[str, bytes]], bytes], server: FileServer, access: Access, tmp_path: Path
) -> None:
    bomb = {**MODEL, **{f"{number}.txt": bytes(1 << 20) for number in range(9)}}
    server.files["/model.zip"] = archive(bomb)
    server.files["/good.zip"] = archive(MODEL)
    brief = replace(access, beginning_bytes=16 << 20)
    assert fetch_tokenizer(f"{server.url}/good.zip", BaseModelConfig(model_id=f"{server.url}/good.zip"), brief)
    assert len(server.files["/model.zip"]) < 1 << 20
    with pytest.raises(InputError, match=r"too large to be unpacked for a check \(8 MiB\)"):
        fetch_tokenizer(
            f"{server.url}/model.zip",
            BaseModelConfig(model_id=f"{server.url}/model.zip"),
            replace(access, beginning_bytes=1 << 20),
        )
    assert sum(file.stat().st_size for file in (tmp_path / "cache" / "models").rglob("*.txt")) <= 8 << 20


def test_local_model_is_a_directory_below_a_data_root(access: Access, tmp_path: Path) -> None:
    directory = tmp_path / "root" / "model"
    directory.mkdir()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        fetch_model(BaseModelConfig(model_id=str(directory)), access)
    (directory / "config.json").write_text("{}")
    assert fetch_model(BaseModelConfig(model_id=str(directory)), access) == directory
    with pytest.raises(InputError, match="holds no tokenizer"):
        fetch_tokenizer(str(directory), BaseModelConfig(model_id=str(directory)), access)
    with pytest.raises(InputError, match="is not a directory"):
        fetch_model(BaseModelConfig(model_id=str(directory / "config.json")), access)
    with pytest.raises(InputError, match="below its data roots alone"):
        fetch_model(BaseModelConfig(model_id=str(tmp_path)), access)


@pytest.mark.parametrize(
    ("base", "left"),
    [
        ({"model_id": "org/model"}, True),
        ({"model_id": "org/model", "source": "huggingface"}, False),
        ({"model_id": "/srv/model"}, False),
        ({"model_id": "s3://bucket/model"}, False),
    ],
)
def test_mere_name_is_left_to_a_script_of_ones_own(base: dict[str, str], left: bool) -> None:
    assert left_to_the_script(BaseModelConfig(**base)) is left


# S3


def put(uri: str, data: bytes) -> None:
    place = objects.open_place(uri)
    objects.put(place, place.key, data)


def test_object_prefix_and_pattern_are_fetched_from_s3(s3_root: str, access: Access) -> None:
    for name in ("a.jsonl", "b.jsonl", "notes.md"):
        put(f"{s3_root}/data/{name}", ROWS + name.encode())
    one = fetch_source(DataSource(path=f"{s3_root}/data/a.jsonl"), access)
    assert content(one) == [ROWS + b"a.jsonl"]
    for path in (f"{s3_root}/data", f"{s3_root}/data/", f"{s3_root}/data/*.jsonl"):
        found = fetch_source(DataSource(path=path), access)
        assert content(found) == [ROWS + b"a.jsonl", ROWS + b"b.jsonl"]
        assert found.files[0] == one.files[0]
    put(f"{s3_root}/data/a.jsonl", ROWS)
    assert content(fetch_source(DataSource(path=f"{s3_root}/data/a.jsonl"), access)) == [ROWS]
    with pytest.raises(InputError, match="the store has no such object, and none below it"):
        fetch_source(DataSource(path=f"{s3_root}/nothing.jsonl"), access)


def test_model_of_s3_is_a_prefix_or_an_archive(s3_root: str, access: Access) -> None:
    for name, data in MODEL.items():
        put(f"{s3_root}/model/{name}", data)
    directory = fetch_model(BaseModelConfig(model_id=f"{s3_root}/model"), access)
    assert names_in(directory) == sorted(MODEL)
    assert fetch_model(BaseModelConfig(model_id=f"{s3_root}/model/"), access).is_dir()
    put(f"{s3_root}/model.tar.gz", tar_of(MODEL))
    assert names_in(fetch_model(BaseModelConfig(model_id=f"{s3_root}/model.tar.gz"), access)) == sorted(MODEL)


def test_check_reads_the_beginning_of_an_object(s3_root: str, access: Access) -> None:
    put(f"{s3_root}/a.jsonl", ROWS * 50_000)
    found = fetch_source(DataSource(path=f"{s3_root}/a.jsonl"), replace(access, beginning_bytes=1 << 20))
    assert not found.whole
    assert found.files[0].stat().st_size == 1 << 20


def test_wrong_keys_of_s3_are_refused_for_good(s3_root: str, access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(CredentialsError, match=r"give AWS_ACCESS_KEY_ID and .* in training_config\.environment"):
        fetch_source(DataSource(path=f"{s3_root}/a.jsonl"), access)


# What other jobs left


def test_model_that_another_job_left_is_read_where_it_lies(access: Access, tmp_path: Path) -> None:
    artifacts = tmp_path / "artifacts"
    left = artifacts / "job-a" / "output" / "model"
    left.mkdir(parents=True)
    for name, content in MODEL.items():
        (left / name).write_bytes(content)
    (left.parent / "out").symlink_to("../../job-b/output")
    (artifacts / "job-b" / "output").mkdir(parents=True)
    (artifacts / "job-b" / "output" / "config.json").write_bytes(b"{}")
    name = "artifacts:job-a/output/model"
    inside = replace(access, artifacts=artifacts)
    assert fetch_model(BaseModelConfig(model_id=name), inside) == left
    assert fetch_model(BaseModelConfig(model_id=name, source="artifacts"), inside) == left
    assert fetch_tokenizer(name, BaseModelConfig(model_id="org/other"), inside) == left
    assert not left_to_the_script(BaseModelConfig(model_id=name))
    with pytest.raises(InputError, match=r"holds no config\.json"):
        fetch_model(BaseModelConfig(model_id="artifacts:job-a/output"), inside)
    for wrong in ("output/absent", "output/out"):
        with pytest.raises(InputError, match="has left no such directory, or it was removed since"):
            fetch_model(BaseModelConfig(model_id=f"artifacts:job-a/{wrong}"), inside)
    with pytest.raises(InputError, match="is no directory of a job"):
        fetch_model(BaseModelConfig(model_id="artifacts:job-a/../job-b/output"), inside)
    with pytest.raises(InputError, match="known only where jobs run"):
        fetch_model(BaseModelConfig(model_id=name), access)


# The Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "users-hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(Hub()) as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        yield started


def test_model_of_the_hub_is_fetched_once_and_without_what_it_has_twice(hub: Hub, access: Access) -> None:
    more = {"pytorch_model.bin": b"x", "model.onnx": b"x", "original/a.pth": b"x", "README.md": b"x"}
    hub.repositories["models/org/tiny"] = {**MODEL, **more}
    shares: list[float] = []
    directory = fetch_model(BaseModelConfig(model_id="org/tiny"), access, shares.append)
    assert names_in(directory) == sorted([*MODEL, "README.md"])
    assert directory.is_relative_to(access.cache)
    assert shares[-1] == 1.0
    downloads = len(hub.downloads)
    assert fetch_model(BaseModelConfig(model_id="hf://org/tiny"), access) == directory
    assert len(hub.downloads) == downloads


def test_model_without_safetensors_is_taken_as_it_is(hub: Hub, access: Access) -> None:
    hub.repositories["models/org/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    assert "pytorch_model.bin" in names_in(fetch_model(BaseModelConfig(model_id="org/old"), access))
    hub.repositories["models/org/empty"] = {"config.json": b"{}"}
    with pytest.raises(InputError, match="holds no weights that can be loaded"):
        fetch_model(BaseModelConfig(model_id="org/empty"), access)


def test_tokenizer_of_the_hub_comes_without_weights(hub: Hub, access: Access) -> None:
    hub.repositories["models/org/tiny"] = MODEL
    directory = fetch_tokenizer("org/tiny", BaseModelConfig(model_id="/srv/other"), access)
    assert names_in(directory) == ["config.json", "tokenizer.json"]


def test_users_own_cache_of_the_hub_is_used_where_it_has_the_model(hub: Hub, access: Access, tmp_path: Path) -> None:
    hub.repositories["models/org/tiny"] = MODEL
    (tmp_path / "users-hub-cache" / "models--org--tiny").mkdir(parents=True)
    assert fetch_model(BaseModelConfig(model_id="org/tiny"), access).is_relative_to(tmp_path / "users-hub-cache")


def test_revision_of_the_hub_is_asked_for(hub: Hub, access: Access) -> None:
    hub.repositories["models/org/tiny"] = MODEL
    assert fetch_model(BaseModelConfig(model_id="org/tiny", revision="v1"), access).is_dir()
    with pytest.raises(InputError, match="org/tiny@v9: the repository has no such revision"):
        fetch_model(BaseModelConfig(model_id="org/tiny", revision="v9"), access)


def test_refusals_of_the_hub_are_told_by_their_kind(hub: Hub, access: Access) -> None:
    hub.repositories["models/org/gated"] = MODEL
    hub.gated.add("models/org/gated")
    with pytest.raises(CredentialsError, match=r"no token was sent.*training_config\.environment\.HF_TOKEN"):
        fetch_model(BaseModelConfig(model_id="org/gated"), access)
    assert fetch_model(BaseModelConfig(model_id="org/gated"), replace(access, hub_token="hf_good")).is_dir()
    with pytest.raises(CredentialsError, match="the Hub refuses"):
        fetch_model(BaseModelConfig(model_id="org/other"), replace(access, hub_token="hf_bad"))
    with pytest.raises(InputError, match="the Hub has no such repository, or it is private"):
        fetch_model(BaseModelConfig(model_id="org/missing"), access)
    with pytest.raises(InputError, match="is not the name of a repository"):
        fetch_model(BaseModelConfig(model_id="a/b/c"), access)


def test_mistyped_path_of_a_model_says_that_nothing_is_there_and_where_it_was_looked_for(
    hub: Hub, access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (access.working_directory / "models" / "tiny").mkdir(parents=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # whether the Hub answers or not
    for fetch in (fetch_model, lambda base, access: fetch_tokenizer(base.model_id, None, access)):
        said = f"models/nope: there is no such file or directory; looked in {access.working_directory}"
        with pytest.raises(InputError, match=said):
            fetch(BaseModelConfig(model_id="models/nope"), access)
        with pytest.raises(InputError, match=r"write \./models/tiny or hf://models/tiny"):
            fetch(BaseModelConfig(model_id="models/tiny"), access)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    with pytest.raises(InputError, match=rf"no such repository.*nor is there such a directory in .*{tmp_path}/root"):
        fetch_model(BaseModelConfig(model_id="other/nope"), access)
    (tmp_path / "root" / "other" / "there").mkdir(parents=True)
    with pytest.raises(InputError, match=f"but there is {tmp_path}/root/other/there: name it by its whole path"):
        fetch_model(BaseModelConfig(model_id="other/there"), access)
    hub.repositories["models/models/real"] = MODEL
    assert fetch_model(BaseModelConfig(model_id="hf://models/real"), access).is_dir()


def test_hub_that_is_down_is_unavailable(hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it tries again for a while
    hub.down = True
    with pytest.raises(SourceUnavailableError, match="the Hub at http://127"):
        fetch_model(BaseModelConfig(model_id="org/tiny"), access)
    hub.down, hub.repositories["models/org/tiny"] = False, MODEL
    directory = fetch_model(BaseModelConfig(model_id="org/tiny"), access)
    hub.down = True
    assert fetch_model(BaseModelConfig(model_id="org/tiny"), access) == directory
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(SourceUnavailableError, match="does not answer"):
            fetch_model(BaseModelConfig(model_id="org/other"), access)


def test_hub_that_cannot_be_reached_is_told_in_two_lines(
    hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a job shows at once: what is fetched and from where, then that it is tried again and for how long."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    lines: list[str] = []
    monkeypatch.setattr("trainmaster.jobs.report.doing", lines.append)
    with pytest.raises(SourceUnavailableError) as caught:
        fetch_model(BaseModelConfig(model_id="org/tiny"), access)
    assert lines[0] == "fetching org/tiny from http://127.0.0.1:9"
    assert lines[1].startswith(
        "org/tiny: the Hub at http://127.0.0.1:9 does not answer; it is asked again, for up to 2 minutes: '[Errno 111]"
    )
    assert len(lines) == 2
    assert not capfd.readouterr().err
    assert str(caught.value).startswith("org/tiny: the Hub at http://127.0.0.1:9 does not answer: ")
    assert "training_config.environment.HF_ENDPOINT" in str(caught.value)
    assert "a directory of this machine, with a leading / or ./" in str(caught.value)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    hub.repositories["models/org/tiny"] = MODEL
    assert fetch_model(BaseModelConfig(model_id="org/tiny"), access).is_dir()
    assert len(lines) == 3


def test_offline_says_so_and_uses_what_is_there(hub: Hub, access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.repositories["models/org/tiny"] = MODEL
    directory = fetch_model(BaseModelConfig(model_id="org/tiny"), access)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_model(BaseModelConfig(model_id="org/tiny"), access) == directory
    with pytest.raises(InputError, match="it is not on this machine, and HF_HUB_OFFLINE keeps it from being fetched"):
        fetch_model(BaseModelConfig(model_id="org/other"), access)


def test_dataset_of_the_hub_is_fetched_by_split_path_and_card(hub: Hub, access: Access) -> None:
    hub.repositories["datasets/org/set"] = {
        "data/train-00000-of-00001.jsonl": b'{"text": "train"}\n',
        "data/test-00000-of-00001.jsonl": b'{"text": "test"}\n',
        "README.md": b"# no front matter",
    }
    for path, split, expected in (
        ("hf://org/set", None, "train"),
        ("hf://org/set", "test", "test"),
        ("hf://datasets/org/set@v1", "train", "train"),
        ("hf://org/set/data/test-00000-of-00001.jsonl", None, "test"),
        ("hf://org/set/data/te*.jsonl@v1", None, "test"),
    ):
        found = fetch_source(DataSource(path=path, split=split), access)
        assert [json.loads(text)["text"] for text in content(found)] == [expected]
    assert fetch_source(DataSource(path="org/set", type="huggingface"), access).format == "jsonl"
    with pytest.raises(InputError, match="has no split 'other'; it has train, test"):
        fetch_source(DataSource(path="hf://org/set", split="other"), access)
    with pytest.raises(InputError, match="holds no such file"):
        fetch_source(DataSource(path="hf://org/set/nothing.jsonl"), access)


CARD = """---
license: mit
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: en/a-*.parquet}
  - {split: test, path: [en/t.parquet]}
- config_name: de
  data_files: de/*.parquet
---
# A dataset
"""


@pytest.mark.parametrize(
    ("path", "split", "expected"),
    [
        ("", None, ["en/a-0.parquet", "en/a-1.parquet"]),
        ("", "test", ["en/t.parquet"]),
        ("de", None, ["de/x.parquet"]),
        ("en/t.parquet", None, ["en/t.parquet"]),
        ("en", "test", ["en/t.parquet"]),
    ],
)
def test_card_of_a_dataset_says_what_its_configurations_are(path: str, split: str | None, expected: list[str]) -> None:
    names = ["README.md", "en/a-0.parquet", "en/a-1.parquet", "en/t.parquet", "de/x.parquet"]
    found = choose_from_hub(names, "hf://o/n", path=path, format=None, split=split, card=card_data(CARD))
    assert list(found.names) == expected


def test_split_that_the_card_lacks_is_an_error_that_names_those_it_has() -> None:
    with pytest.raises(InputError, match="has no split 'dev'; it has train, test"):
        choose_from_hub(["a"], "hf://o/n", path="", format=None, split="dev", card=card_data(CARD))


def test_broken_card_counts_for_nothing() -> None:
    assert card_data("---\n: [\n---\n") == {}
    assert card_data("no card") == {}


def test_dataset_with_rows_in_several_formats_is_read_in_the_best() -> None:
    names = ["a.csv", "train.parquet", "train.jsonl"]
    assert choose_from_hub(names, "hf://o/n", path="", format=None, split=None, card={}).names == ("train.parquet",)
    assert choose_from_hub(names, "hf://o/n", path="", format="csv", split=None, card={}).names == ("a.csv",)
    with pytest.raises(InputError, match="holds no file of the format text"):
        choose(names, "d", format="text", split=None)


def test_access_is_what_the_worker_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ: dict[str, Any] = {
        "TRAINMASTER_CACHE_DIR": "/cache",
        "TRAINMASTER_DATA_ROOTS": os.pathsep.join(["/a", "/b"]),
        "TRAINMASTER_PRIVATE_URLS": "0",
        "TRAINMASTER_HUB_TOKEN": "hf",
        "TRAINMASTER_SCAIDRIVE_URL": "https://drive/",
        "TRAINMASTER_SCAIDRIVE_TOKEN": "sd",
    }
    access = Access.from_environ(environ)
    assert access.data_roots == (Path("/a"), Path("/b"))
    assert (access.cache, access.working_directory) == (Path("/cache"), tmp_path)
    assert not access.private_urls
    assert access.services["scaidrive"].url == "https://drive"
    assert "hf" not in repr(access).replace("hf_", "")
    assert "sd" not in repr(access.services)
