"""Signed addresses of saved weights: whoever has one can fetch those files until it expires, without a key.

The signature covers the path, which names one checkpoint and at most one of its files, the account, and the time of
expiry. Its key is derived from the server's secret key, so every server of a cluster checks what another one signed.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode

from starlette.requests import Request

from trainmaster.server.core.errors import ForbiddenError
from trainmaster.server.core.job import Checkpoint
from trainmaster.server.http.auth import SIGNED_PATHS
from trainmaster.server.settings.encryption import Sealer

GOOD_FOR_S = 3600
"""Clients ask for new ones five minutes before they expire."""
ARCHIVE = "archive"
FILES = "files"
_MOST_DIGITS = 12


def url_of(request: Request, sealer: Sealer, account_id: str, checkpoint: Checkpoint, rest: str, expires: int) -> str:
    """The signed URL of a checkpoint's archive or of one of its files, at the host that the client asked."""
    path = f"{SIGNED_PATHS}{checkpoint.job_id}/{checkpoint.checkpoint_id}/{rest}"
    query = {
        "account": account_id,
        "expires": str(expires),
        "signature": sealer.sign(_covered(path, account_id, str(expires))),
    }
    host = request.headers.get("host") or request.url.netloc
    return f"{request.url.scheme}://{host}{quote(path)}?{urlencode(query)}"


def require_signed(request: Request, sealer: Sealer, now: float) -> str:
    """The account whose weights a signed address leads to.

    Raises:
        ForbiddenError: its signature is wrong, or it has expired.
    """
    account_id, expires, signature = (
        request.query_params.get(name, "") for name in ("account", "expires", "signature")
    )
    covered = _covered(str(request.scope["path"]), account_id, expires)
    if len(expires) > _MOST_DIGITS or not expires.isdecimal() or not sealer.signed(covered, signature):
        raise ForbiddenError("this address is not one that the server signed")
    if now > int(expires):
        raise ForbiddenError("this address has expired: ask for a new one")
    return account_id


def _covered(path: str, account_id: str, expires: str) -> str:
    return "\n".join((path, account_id, expires))
