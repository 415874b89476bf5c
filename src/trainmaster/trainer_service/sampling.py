"""Sampling sessions: each stands on weights of one moment, and samples of all of them are drawn together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.engine.engine import Engine
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError, SampledSequence
from trainmaster.trainer_service.checkpoint_names import CheckpointKind, CommittedCheckpoint
from trainmaster.trainer_service.configuration import Configuration
from trainmaster.trainer_service.messages import Reply, Request
from trainmaster.trainer_service.model_checkpoints import Saving, exported_snapshot
from trainmaster.trainer_service.reports import reply_to_failure
from trainmaster.trainer_service.wire import decode_sample, encode_sample_result

KEEP_ADAPTERS = 64
KEEP_WHOLE = 2
"""How many snapshots of adapters, and of whole weights, stay in memory: those that were used last."""


@dataclass(slots=True, kw_only=True)
class _SamplingSession:
    snapshot: WeightsSnapshot | None
    source: CommittedCheckpoint | None = None
    """Where the weights can be read again; None: nowhere."""


@dataclass(eq=False)
class SamplingSessions:
    _configuration: Configuration
    _engine: Engine
    _sampler: Sampler
    _saving: Saving
    _reply: Callable[[Reply], None]

    def __post_init__(self) -> None:
        self._sessions: OrderedDict[str, _SamplingSession] = OrderedDict()
        self._waiting: set[str] = set()

    @property
    def pending(self) -> int:
        return len(self._waiting)

    def open(self, session_id: str, snapshot: WeightsSnapshot) -> None:
        self._put(session_id, _SamplingSession(snapshot=snapshot))

    def create(self, request: Request) -> Mapping[str, Any]:
        """Begin a session on the base model or a checkpoint. Raises EngineError where there is none."""
        fields = request.fields
        session_id = str(fields["sampling_session_id"])
        if (path := fields.get("model_path")) is not None:
            found = self._saving.find(path, request.source, CheckpointKind.SAMPLER)
            self._put(session_id, _SamplingSession(snapshot=self._load(found), source=found))
        else:
            name = fields.get("base_model")
            if name is not None and name not in self._configuration.names:
                raise EngineError(f"this trainer holds {self._configuration.base_model}, and not {name!r}")
            self._put(session_id, _SamplingSession(snapshot=self._engine.snapshot(None)))
        return {"sampling_session_id": session_id, "type": "create_sampling_session"}

    def submit(self, request: Request) -> None:
        try:
            snapshot = self._snapshot(str(request.fields["sampling_session_id"]))
            self._sampler.submit(decode_sample(request.request_id, request.body or b"", request.encoding), snapshot)
        except Exception as error:
            self._reply(reply_to_failure(request.request_id, error))
            return
        self._waiting.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._sampler.cancel(request_id)
            self._waiting.discard(request_id)
            self._reply(Reply(request_id=request_id, error="the sample was cancelled", category="user"))

    def end(self, session_ids: Iterable[str]) -> None:
        """What they have under way is still answered."""
        for session_id in session_ids:
            self._sessions.pop(session_id, None)

    def step(self) -> list[SampledSequence]:
        """Draw one token of each sample; the sequences of those that are complete."""
        try:
            completed = self._sampler.step()
        except Exception as error:
            # Whose fault it was cannot be told apart: none of them can be trusted to end.
            for request_id in self._cancel_all():
                self._reply(reply_to_failure(request_id, error))
            return []
        sequences: list[SampledSequence] = []
        for request_id, result in completed:
            self._waiting.discard(request_id)
            if isinstance(result, EngineError):
                self._reply(reply_to_failure(request_id, result))
            else:
                sequences += result.sequences
                self._reply(Reply(request_id=request_id, body=encode_sample_result(result)))
        return sequences

    def refuse_all(self, message: str) -> None:
        for request_id in self._cancel_all():
            self._reply(Reply(request_id=request_id, error=message))

    def _cancel_all(self) -> set[str]:
        cancelled, self._waiting = self._waiting, set()
        for request_id in cancelled:
            self._sampler.cancel(request_id)
        return cancelled

    def _snapshot(self, session_id: str) -> WeightsSnapshot:
        session = self._sessions.get(session_id)
        if session is None:
            raise EngineError(
                f"there is no sampling session {session_id} in this trainer (any more): it keeps the {KEEP_ADAPTERS} "
                f"that were used last, or {KEEP_WHOLE} of whole weights. What shall last, save under a name"
            )
        self._sessions.move_to_end(session_id)
        if session.snapshot is None:
            assert session.source is not None
            session.snapshot = self._load(session.source)
            self._trim()
        return session.snapshot

    def _put(self, session_id: str, session: _SamplingSession) -> None:
        self._sessions[session_id] = session
        self._sessions.move_to_end(session_id)
        self._trim()

    def _trim(self) -> None:
        """Drop the snapshots that were not used for longest; sessions with saved weights can read them again."""
        base = self._engine.base
        kept: dict[bool, set[int]] = {False: set(), True: set()}
        for session_id, session in reversed(list(self._sessions.items())):
            snapshot = session.snapshot
            if snapshot is None or (snapshot.adapter is None and snapshot.transformer is base):
                continue
            is_whole = snapshot.transformer is not base
            kept[is_whole].add(id(snapshot))
            if len(kept[is_whole]) > (KEEP_WHOLE if is_whole else KEEP_ADAPTERS):
                session.snapshot = None
                if session.source is None:
                    del self._sessions[session_id]

    def _load(self, found: CommittedCheckpoint) -> WeightsSnapshot:
        for session in self._sessions.values():
            known = session.source
            if session.snapshot is not None and known is not None and known.manifest == found.manifest:
                return session.snapshot
        if found.manifest.kind == CheckpointKind.TRAINING:
            return self._engine.snapshot_from(self._saving.read_tree(found))
        with self._saving.exported(found) as directory:
            return exported_snapshot(self._engine, directory)
