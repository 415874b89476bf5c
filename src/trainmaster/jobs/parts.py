"""The parts of a checkpoint that several processes write, and how rank 0 learns of them.

Ranks that see the draft of rank 0 write into it. Ranks on other machines write into a directory of their own and
deliver its files through the object store, where the checkpoint will be.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainmaster.jobs import checkpoint
from trainmaster.jobs.checkpoint import ManifestFile
from trainmaster.jobs.objects import Place
from trainmaster.jobs.process import Process
from trainmaster.jobs.staging import staging
from trainmaster.protocol.documents import write_document

_PART = ".part-"
_LOOK_EVERY_S = 0.05
_ASK_EVERY_S = 1.0
"""How often rank 0 asks the object store, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredParts:
    """Files of a save that ranks on other machines have delivered."""

    rel_path: str
    """The path that the save was begun at; it may be committed beside that."""
    files: tuple[ManifestFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDelivery:
    """How ranks that do not see the draft of rank 0 deliver their parts of a save: through the object store itself."""

    place: Place
    key: str

    @contextlib.contextmanager
    def draft(self, *, job_id: str, attempt: int) -> Iterator[Path]:
        """A local directory for this rank's part."""
        with checkpoint.draft_directory(staging(), job_id=job_id, attempt=attempt) as directory:
            yield directory

    def send(self, rank: int, draft: Path, digests: Mapping[str, str]) -> None:
        files = checkpoint.describe(draft, known_digests=digests, flush=False)
        self.place.send_all({draft / file.path: f"{self.key}/{file.path}" for file in files})
        self.tell(rank, {"files": [asdict(file) for file in files]})

    def tell(self, rank: int, answer: Mapping[str, Any]) -> None:
        self.place.put(self._answer(rank), json.dumps(answer).encode())

    def take(self, rank: int) -> dict[str, Any] | None:
        """What a rank told, once; None if it told nothing yet."""
        try:
            answer: dict[str, Any] = json.loads(self.place.get(self._answer(rank))[0])
        except FileNotFoundError:
            return None
        self.place.delete([self._answer(rank)])
        return answer

    def _answer(self, rank: int) -> str:
        return f"{self.key}/{_PART}{rank}"


class PartError(RuntimeError):
    """A rank did not write its part of a checkpoint, or not in time."""


class CollectedParts(NamedTuple):
    digests: dict[str, str]
    """Of files in the draft, by path."""
    delivered: DeliveredParts | None
    """None if all ranks have written into the draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the ranks tell rank 0 of a save, by files: collective operations belong to the thread that trains."""

    draft: Path
    """Of rank 0."""
    process: Process
    timeout_s: float
    delivery: PartDelivery | None = None
    """Set if some ranks do not see the draft."""
    away: Collection[int] = ()
    """These ranks; known to rank 0 and to each of them."""

    @property
    def is_away(self) -> bool:
        return self.process.index in self.away

    @contextlib.contextmanager
    def own_draft(self, *, job_id: str, attempt: int) -> Iterator[Path]:
        """The directory that this rank writes to."""
        if self.delivery is None or not self.is_away:
            yield self.draft
        else:
            with self.delivery.draft(job_id=job_id, attempt=attempt) as directory:
                yield directory

    def done(self, digests: Mapping[str, str], draft: Path) -> None:
        """Tell rank 0 that this rank's part is written into its draft."""
        if self.delivery is not None and self.is_away:
            self.delivery.send(self.process.index, draft, digests)
        else:
            self._write({"digests": dict(digests)})

    def failed(self, error: BaseException) -> None:
        """Tell rank 0 not to wait for this rank."""
        if self.process.index == 0:
            return
        answer = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):  # The draft is gone: rank 0 has given up.
            if self.delivery is not None and self.is_away:
                self.delivery.tell(self.process.index, answer)
            else:
                self._write(answer)

    def collect(self, rel_path: str) -> CollectedParts:
        """On rank 0: wait for all other ranks; raises PartError if one failed or is late."""
        digests: dict[str, str] = {}
        files: list[ManifestFile] = []
        deadline = time.monotonic() + self.timeout_s
        for rank in range(1, self.process.count):
            answer = self._await(rank, deadline, rel_path)
            if "error" in answer:
                raise PartError(f"rank {rank} could not write its part of {rel_path}: {answer['error']}")
            digests |= answer.get("digests", {})
            files += [ManifestFile(**file) for file in answer.get("files", ())]
        delivered = DeliveredParts(rel_path=rel_path, files=tuple(files)) if self.delivery is not None else None
        return CollectedParts(digests, delivered)

    def _await(self, rank: int, deadline: float, rel_path: str) -> dict[str, Any]:
        pause_s = _LOOK_EVERY_S
        while (answer := self._take(rank)) is None:
            if time.monotonic() > deadline:
                raise PartError(f"rank {rank} did not write its part of {rel_path} within {self.timeout_s:.0f} s")
            time.sleep(pause_s)
            if rank in self.away:
                pause_s = min(2 * pause_s, _ASK_EVERY_S)
        return answer

    def _take(self, rank: int) -> dict[str, Any] | None:
        if self.delivery is not None and rank in self.away:
            return self.delivery.take(rank)
        path = self.draft / f"{_PART}{rank}"
        try:
            answer: dict[str, Any] = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        path.unlink()
        return answer

    def _write(self, answer: Mapping[str, Any]) -> None:
        write_document(self.draft / f"{_PART}{self.process.index}", answer)
