"""The caller's tokens for other services, which a request may pass on to its job."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request

from trainmaster.protocol.secrets import SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.http.auth import credential_of
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.token_exchange import MAX_TOKEN_LENGTH

HEADERS = {SCAIDRIVE_TOKEN: "X-ScaiDrive-Token", SCAIATLAS_TOKEN: "X-ScaiAtlas-Token"}
"""The secret that each header becomes."""
FORWARDING_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": header,
        "in": "header",
        "required": False,
        "description": "Your token for that service, kept sealed until the job ends.",
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_TOKEN_LENGTH, "pattern": r"^[!-~]+$"},
    }
    for header in HEADERS.values()
]

_TOKEN = re.compile(r"[!-~]+")


async def forwarded_tokens(request: Request, context: ApiContext) -> dict[str, str]:
    """The tokens that a request passes on to its job; those that it lacks are exchanged for, where that is set up.

    Raises:
        SpecError: a token is malformed.
        CredentialsRefusedError: the exchange refuses the caller's credential.
        ExchangeUnavailableError: the exchange does not answer.
    """
    tokens = {name: token for name, header in HEADERS.items() if (token := request.headers.get(header))}
    for name, token in tokens.items():
        if len(token) > MAX_TOKEN_LENGTH or not _TOKEN.fullmatch(token):
            message = f"must have at most {MAX_TOKEN_LENGTH} printable characters without spaces"
            raise SpecError([Problem(field=HEADERS[name], message=message)])
    if context.token_exchange is None or len(tokens) == len(HEADERS):
        return tokens
    missing = [name for name in HEADERS if name not in tokens]
    return {**tokens, **await context.token_exchange.tokens(credential_of(request), missing)}
