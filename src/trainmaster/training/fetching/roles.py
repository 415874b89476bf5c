"""Roles of AWS, and of stores like it: keys for a while, from the service that hands them out (STS, `AssumeRole`)."""

from __future__ import annotations

import hashlib
import hmac
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from trainmaster.jobs.objects import Credentials
from trainmaster.training.errors import CredentialsError, InputError, UnavailableError

_SERVICE = "sts"
_VERSION = "2011-06-15"
_SESSION = "trainmaster"
_TIMEOUT_S = 30.0
_CLIENT_ERROR, _SERVER_ERROR = 400, 500


def assumed(role: str, remedy: str) -> Credentials:
    """What gives the keys of a role to whoever has the keys of the environment. Asked again when they expire.

    Args:
        role: its ARN.
        remedy: what to do where it cannot be assumed.

    Raises:
        InputError: the environment has no keys to ask with.
        CredentialsError: the service refuses them.
        UnavailableError: it does not answer.
    """
    if not (os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY")):
        raise InputError(f"{role}: a role is assumed with keys, and there are none; {remedy}")
    first: list[Mapping[str, Any]] = [_assume(role, remedy)]  # so that what is wrong is told in our own words

    def credentials() -> Mapping[str, Any]:
        return first.pop() if first else _assume(role, remedy)

    return credentials


def _assume(role: str, remedy: str) -> Mapping[str, Any]:
    body = urlencode({"Action": "AssumeRole", "Version": _VERSION, "RoleArn": role, "RoleSessionName": _SESSION})
    url = _endpoint()
    try:
        answer = httpx.post(url, content=body, headers=signed(url, body, datetime.now(UTC)), timeout=_TIMEOUT_S)
    except httpx.HTTPError as error:
        raise UnavailableError(f"{role}: {url}, which hands out its keys, does not answer: {error}") from error
    if answer.status_code >= _SERVER_ERROR:
        raise UnavailableError(f"{role}: {url}, which hands out its keys, answers {answer.status_code}")
    found = _texts(answer.text)
    if answer.status_code >= _CLIENT_ERROR or "AccessKeyId" not in found:
        said = f"{found.get('Code', answer.status_code)}: {found.get('Message', 'no keys came')}"
        raise CredentialsError(f"{role}: the role cannot be assumed: {said[:500]}; {remedy}")
    return {
        "access_key_id": found["AccessKeyId"],
        "secret_access_key": found["SecretAccessKey"],
        "token": found.get("SessionToken"),
        "expires_at": datetime.fromisoformat(found["Expiration"]),
    }


def signed(url: str, body: str, now: datetime) -> dict[str, str]:
    """The headers of a POST of a form, signed with the environment's keys (Signature Version 4)."""
    region, stamp = _region(), now.strftime("%Y%m%dT%H%M%SZ")
    headers = {
        "content-type": "application/x-www-form-urlencoded; charset=utf-8",
        "host": urlsplit(url).netloc,
        "x-amz-date": stamp,
    }
    if token := os.environ.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    request = "\n".join(
        (
            "POST",
            urlsplit(url).path or "/",
            "",
            *(f"{name}:{headers[name]}" for name in sorted(headers)),
            "",
            names,
            hashlib.sha256(body.encode()).hexdigest(),
        )
    )
    scope = f"{stamp[:8]}/{region}/{_SERVICE}/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{os.environ['AWS_SECRET_ACCESS_KEY']}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"{os.environ['AWS_ACCESS_KEY_ID']}/{scope}"
    return {
        **headers,
        "authorization": f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}",
    }


def _endpoint() -> str:
    """Of the service; stores that are not AWS's have it where they are themselves."""
    named = (os.environ.get(f"AWS_ENDPOINT_URL{suffix}") for suffix in ("_STS", "_S3", ""))
    return next((url.rstrip("/") + "/" for url in named if url), f"https://sts.{_region()}.amazonaws.com/")


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _texts(document: str) -> dict[str, str]:
    """The texts of an XML document by their elements' names; none where it is none."""
    try:
        elements = ElementTree.fromstring(document).iter()
    except ElementTree.ParseError:
        return {}
    return {element.tag.rpartition("}")[2]: element.text for element in elements if element.text}
