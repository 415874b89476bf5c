"""Sources of runtimes: YAML files on disk, at URLs and in GitHub repositories, with a cache; and built-in ones."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import httpx

from trainmaster.plain_yaml import YamlError, parse_yaml_documents
from trainmaster.protocol.documents import read_document, write_document
from trainmaster.trainer.runtimes.document import RuntimeDocumentError, TrainingRuntime, kind_of, read_runtime
from trainmaster.trainer.types import RuntimeKind

SUFFIXES = (".yaml", ".yml")
KINDS = frozenset(kind.value for kind in RuntimeKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file, by what errors call it, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFileProblem:
    message: str
    runtime: str | None = None


@dataclass(slots=True)
class FoundRuntimes:
    """The runtimes of a place by name, and what is wrong with its files."""

    runtimes: dict[str, TrainingRuntime] = field(default_factory=dict)
    problems: list[RuntimeFileProblem] = field(default_factory=list)

    def read(self, document: object, where: str) -> None:
        """Read one document. Of several runtimes of a name, the first counts."""
        try:
            runtime = read_runtime(document, where)
            self.runtimes.setdefault(runtime.name, runtime)
        except RuntimeDocumentError as error:
            self.refuse(str(error), error.name)

    def refuse(self, message: str, runtime: str | None = None) -> None:
        self.problems.append(RuntimeFileProblem(message=message, runtime=runtime))


def read_files(files: Iterable[TextFile]) -> FoundRuntimes:
    """The runtimes of some files. Documents of other kinds are passed over: Kubeflow's directories hold some."""
    found = FoundRuntimes()
    for file in files:
        try:
            for where, document in _documents(file):
                found.read(document, where)
        except YamlError as error:
            found.refuse(str(error))
    return found


def built_in() -> FoundRuntimes:
    directory = resources.files("trainmaster.trainer.runtimes") / "builtin"
    files = sorted((file for file in directory.iterdir() if file.name.endswith(SUFFIXES)), key=lambda file: file.name)
    return read_files(TextFile(name=f"built-in {file.name}", text=file.read_text(encoding="utf-8")) for file in files)


def _documents(file: TextFile) -> Iterator[tuple[str, object]]:
    documents = [document for document in parse_yaml_documents(file.text, file.name) if document is not None]
    for number, document in enumerate(documents, start=1):
        kind = kind_of(document)
        if kind is None or kind in KINDS:
            yield (file.name if len(documents) == 1 else f"{file.name}, document {number}"), document


_log = logging.getLogger(__name__)

FRESH_S = 24 * 3600.0
MAX_SOURCES = 32
"""Of which each has a few MiB at the most."""


def default_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainmaster" / "runtimes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceCache:
    directory: Path = field(default_factory=default_directory)

    def files(self, source: str, fetch: Callable[[], list[TextFile]], *, now: float) -> list[TextFile]:
        """What a source had within the last day, or has; when it cannot be reached, what it had at last."""
        kept = self._read(source)
        if kept is not None and 0 <= now - kept[0] < FRESH_S:
            return kept[1]
        try:
            files = fetch()
        except ValueError as error:
            if kept is None:
                raise
            _log.warning("%s; what it had when it was last reached is used", error)
            return kept[1]
        try:
            self._write(source, files, now)
        except OSError as error:
            _log.warning("runtimes cannot be kept in %s: %s", self.directory, error)
        return files

    def _path(self, source: str) -> Path:
        return self.directory / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.json"

    def _read(self, source: str) -> tuple[float, list[TextFile]] | None:
        try:
            kept = read_document(self._path(source))
            if kept is None or kept["source"] != source:
                return None
            files = [TextFile(name=str(file["name"]), text=str(file["text"])) for file in kept["files"]]
            return float(kept["fetched_at"]), files
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there, or not ours: fetched anew, and written over

    def _write(self, source: str, files: list[TextFile], now: float) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        document = {"source": source, "fetched_at": now, "files": [asdict(file) for file in files]}
        write_document(self._path(source), document)
        for path in sorted(self.directory.glob("*.json"), key=os.path.getmtime)[:-MAX_SOURCES]:
            path.unlink(missing_ok=True)


GITHUB = "github://"
GITHUB_PATH = "manifests/base/runtimes"
"""Where Kubeflow's own repository has them, and so where they are looked for when a source names no path."""
TOKEN_VARIABLE = "GITHUB_TOKEN"
MAX_FILES = 100
MAX_BYTES = 4 << 20
"""Of all files of a source: a hundred times what Kubeflow has."""
TIMEOUT = httpx.Timeout(15.0, connect=5.0)
"""Of each read; a server that drips on is given up after a while."""
PATIENCE_S = 30.0


