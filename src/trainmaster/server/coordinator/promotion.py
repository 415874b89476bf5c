"""Promotion: a checkpoint that a trainer saved for sampling becomes a model of its account, with files of its own.

The files are linked, or else copied. They are assembled in a directory that only the server can reach, given to the
account's user there, and moved to their place as a whole. The directory with all models of an account belongs to the
server, so that no job can replace a model. When the server dies, the next request continues the operation."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.protocol import account_files
from trainmaster.protocol.account_files import UnsafeFileError, User, UserDirectoryBuilder
from trainmaster.protocol.run_directory import SEARCH_ONLY
from trainmaster.server.coordinator import base_models
from trainmaster.server.coordinator.base_models import PROMOTED, BaseModels, promoted_name
from trainmaster.server.core.errors import ConflictError, NotFoundError, RefusedError, TrainmasterError
from trainmaster.server.core.job import CheckpointRecord, Job
from trainmaster.server.storage import ARTIFACTS, Roots
from trainmaster.server.store import accounts, checkpoints, jobs, promoted
from trainmaster.server.store.database import Database
from trainmaster.server.store.promoted import Operation, PromotedModel
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)

SAMPLER = "sampler"
EXTERNAL = "external"
DELTA = "delta"
PEFT_ADDON = "HF_PEFT_ADDON"
BASE_MODEL = "HF_BASE_MODEL"
AT_ONCE_S = 5.0
"""Links take little time: so long, a request waits for its promotion."""
ABANDONED_S = 60.0
"""An operation that was not worked on for so long has lost its server."""
RECORD_EVERY_S = 10.0
FORGOTTEN_S = 24 * 3600.0
"""Older drafts are abandoned."""
DRAFTS = ".drafts"
"""Below the artifacts' root: models that are being assembled or removed. Only the server can reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    job_id: str
    checkpoint_id: str
    model_id: str
    base_model: str


