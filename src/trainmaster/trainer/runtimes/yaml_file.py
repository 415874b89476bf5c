"""A YAML file with any number of documents, and the runtimes among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

from trainmaster.plain_yaml import YamlError, parse_yaml_documents
from trainmaster.trainer.runtimes.definition import TrainingRuntime
from trainmaster.trainer.runtimes.document import RuntimeDocumentError, kind_of, read_runtime
from trainmaster.trainer.types import RuntimeKind

SUFFIXES = (".yaml", ".yml")
KINDS = frozenset(kind.value for kind in RuntimeKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file, by what errors call it, and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a runtime cannot be used."""

    message: str
    runtime: str | None = None
    """Which one, where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a place has: of several runtimes of a name, the first."""

    runtimes: tuple[TrainingRuntime, ...] = ()
    problems: tuple[Problem, ...] = ()

    def get(self, name: str) -> TrainingRuntime | None:
        """The runtime of a name."""
        return next((runtime for runtime in self.runtimes if runtime.name == name), None)


def read_files(files: Iterable[TextFile]) -> Found:
    """The runtimes of some files. Documents of other kinds are passed over: Kubeflow's directories hold some."""
    found: dict[str, TrainingRuntime] = {}
    problems: list[Problem] = []
    for file in files:
        try:
            for where, document in _documents(file):
                read_into(found, problems, document, where)
        except YamlError as error:
            problems.append(Problem(message=str(error)))
    return Found(runtimes=tuple(found.values()), problems=tuple(problems))


def read_into(found: dict[str, TrainingRuntime], problems: list[Problem], document: object, where: str) -> None:
    """Read one document, and keep its runtime unless one of its name is there, or what is wrong with it."""
    try:
        runtime = read_runtime(document, where)
        found.setdefault(runtime.name, runtime)
    except RuntimeDocumentError as error:
        problems.append(Problem(message=str(error), runtime=error.name))


def built_in() -> Found:
    """The runtimes that come with the package."""
    directory = resources.files("trainmaster.trainer.runtimes") / "builtin"
    files = sorted((file for file in directory.iterdir() if file.name.endswith(SUFFIXES)), key=lambda file: file.name)
    return read_files(TextFile(name=f"built-in {file.name}", text=file.read_text(encoding="utf-8")) for file in files)


def _documents(file: TextFile) -> Iterator[tuple[str, object]]:
    """The documents that are meant as runtimes, and what each is called."""
    documents = [document for document in parse_yaml_documents(file.text, file.name) if document is not None]
    for number, document in enumerate(documents, start=1):
        kind = kind_of(document)
        if kind is None or kind in KINDS:
            yield (file.name if len(documents) == 1 else f"{file.name}, document {number}"), document
