"""Where runtimes come from: directories, files, the web and GitHub, the server, and the package; who wins."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from runtime_documents import runtime, text_of

from trainmaster.client import Client
from trainmaster.trainer.errors import NotFoundError
from trainmaster.trainer.runtimes import RuntimeCatalog, sources
from trainmaster.trainer.runtimes.sources import FRESH_S, SourceCache, SourceError, SourceReader

DAY = FRESH_S


@dataclass(kw_only=True)
class Web:
    """What is served, by path with its query, and what was asked for."""

    url: str = ""
    pages: dict[str, bytes | str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)


@pytest.fixture(scope="module")
def serving() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.asked.append(self.path)
            web.tokens.append(self.headers.get("Authorization"))
            page = web.pages.get(self.path)
            if isinstance(page, str):
                self.send_response(302)
                self.send_header("Location", page)
                page = b""
            else:
                self.send_response(404 if page is None else 200)
            self.send_header("Content-Length", str(len(page or b"")))
            self.end_headers()
            with contextlib.suppress(OSError):  # whoever has enough hangs up
                self.wfile.write(page or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        web.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield web
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def web(serving: Web) -> Web:
    serving.pages.clear()
    serving.asked.clear()
    serving.tokens.clear()
    return serving


@dataclass
class Clock:
    now: float = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(tmp_path: Path, web: Web, clock: Clock) -> SourceReader:
    cache = SourceCache(directory=tmp_path / "cache")
    return SourceReader(
        cache=cache, github_api=f"{web.url}/api", github_raw=f"{web.url}/raw", environment={}, clock=clock
    )


class FakeServer:
    """The one route of a server that a catalog asks."""

    def __init__(self, *documents: dict[str, Any], problems: tuple[str, ...] = ()) -> None:
        self.runtimes = self
        found = [{"name": d["metadata"]["name"], "kind": d["kind"], "file": "s.yaml", "document": d} for d in documents]
        self.answer = {"runtimes": found, "problems": [{"file": "x.yaml", "message": text} for text in problems]}

    def list(self) -> dict[str, Any]:
        return self.answer


def server_with(*documents: dict[str, Any], problems: tuple[str, ...] = ()) -> Client:
    return cast(Client, FakeServer(*documents, problems=problems))


def names(catalog: RuntimeCatalog) -> list[str]:
    return [each.name for each in catalog.list() if each.name.startswith("m-")]


def page(*documents: object) -> bytes:
    return text_of(*documents).encode()


def tree_of(*paths: str) -> bytes:
    entries = [{"path": path, "type": "blob"} for path in paths] + [{"path": "manifests", "type": "tree"}]
    return json.dumps({"tree": entries}).encode()


# Files


def test_directory_gives_its_yaml_files_in_order(tmp_path: Path, reader: SourceReader) -> None:
    (tmp_path / "b.yml").write_text(text_of(runtime("m-b")))
    (tmp_path / "a.yaml").write_text(text_of(runtime("m-a"), runtime("m-a2")))
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "inside.yaml").mkdir()
    assert names(RuntimeCatalog(None, [str(tmp_path)], reader=reader)) == ["m-a", "m-a2", "m-b"]


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}"])
def test_file_is_named_by_path_or_url(tmp_path: Path, reader: SourceReader, form: str) -> None:
    path = tmp_path / "with space.yaml"
    path.write_text(text_of(runtime("m-a")))
    source = form.format(str(path).replace(" ", "%20") if form.startswith("file") else path)
    assert names(RuntimeCatalog(None, [source], reader=reader)) == ["m-a"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/at/all.yaml", "No such file"),
        ("ftp://host/file.yaml", "ftp is not known"),
        ("file://host/file.yaml", "names another machine"),
        ("github://owner", "must be github://OWNER/REPOSITORY"),
        ("github://owner/repo/../..", "must be github://OWNER/REPOSITORY"),
    ],
)
def test_source_that_cannot_be_read_says_why(reader: SourceReader, source: str, message: str) -> None:
    with pytest.raises(SourceError, match=message) as refused:
        reader.files(source)
    assert str(refused.value).startswith(source)


def test_file_that_is_no_text_is_refused(tmp_path: Path, reader: SourceReader) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(SourceError, match="UTF-8"):
        reader.files(str(tmp_path))


# The network


def test_address_is_fetched_once_a_day(web: Web, reader: SourceReader, clock: Clock) -> None:
    web.pages["/one.yaml"] = page(runtime("m-old"))
    catalog = RuntimeCatalog(None, [f"{web.url}/one.yaml"], reader=reader)
    assert names(catalog) == ["m-old"]
    web.pages["/one.yaml"] = page(runtime("m-new"))
    clock.now += DAY - 1
    assert names(catalog) == ["m-old"]
    clock.now += 2
    assert names(catalog) == ["m-new"]
    assert web.asked == ["/one.yaml", "/one.yaml"]


def test_address_that_went_away_is_told_and_what_it_had_is_used(
    web: Web, reader: SourceReader, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    web.pages["/one.yaml"] = page(runtime("m-old"))
    catalog = RuntimeCatalog(None, [f"{web.url}/one.yaml"], reader=reader)
    assert names(catalog) == ["m-old"]
    web.pages.clear()
    clock.now += DAY + 1
    with caplog.at_level(logging.WARNING):
        assert names(catalog) == ["m-old"]
    assert "answered with status 404; what it had when it was last reached is used" in caplog.text


def test_spoilt_cache_is_fetched_anew(web: Web, reader: SourceReader) -> None:
    web.pages["/one.yaml"] = page(runtime("m-a"))
    catalog = RuntimeCatalog(None, [f"{web.url}/one.yaml"], reader=reader)
    assert names(catalog) == ["m-a"]
    (kept,) = reader.cache.directory.iterdir()
    kept.write_text('{"source": "another"')
    assert names(catalog) == ["m-a"]
    assert len(web.asked) == 2


def test_cache_keeps_a_number_of_sources_and_drops_the_oldest(
    web: Web, reader: SourceReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_SOURCES", 2)
    for number in range(3):
        web.pages[f"/{number}.yaml"] = page(runtime("m-a"))
        reader.files(f"{web.url}/{number}.yaml")
        for path in reader.cache.directory.iterdir():
            os.utime(path, (path.stat().st_mtime - 10, path.stat().st_mtime - 10))
    reader.files(f"{web.url}/1.yaml")
    reader.files(f"{web.url}/2.yaml")
    assert len(web.asked) == 3
    reader.files(f"{web.url}/0.yaml")
    assert len(web.asked) == 4


def test_cache_that_cannot_be_written_is_done_without(
    web: Web, reader: SourceReader, caplog: pytest.LogCaptureFixture
) -> None:
    reader.cache.directory.write_text("in the way")
    web.pages["/one.yaml"] = page(runtime("m-a"))
    with caplog.at_level(logging.WARNING):
        assert names(RuntimeCatalog(None, [f"{web.url}/one.yaml"], reader=reader)) == ["m-a"]
    assert "cannot be kept" in caplog.text


def test_redirect_is_followed_and_a_loop_is_an_error(web: Web, reader: SourceReader) -> None:
    web.pages |= {"/moved.yaml": "/one.yaml", "/one.yaml": page(runtime("m-a")), "/round.yaml": "/round.yaml"}
    assert len(reader.files(f"{web.url}/moved.yaml")) == 1
    with pytest.raises(SourceError, match="redirects"):
        reader.files(f"{web.url}/round.yaml")


def test_answer_without_end_is_cut_off(web: Web, reader: SourceReader) -> None:
    web.pages["/large.yaml"] = b"#" * (5 << 20)
    with pytest.raises(SourceError, match="larger than 4 MiB"):
        reader.files(f"{web.url}/large.yaml")


def test_github_gives_the_yaml_files_below_a_path(web: Web, reader: SourceReader) -> None:
    web.pages |= {
        "/api/repos/o/r/git/trees/v2?recursive=1": tree_of("x/b.yaml", "x/y/a.yaml", "x/readme.md", "z/no.yaml"),
        "/raw/o/r/v2/x/b.yaml": page(runtime("m-b")),
        "/raw/o/r/v2/x/y/a.yaml": page(runtime("m-a"), {"kind": "Kustomization"}),
    }
    catalog = RuntimeCatalog(None, ["github://o/r/x@v2"], reader=reader)
    assert names(catalog) == ["m-b", "m-a"]
    assert catalog.definition("m-a").origin == "github://o/r/x/y/a.yaml, document 1"
    assert web.tokens == [None] * 3


def test_github_without_a_path_looks_where_kubeflow_has_them(web: Web, reader: SourceReader) -> None:
    path = "manifests/base/runtimes/t.yaml"
    web.pages |= {
        "/api/repos/o/r/git/trees/HEAD?recursive=1": tree_of("other.yaml", path),
        f"/raw/o/r/HEAD/{path}": page(runtime("m-t")),
    }
    assert names(RuntimeCatalog(None, ["github://o/r"], reader=reader)) == ["m-t"]


def test_github_file_needs_no_list_and_takes_a_token(web: Web, tmp_path: Path) -> None:
    web.pages["/raw/o/r/HEAD/a%20b.yaml"] = page(runtime("m-a"))
    reader = SourceReader(
        cache=SourceCache(directory=tmp_path), github_raw=f"{web.url}/raw", environment={"GITHUB_TOKEN": "t"}
    )
    assert names(RuntimeCatalog(None, ["github://o/r/a b.yaml"], reader=reader)) == ["m-a"]
    assert web.tokens == ["Bearer t"]


@pytest.mark.parametrize(
    "listed", [b'{"tree": [], "truncated": true}', b"no json", b"[]", b'{"tree": 3}', tree_of("elsewhere/a.yaml")]
)
def test_github_answer_that_lists_nothing_is_an_error(web: Web, reader: SourceReader, listed: bytes) -> None:
    web.pages["/api/repos/o/r/git/trees/HEAD?recursive=1"] = listed
    with pytest.raises(SourceError, match="github://o/r: "):
        reader.files("github://o/r")


# All together


def test_first_source_wins_then_the_server_then_what_is_built_in(tmp_path: Path, reader: SourceReader) -> None:
    for number, names_there in enumerate((["m-a"], ["m-a", "m-b"])):
        text = text_of(*(runtime(name, image=f"source-{number}") for name in names_there))
        (tmp_path / f"{number}.yaml").write_text(text)
    server = server_with(*(runtime(name, image="server") for name in ("m-b", "m-c", "torch-distributed")))
    catalog = RuntimeCatalog(server, [str(tmp_path / "0.yaml"), str(tmp_path / "1.yaml")], reader=reader)
    images = {each.name: each.trainer.image for each in catalog.list()}
    assert {name: images[name] for name in images if name.startswith("m-")} == {
        "m-a": "source-0",
        "m-b": "source-1",
        "m-c": "server",
    }
    assert (images["torch-distributed"], images["python"]) == ("server", "")
    assert {name: catalog.definition(name).image or "" for name in images} == images


def test_unknown_name_is_not_found_and_told_which_there_are(reader: SourceReader) -> None:
    with pytest.raises(NotFoundError, match=r"no runtime named 'torhc'.*m-a.*torch-distributed") as refused:
        RuntimeCatalog(server_with(runtime("m-a")), reader=reader).definition("torhc")
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, RuntimeError)


def test_broken_source_is_left_out_of_lists_and_an_error_of_get(
    tmp_path: Path, reader: SourceReader, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.yaml").write_text(text_of(runtime("m-a"), runtime("m-broken", image=[1])))
    gone = str(tmp_path / "gone.yaml")
    catalog = RuntimeCatalog(None, [str(tmp_path), gone], reader=reader)
    with caplog.at_level(logging.WARNING):
        assert names(catalog) == ["m-a"]
    assert gone in caplog.text
    assert "image: must be text" in caplog.text
    assert catalog.definition("m-a").name == "m-a"
    with pytest.raises(ValueError, match=r"'m-broken' cannot be read: .*image: must be text"):
        catalog.definition("m-broken")
    with pytest.raises(ValueError, match=r"'torch-distributed' cannot be read: .*gone.yaml"):
        catalog.definition("torch-distributed")


def test_source_without_a_runtime_is_told(tmp_path: Path, reader: SourceReader) -> None:
    (tmp_path / "a.yaml").write_text("kind: Kustomization\n")
    with pytest.raises(ValueError, match="there is no training runtime in it"):
        RuntimeCatalog(None, [str(tmp_path)], reader=reader).definition("m-a")


def test_broken_file_of_the_server_hides_nothing_else(reader: SourceReader, caplog: pytest.LogCaptureFixture) -> None:
    server = server_with(runtime("m-a"), runtime("m-broken", image=[1]), problems=("line 1: is no YAML",))
    catalog = RuntimeCatalog(server, reader=reader)
    with caplog.at_level(logging.WARNING):
        assert catalog.definition("python").name == "python"
    assert "the server's x.yaml: line 1: is no YAML" in caplog.text
    with pytest.raises(ValueError, match=r"'m-broken' cannot be read: the server's s.yaml: "):
        catalog.definition("m-broken")
