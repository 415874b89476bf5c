"""Every runtime that a client can name: of its own sources, of its server, and built in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmaster.client import Client
from trainmaster.trainer.errors import NotFoundError
from trainmaster.trainer.runtimes.definition import TrainingRuntime, runtime_of
from trainmaster.trainer.runtimes.sources import SourceError, SourceReader
from trainmaster.trainer.runtimes.yaml_file import Found, Problem, built_in, read_files, read_into
from trainmaster.trainer.types import Listing, Runtime

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    found: Found
    chosen: bool = False
    """Whether the user named it: then what cannot be read of it might be what is looked for."""


class RuntimeCatalog:
    """Runtimes by name. Of several with a name the first counts: sources in their order, the server's, built-in ones.

    Nothing is remembered between two calls, but for what comes from the network (`SourceCache`).
    """

    def __init__(
        self, client: Client | None = None, sources: Sequence[str] = (), *, reader: SourceReader | None = None
    ) -> None:
        self._client = client
        self._sources = tuple(sources)
        self._reader = reader or SourceReader()

    def list(self) -> Listing[Runtime]:
        """All runtimes. What cannot be read is logged, and left out."""
        return Listing(runtime_of(definition) for definition in self.definitions())

    def get(self, name: str) -> Runtime:
        """The runtime of a name.

        Raises:
            NotFoundError: there is none.
            ValueError: it cannot be read, or a source before it cannot, so that nobody knows whether it is the one.
        """
        return runtime_of(self.definition(name))

    def definitions(self) -> Sequence[TrainingRuntime]:
        """All runtimes, with everything that a job takes from them."""
        found: dict[str, TrainingRuntime] = {}
        for place in self._places():
            for problem in place.found.problems:
                _log.warning("%s", problem.message)
            for definition in place.found.runtimes:
                found.setdefault(definition.name, definition)
        return tuple(found.values())

    def definition(self, name: str) -> TrainingRuntime:
        """The runtime of a name, with everything that a job takes from it.

        Raises:
            NotFoundError: there is none.
            ValueError: it cannot be read, or a source before it cannot.
        """
        known: list[str] = []
        for place in self._places():
            if definition := place.found.get(name):
                for variable in definition.left_out:
                    _log.warning("%s: %s has its value from a cluster, and is not set", definition.origin, variable)
                return definition
            for problem in place.found.problems:
                if problem.runtime == name or (problem.runtime is None and place.chosen):
                    raise ValueError(f"the runtime {name!r} cannot be read: {problem.message}")
                _log.warning("%s", problem.message)
            known += [runtime.name for runtime in place.found.runtimes]
        raise NotFoundError("runtime", name, dict.fromkeys(known))

    def _places(self) -> Iterator[_Place]:
        """Where runtimes are, each looked at when its turn comes."""
        for source in self._sources:
            yield _Place(found=self._of_source(source), chosen=True)
        if self._client is not None:
            yield _Place(found=_of_server(self._client))
        yield _Place(found=built_in())

    def _of_source(self, source: str) -> Found:
        try:
            found = read_files(self._reader.files(source))
        except SourceError as error:
            return Found(problems=(Problem(message=str(error)),))
        if found.runtimes or found.problems:
            return found
        return Found(problems=(Problem(message=f"{source}: there is no training runtime in it"),))


def _of_server(client: Client) -> Found:
    answer = client.runtimes.list()
    found: dict[str, TrainingRuntime] = {}
    problems = [Problem(message=f"the server's {each['file']}: {each['message']}") for each in answer["problems"]]
    for runtime in answer["runtimes"]:
        read_into(found, problems, runtime["document"], f"the server's {runtime['file']}")
    return Found(runtimes=tuple(found.values()), problems=tuple(problems))