class SourceError(ValueError):
    """A source of runtimes cannot be read; the message says which, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReader:
    """Reads sources. What comes from the network is kept for a day."""

    cache: SourceCache = field(default_factory=SourceCache)
    github_api: str = "https://api.github.com"
    github_raw: str = "https://raw.githubusercontent.com"
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    clock: Callable[[], float] = time.time

    def files(self, source: str) -> list[TextFile]:
        """The YAML files of a source, in the order of their names; raises SourceError if it cannot be read."""
        if source.startswith(("http://", "https://", GITHUB)):
            fetch = self._github if source.startswith(GITHUB) else self._web
            return self.cache.files(source, lambda: _bounded(source, fetch(source)), now=self.clock())
        path = _local_path(source)
        try:
            if path.is_dir():
                paths = sorted(entry for entry in path.iterdir() if entry.suffix in SUFFIXES and entry.is_file())
            else:
                paths = [path]
            return _bounded(source, (TextFile(name=str(each), text=each.read_text("utf-8")) for each in paths))
        except OSError as error:
            raise SourceError(f"{source}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise SourceError(f"{source}: a file in it is not text in UTF-8: {error}") from error

    def _web(self, source: str) -> Iterator[TextFile]:
        with _client() as client:
            yield TextFile(name=source, text=_get(client, source, source))

    def _github(self, source: str) -> Iterator[TextFile]:
        place = _GithubPlace.read(source)
        token = self.environment.get(TOKEN_VARIABLE)
        with _client({"Authorization": f"Bearer {token}"} if token else {}) as client:
            for path in self._github_paths(client, place):
                url = f"{self.github_raw}/{place.repository}/{quote(place.ref, safe='/')}/{quote(path)}"
                yield TextFile(name=f"{GITHUB}{place.repository}/{path}", text=_get(client, url, source))

    def _github_paths(self, client: httpx.Client, place: _GithubPlace) -> list[str]:
        if place.path.endswith(SUFFIXES):
            return [place.path]
        url = f"{self.github_api}/repos/{place.repository}/git/trees/{quote(place.ref, safe='')}?recursive=1"
        try:
            answer = json.loads(_get(client, url, place.source))
        except json.JSONDecodeError as error:
            raise SourceError(f"{place.source}: GitHub's list of files is not JSON") from error
        tree = answer.get("tree") if isinstance(answer, dict) else None
        entries = [entry for entry in tree if isinstance(entry, dict)] if isinstance(tree, list) else []
        paths = [str(entry.get("path")) for entry in entries if entry.get("type") == "blob"]
        found = sorted(path for path in paths if path.startswith(f"{place.path}/") and path.endswith(SUFFIXES))
        if isinstance(answer, dict) and answer.get("truncated"):
            raise SourceError(f"{place.source}: GitHub does not list all files of so large a repository; name one file")
        if not 1 <= len(found) <= MAX_FILES:
            raise SourceError(f"{place.source}: has {len(found)} YAML files in {place.path}, and not 1 to {MAX_FILES}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _GithubPlace:
    """`github://OWNER/REPOSITORY[/PATH][@REF]`, taken apart."""

    source: str
    repository: str
    path: str
    ref: str

    @staticmethod
    def read(source: str) -> _GithubPlace:
        place, _, ref = source.removeprefix(GITHUB).partition("@")
        owner, _, rest = place.strip("/").partition("/")
        name, _, path = rest.partition("/")
        if not owner or not name or ".." in place.split("/"):
            raise SourceError(f"{source}: must be {GITHUB}OWNER/REPOSITORY, with /PATH and @REF behind it where needed")
        return _GithubPlace(
            source=source,
            repository=f"{quote(owner)}/{quote(name)}",
            path=path.strip("/") or GITHUB_PATH,
            ref=ref or "HEAD",
        )


def _local_path(source: str) -> Path:
    if not source.startswith("file:"):
        if "://" in source:
            scheme = source.partition("://")[0]
            raise SourceError(f"{source}: {scheme} is not known; a source is a path, file, http, https or github")
        return Path(source).expanduser()
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise SourceError(f"{source}: names another machine; write file:///PATH")
    return Path(unquote(parts.path))


def _client(headers: Mapping[str, str] | None = None) -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT, follow_redirects=True, max_redirects=5, headers=headers)


def _get(client: httpx.Client, url: str, source: str) -> str:
    body = bytearray()
    give_up_at = time.monotonic() + PATIENCE_S
    try:
        with client.stream("GET", url) as response:
            if not response.is_success:
                raise SourceError(f"{source}: {url} answered with status {response.status_code}")
            for piece in response.iter_bytes():
                body += piece
                if len(body) > MAX_BYTES:
                    raise SourceError(f"{source}: {url} is larger than {MAX_BYTES >> 20} MiB")
                if time.monotonic() > give_up_at:
                    raise SourceError(f"{source}: {url} takes longer than {PATIENCE_S:g} s")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SourceError(f"{source}: {url} cannot be fetched: {error or type(error).__name__}") from error
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise SourceError(f"{source}: {url} is not text in UTF-8") from error


def _bounded(source: str, files: Iterator[TextFile]) -> list[TextFile]:
    found: list[TextFile] = []
    size = 0
    for file in files:
        found.append(file)
        size += len(file.text)
        if len(found) > MAX_FILES or size > MAX_BYTES:
            raise SourceError(f"{source}: has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
    return found