@dataclass(frozen=True, slots=True, eq=False)
class Promotions:
    """Carries promotions out, each in a thread of its own. Its methods block."""

    database: Database
    roots: Roots
    models: BaseModels
    clock: Callable[[], float] = time.time

    def start(self, scope: Scope, wanted: Promotion) -> Operation:
        """Begin a promotion, which may be done when this returns."""
        with self.database.read() as connection:
            job, _ = self._checked(connection, scope, wanted)
            before = _before(connection, scope, wanted)
        now = self.clock()
        operation = Operation(
            account_id=job.account_id,
            operation_id=f"promote-{wanted.model_id}-{secrets.token_hex(6)}",
            request=asdict(wanted),
            done=before is not None,
            created_at=now,
            worked_on_at=now,
        )
        self.database.write_now(lambda connection: promoted.begin(connection, scope, operation))
        return operation if operation.done else self._work(scope, operation)

    def poll(self, scope: Scope, operation_id: str) -> tuple[Operation, PromotedModel | None]:
        """The state of an operation, and its model once that exists."""

        def read() -> tuple[Operation, PromotedModel | None]:
            with self.database.read() as connection:
                operation = promoted.operation(connection, scope, operation_id)
                try:
                    model = promoted.get(connection, scope, str(operation.request["model_id"]))
                except NotFoundError:
                    model = None
            return operation, model

        operation, model = read()
        if operation.done or operation.worked_on_at > self.clock() - ABANDONED_S:
            return operation, model
        now = self.clock()
        if self.database.write_now(lambda connection: promoted.take(connection, scope, operation, now)):
            self._work(scope, operation)
        return read()

    def remove(self, scope: Scope, model_id: str) -> None:
        self.database.write_now(lambda connection: promoted.remove(connection, scope, model_id))
        aside = f"{DRAFTS}/removed-{secrets.token_hex(8)}"
        account_files.claim_directory(self._artifacts, DRAFTS, mode=0o700)
        if account_files.move(self._artifacts, promoted_name(scope.account, model_id), aside):
            account_files.remove(self._artifacts, aside)

    @property
    def _artifacts(self) -> Path:
        return self.roots.path(ARTIFACTS, "")

    def _checked(self, connection: Connection, scope: Scope, wanted: Promotion) -> tuple[Job, CheckpointRecord]:
        job = jobs.get(connection, scope, wanted.job_id, deleted=True)
        checkpoint = checkpoints.get(connection, scope, wanted.checkpoint_id)
        if checkpoint.job_id != job.job_id:
            raise NotFoundError(f"job {job.handle or job.job_id} has no checkpoint {wanted.checkpoint_id}")
        if (refused := why_not(checkpoint)) is not None:
            raise RefusedError(f"checkpoint {checkpoint.name or checkpoint.checkpoint_id} {refused}")
        trained = str(checkpoint.attributes.get("base_model") or wanted.base_model)
        if trained != wanted.base_model:
            # Two names may mean one model; a name that is no longer known equals only itself.
            one, other = (self.models.find(name, job.account_id) for name in (trained, wanted.base_model))
            if one is None or other is None or one.path != other.path:
                raise RefusedError(f"base_model is {wanted.base_model}, and the checkpoint is of {trained}; name that")
        return job, checkpoint

    def _work(self, scope: Scope, operation: Operation) -> Operation:
        """Continue an operation in a thread; returns its state soon after."""
        thread = threading.Thread(target=self._carry_out, args=(scope, operation), name="promote", daemon=True)
        thread.start()
        thread.join(AT_ONCE_S)
        with self.database.read() as connection:
            return promoted.operation(connection, scope, operation.operation_id)

    def _carry_out(self, scope: Scope, operation: Operation) -> None:
        try:
            self._promote(scope, operation)
            return
        except TrainmasterError as refused:
            error = refused.message
        except OSError as broken:
            _log.warning("operation %s failed: %s", operation.operation_id, broken)
            error = f"the files cannot be put in place: {broken}"
        except Exception as bug:
            _log.exception("operation %s failed", operation.operation_id)
            error = f"it failed: {bug!r}"
        self.database.write_now(lambda connection: promoted.finish(connection, scope, operation, error))

    def _promote(self, scope: Scope, operation: Operation) -> None:
        wanted = Promotion(**operation.request)
        with self.database.read() as connection:
            job, checkpoint = self._checked(connection, scope, wanted)
            uid = accounts.get(connection, Scope.everything(), job.account_id).uid if os.geteuid() == 0 else None
        user = None if uid in (None, os.geteuid()) else User.of(uid)
        target = promoted_name(job.account_id, wanted.model_id)
        draft = f"{DRAFTS}/{operation.operation_id}"
        aside = f"{draft}-before"
        self._make_places(job.account_id, user)
        account_files.remove(self._artifacts, draft)
        try:
            size = UserDirectoryBuilder(user=user, tick=self._recorder(operation)).link_tree(
                self._artifacts, checkpoint.path, draft
            )
            model = self._described(draft, checkpoint, wanted, job.account_id, size)

            def work(connection: Connection) -> None:
                # Inside the transaction: two promotions to one name must not both move their files there.
                _before(connection, scope, wanted)
                if account_files.exists(self._artifacts, draft):
                    account_files.move(self._artifacts, target, aside)  # of one that ended before it was recorded
                    account_files.move(self._artifacts, draft, target)
                promoted.put(connection, scope, model)
                promoted.finish(connection, scope, operation)

            self.database.write_now(work)
        except UnsafeFileError as error:
            raise RefusedError(f"the checkpoint holds {error}") from None
        finally:
            for left in (draft, aside):
                account_files.remove(self._artifacts, left)

    def _make_places(self, account_id: str, user: User | None) -> None:
        """Create the directories of drafts and of the account's models, and remove abandoned drafts."""
        account_files.claim_directory(self._artifacts, DRAFTS, mode=0o700)
        # The account's own trainers read its models, as the user whom they run as.
        account_files.claim_directory(self._artifacts, PROMOTED, mode=SEARCH_ONLY)
        account_files.claim_directory(self._artifacts, f"{PROMOTED}/{account_id}", mode=SEARCH_ONLY if user else 0o700)
        for name in account_files.directories_in(self._artifacts, DRAFTS):
            if account_files.newest_in(self._artifacts, f"{DRAFTS}/{name}") < time.time() - FORGOTTEN_S:
                account_files.remove(self._artifacts, f"{DRAFTS}/{name}")

    def _described(
        self, draft: str, checkpoint: CheckpointRecord, wanted: Promotion, account_id: str, size: int
    ) -> PromotedModel:
        adapter = base_models.read_own_config(self._artifacts, f"{draft}/{base_models.ADAPTER_CONFIG}")
        if not adapter and account_files.status_below(self._artifacts, f"{draft}/{base_models.CONFIG}") is None:
            raise RefusedError("the checkpoint holds neither an adapter nor a model")
        return PromotedModel(
            account_id=account_id,
            model_id=wanted.model_id,
            job_id=checkpoint.job_id,
            checkpoint_id=checkpoint.checkpoint_id,
            base_model=wanted.base_model,
            kind=PEFT_ADDON if adapter else BASE_MODEL,
            details={"r": adapter.get("r"), "target_modules": adapter.get("target_modules")} if adapter else {},
            size_bytes=size,
            created_at=self.clock(),
        )

    def _recorder(self, operation: Operation) -> Callable[[], None]:
        """A function that records, now and then, that an operation is still worked on."""
        due = time.monotonic() + RECORD_EVERY_S

        def record() -> None:
            nonlocal due, operation
            if time.monotonic() < due:
                return
            due = time.monotonic() + RECORD_EVERY_S
            now = self.clock()
            scope = Scope(operation.account_id)

            def work(connection: Connection) -> Operation:
                promoted.take(connection, scope, operation, now)
                return promoted.operation(connection, scope, operation.operation_id)

            operation = self.database.write_now(work)

        return record


def why_not(checkpoint: CheckpointRecord) -> str | None:
    """Why a checkpoint cannot become a model; None when it can."""
    if checkpoint.kind != SAMPLER:
        what = "to be downloaded" if checkpoint.kind == EXTERNAL else "to train on"
        return f"was saved {what}; save one for sampling (save_weights_for_sampler) and promote that"
    if checkpoint.attributes.get("sampler_kind") == DELTA:
        return "contains only the difference to another checkpoint; save a base checkpoint and promote that"
    return "lies on an object store, from where it cannot be promoted" if checkpoint.root != ARTIFACTS else None


def _before(connection: Connection, scope: Scope, wanted: Promotion) -> PromotedModel | None:
    """The model that an earlier promotion of the same checkpoint made."""
    try:
        there = promoted.get(connection, scope, wanted.model_id)
    except NotFoundError:
        return None
    if there.checkpoint_id != wanted.checkpoint_id:
        raise ConflictError(
            f"there is a model '{wanted.model_id}' of another checkpoint already; take another name, or delete it"
        )
    return there
