"""What the Hub's client raises, as our own errors, with what to do about them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from trainmaster.training.errors import CredentialsError, InputError, UnavailableError
from trainmaster.training.fetching.access import Access
from trainmaster.training.progress import doing

_ASKING = "huggingface_hub.utils._http"
"""The client's logger of requests that it makes again."""
_CLIENT_PATIENCE = "2 minutes"
"""The client tries six times, waits for up to 10 s each time, and for up to 8 s in between."""


@contextlib.contextmanager
def translated(shown: str, access: Access) -> Iterator[None]:
    """The client's errors as ours.

    Args:
        shown: the repository's name.
        access: what was asked with, and what to do where that does not do.
    """
    from huggingface_hub import constants, errors

    token = "the token that was sent" if access.hub_token or os.environ.get("HF_TOKEN") else "no token was sent"
    try:
        doing(f"fetching {shown} from {endpoint()}")
        with _trying_again_told_once(shown):
            yield
    except errors.GatedRepoError as error:
        raise CredentialsError(
            f"{shown}: access is granted by its owner alone ({token}); ask for it at {endpoint()}, and "
            f"{access.remedies.hub_token}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        if status_of(error) in (401, 403) and (access.hub_token or os.environ.get("HF_TOKEN")):
            raise CredentialsError(
                f"{shown}: the Hub refuses the token, or there is no such repository; {access.remedies.hub_token}"
            ) from error
        raise InputError(
            f"{shown}: the Hub has no such repository, or it is private ({token}); {access.remedies.hub_name}; "
            f"or {access.remedies.hub_token}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{shown}: the repository has no such revision") from error
    except errors.HFValidationError as error:
        raise InputError(f"{shown} is no name of a repository on the Hub: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise InputError(
                f"{shown}: it is not on this machine, and HF_HUB_OFFLINE keeps it from being fetched; unset that, or "
                "fetch it before"
            ) from error
        raise _unavailable(shown, "does not answer", error, access) from error
    except errors.HfHubHTTPError as error:
        if status_of(error) in (401, 403):
            said = _first_line(error)
            raise CredentialsError(
                f"{shown}: the Hub refuses it ({token}): {said}; {access.remedies.hub_token}"
            ) from error
        if status_of(error) == 404:
            raise InputError(f"{shown}: the Hub does not have it: {_first_line(error)}") from error
        raise _unavailable(shown, "fails", error, access) from error
    except OSError as error:
        if error.errno is not None:
            raise  # of this machine: its disk is full, say
        raise _unavailable(shown, "does not answer", error, access) from error
    except Exception as error:
        # The client's transport has errors of its own, which are no OSError.
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
            raise
        raise _unavailable(shown, "does not answer", error, access) from error


def _unavailable(shown: str, what: str, error: BaseException, access: Access) -> UnavailableError:
    return UnavailableError(
        f"{shown}: the Hub at {endpoint()} {what}: {_first_line(error)}. If this machine cannot reach it, "
        f"{access.remedies.hub_mirror}"
    )


@contextlib.contextmanager
def _trying_again_told_once(shown: str) -> Iterator[None]:
    """Let the client say only once that it tries again; how that ended is ours to say."""
    logger, told = logging.getLogger(_ASKING), False
    doing_so = f"{shown}: the Hub at {endpoint()} does not answer; it is asked again, for up to {_CLIENT_PATIENCE}"

    def first(record: logging.LogRecord) -> bool:
        nonlocal told
        if record.levelno != logging.WARNING:
            return True
        if not told:
            told = True
            doing(f"{doing_so}: {record.getMessage()}")
        return False

    logger.addFilter(first)
    try:
        yield
    finally:
        logger.removeFilter(first)


def status_of(error: Any) -> int | None:
    """The status with which the Hub answered; None when it did not."""
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def endpoint() -> str:
    """Where the Hub is asked."""
    from huggingface_hub import constants

    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or constants.ENDPOINT


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
