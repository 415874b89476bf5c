"""Who may use the files of an attempt over HTTP: its ranks, and for results its workers, while it is current."""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, TypeVar

from fastapi import Depends, Path, Request
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from trainmaster.protocol.account_files import UnsafeFileError, User
from trainmaster.protocol.attempt_files import FileArea
from trainmaster.protocol.run_directory import StreamGapError
from trainmaster.server.attempt_store import (
    AttemptStore,
    DigestError,
    FilePathError,
    IncompleteSaveError,
    ReadOnlyCheckpoint,
)
from trainmaster.server.coordinator.account_users import is_confined
from trainmaster.server.coordinator.launch import checkpoints_home
from trainmaster.server.core.errors import ConflictError, NotFoundError, StoreUnavailableError
from trainmaster.server.core.job import Attempt, Job
from trainmaster.server.http.auth import credential_of, guard
from trainmaster.server.http.context import ApiContext, Context
from trainmaster.server.http.errors import AttemptEndedError, InvalidTokenError, StreamGapConflictError, wrong
from trainmaster.server.storage import ARTIFACTS, URI, output_path
from trainmaster.server.store import accounts, attempts, checkpoints, jobs
from trainmaster.server.store.scope import Scope

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFiles:
    """An area of the files of an authenticated attempt."""

    context: ApiContext
    job_id: str
    number: int
    area: FileArea
    store: AttemptStore

    async def do(self, work: Callable[[], T]) -> T:
        """Do file work in a thread, with its errors as answers."""

        def guarded() -> T:
            with answered():
                return work()

        return await run_in_threadpool(guarded)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    try:
        yield
    except FilePathError as error:
        raise wrong("path", str(error)) from None
    except StreamGapError as gap:
        raise StreamGapConflictError(gap.next_offset) from None
    except DigestError as error:
        raise wrong("sha256", str(error)) from None
    except (IncompleteSaveError, UnsafeFileError) as error:
        raise ConflictError(str(error)) from None
    except FileNotFoundError:
        raise NotFoundError("there is no such file") from None
    except FileExistsError:
        raise ConflictError("there is a file in place of a directory, or a directory in place of the file") from None
    except OSError as error:
        # The client tries again: somebody has to make room.
        raise StoreUnavailableError(f"the server's artifacts cannot be read or written: {error.strerror}") from error


AttemptId = Annotated[str, Path(description="`<job_id>.<number>`", max_length=256)]
Area = Annotated[FileArea, Path(description="`checkpoints`, `resume` (read only) or `output` (write only).")]


@guard
async def _attempt_files(request: Request, context: Context, attempt_id: AttemptId, area: Area) -> AttemptFiles:
    token = credential_of(request)

    def find(connection: Connection) -> AttemptFiles:
        try:
            attempt = attempts.get(connection, Scope.everything(), attempt_id)
        except NotFoundError:
            raise InvalidTokenError("this token is not valid for this attempt") from None
        valid = [attempt.rank_token, *([attempt.token] if area is FileArea.OUTPUT else [])]
        if not any(hmac.compare_digest(each.encode(), token.encode()) for each in valid):
            raise InvalidTokenError("this token is not valid for this attempt")
        job_id = attempt_id.rpartition(".")[0]
        job = owning(connection, job_id, attempt.number)
        store = _store(context, connection, job, attempt)
        return AttemptFiles(context=context, job_id=job_id, number=attempt.number, area=area, store=store)

    return await context.read(find)


Files = Annotated[AttemptFiles, Depends(_attempt_files)]


def owning(connection: Connection, job_id: str, number: int) -> Job:
    """The job, if this attempt is its current one."""
    job = jobs.get(connection, Scope.everything(), job_id, deleted=True)
    if job.attempt is None or job.attempt.number != number:
        raise AttemptEndedError("another attempt owns this job now, or none: nothing more is taken for this one")
    return job


def _store(context: ApiContext, connection: Connection, job: Job, attempt: Attempt) -> AttemptStore:
    scope, resume = Scope(job.account_id), None
    if attempt.resume_checkpoint_id is not None:
        with contextlib.suppress(NotFoundError):
            found = checkpoints.get(connection, scope, attempt.resume_checkpoint_id)
            if found.root != URI:
                top = context.roots.path(found.root, "")
                resume = ReadOnlyCheckpoint(top=top, directory=found.path, name=FilePath(found.path).name)
    # As for a promotion: an account's files belong to the user that its jobs run as here, if there is one.
    account = accounts.get(connection, scope, job.account_id)
    uid = account.uid if os.geteuid() == 0 else None
    return AttemptStore(
        artifacts=context.roots.path(ARTIFACTS, ""),
        attempt_id=f"{job.job_id}.{attempt.number}",
        checkpoints=checkpoints_home(job, confined=is_confined(account, context.settings)),
        output=output_path(job.job_id),
        resume=resume,
        user=None if uid in (None, os.geteuid()) else User.of(uid),
    )
