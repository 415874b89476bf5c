"""Every route and every role: who is let in, and what the others are told."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from api_roles import BY_SCOPE, ROUTES, Who, served
from api_world import COMMAND, Served, World
from fastapi import APIRouter

from patience import PATIENCE_S
from trainmaster.server.core.accounts import KeyScope, key_id_of
from trainmaster.server.http.auth import refuse_unguarded
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

OURS, THEIRS = "ours", "theirs"
BLOB = b"somebody's file"
SHA256 = hashlib.sha256(BLOB).hexdigest()
LET_IN = {200, 201, 400, 404, 409, 422, 503}
"""Answers that only somebody gets who was let in."""
MISSING = {
    "job_id": "job-nothing00000",
    "checkpoint_id": "nothing",
    "node_id": "nothing",
    "job": "nothing",
    "name": "nothing",
    "sha256": "0" * 64,
    "webhook_id": "nothing",
    "account_id": "nothing",
    "key_id": "nothing",
}
"""Things that are not there: whoever is let in can do no harm with them."""
REST = {
    "node": "0",
    "stream": "nodes/0/worker.jsonl",
    "document": "nodes/0/beat.json",
    "area": "checkpoints",
    "path": "x",
    "checkpoint": "x",
    "operation_id": "x",
    "operation": "x",
    "shape": "x",
    "version": "x",
    "model_id": "x",
    "run_id": "x",
    "place": "weights",
    "session_id": "x",
    "sampler_id": "x",
}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A server, things that belong to one account, and credentials of every kind."""

    http: httpx.Client
    present: dict[str, str]
    keys: dict[str, str]
    """By the one scope that each has."""
    revoked: str
    other: str
    """Of another account, with every scope but the cluster's."""
    worker: str
    rank: str
    attempt_id: str

    def ask(self, operation: str, credential: str | None, *, missing: bool = False) -> httpx.Response:
        method, _, template = operation.partition(" ")
        values = {**self.present, **(MISSING if missing else {}), **REST, "attempt_id": self.attempt_id}
        path = re.sub(r"\{(\w+)(:path)?\}", lambda name: values[name[1]], template)
        headers = {"Authorization": f"Bearer {credential}"} if credential else {}
        body: dict[str, Any] = {} if method in ("GET", "HEAD", "OPTIONS") else {"content": b"{}"}
        return self.http.request(method, path, headers=headers, **body)


@pytest.fixture(scope="module")
def stage(world: World, served: Served) -> Iterator[Stage]:
    ours = world.key(OURS)
    other = world.key(THEIRS, KeyScope.VIEW, KeyScope.MANAGE, KeyScope.EVALUATE)
    revoked = world.key(OURS)
    world.database.write_now(lambda connection: accounts.revoke_key(connection, Scope(OURS), key_id_of(revoked), 1.0))
    headers = {"Authorization": f"Bearer {ours}"}
    with httpx.Client(base_url=served.url, timeout=PATIENCE_S, verify=False) as http:
        assert http.put(f"/v1/blobs/{SHA256}", content=BLOB, headers=headers).is_success
        made = http.post("/v1/jobs", json=COMMAND, headers=headers).json()["data"]
        attempt = world.start(made["job_id"]).live
        world.save(made["job_id"], "checkpoint-of-ours", 1)
        hook = {"url": "https://127.0.0.1:1/hook", "secret": "a secret of the hook's"}
        webhook = http.post("/v1/webhooks", json=hook, headers=headers).json()["data"]
        present = {
            "job_id": made["job_id"],
            "checkpoint_id": "checkpoint-of-ours",
            "node_id": "here",
            "job": "foreign",
            "name": "default",
            "sha256": SHA256,
            "webhook_id": webhook["webhook_id"],
            "account_id": OURS,
            "key_id": key_id_of(ours),
        }
        yield Stage(
            http=http,
            present=present,
            keys={scope: world.key(OURS, scope) for scope in KeyScope},
            revoked=revoked,
            other=other,
            worker=attempt.token,
            rank=attempt.rank_token,
            attempt_id=f"{made['job_id']}.1",
        )


def test_every_route_is_in_the_table() -> None:
    assert set(served()) == set(ROUTES)


@pytest.mark.parametrize(("operation", "who"), ROUTES.items())
def test_route_lets_in_exactly_who_it_should(stage: Stage, operation: str, who: Who) -> None:
    if who is Who.SIGNATURE:
        for credential in (None, "eyJ-guessed", *stage.keys.values(), stage.worker, stage.rank):
            assert stage.ask(operation, credential).status_code == 403
        return
    wrong = {None: "AUTH_TOKEN_MISSING", "eyJ-guessed": "AUTH_TOKEN_INVALID", stage.revoked: "AUTH_TOKEN_INVALID"}
    for credential, code in wrong.items():
        answer = stage.ask(operation, credential)
        assert answer.status_code == (200 if who is Who.ANYBODY else 401), (operation, code)
        assert who is Who.ANYBODY or code_of(answer) in (code, None)
    for scope, key in stage.keys.items():
        check_key(stage, operation, who, scope, key)
    for token, good_for in ((stage.worker, {Who.WORKER, Who.VIEW_OR_WORKER}), (stage.rank, {Who.RANK})):
        answer = stage.ask(operation, token)
        if who in good_for:
            assert answer.status_code in LET_IN, (operation, answer.text)
        elif who is not Who.ANYBODY:
            assert answer.status_code == 401, (operation, answer.text)
            assert code_of(answer) in ("AUTH_TOKEN_INVALID", None)


def check_key(stage: Stage, operation: str, who: Who, scope: str, key: str) -> None:
    wanted = BY_SCOPE.get(who)
    if who in (Who.WORKER, Who.RANK):
        assert stage.ask(operation, key).status_code == 401
    elif wanted is not None and scope != wanted:
        for missing in (False, True):
            answer = stage.ask(operation, key, missing=missing)
            assert answer.status_code == 403, (operation, scope, answer.text)
            assert code_of(answer) in ("AUTH_INSUFFICIENT_SCOPE", None)
    else:
        answer = stage.ask(operation, key, missing=True)
        assert answer.status_code in LET_IN, (operation, scope, answer.text)


OF_AN_ACCOUNT = ("{job_id}", "{checkpoint_id}", "{sha256}", "{webhook_id}", "{account_id}", "{key_id}")


@pytest.mark.parametrize(
    "operation",
    [
        operation
        for operation, who in ROUTES.items()
        if any(name in operation for name in OF_AN_ACCOUNT)
        and who in (Who.VIEW, Who.MANAGE, Who.VIEW_OR_WORKER)
        and not operation.startswith("PUT /v1/blobs")
        and "PUT /v1/modules/scaimind/blobs" not in operation
    ],
)
def test_what_belongs_to_another_account_looks_missing(stage: Stage, operation: str) -> None:
    theirs, missing = (stage.ask(operation, stage.other, missing=missing) for missing in (False, True))
    assert theirs.status_code == missing.status_code == 404, theirs.text
    assert said(theirs, stage.present) == said(missing, MISSING)


def test_lists_show_nothing_of_another_account(stage: Stage) -> None:
    for operation in ("GET /v1/jobs", "GET /v1/events", "GET /v1/webhooks", "GET /v1/accounts", "GET /v1/keys"):
        text = stage.ask(operation, stage.other).text
        assert OURS not in text
        assert stage.present["job_id"] not in text


def test_token_of_one_attempt_is_not_good_for_another(stage: Stage, world: World) -> None:
    made = stage.http.post("/v1/jobs", json=COMMAND, headers={"X-API-Key": stage.keys["manage"]}).json()["data"]
    another = world.start(made["job_id"]).live
    for operation, who in ROUTES.items():
        if who in (Who.WORKER, Who.RANK):
            token = another.token if who is Who.WORKER else another.rank_token
            assert stage.ask(operation, token).status_code == 401


def test_route_that_nobody_guards_cannot_be_served() -> None:
    router = APIRouter()

    @router.get("/everything")
    async def everything() -> None: ...

    with pytest.raises(RuntimeError, match="everything"):
        refuse_unguarded(router)


def code_of(answer: httpx.Response) -> str | None:
    """The code of a refusal; an answer to HEAD has none."""
    if not answer.content:
        return None
    error = error_of(answer)
    return str(error["details"][0]["reason"] if isinstance(error["code"], int) else error["code"])


def error_of(answer: httpx.Response) -> Any:
    """The error, in the form of whichever door."""
    document = answer.json()
    return document.get("error", document)


def said(answer: httpx.Response, names: dict[str, str]) -> Any:
    """The error, without the name that was asked for."""
    if not answer.content:
        return None
    text = json.dumps(error_of(answer))
    for name in OF_AN_ACCOUNT:
        text = text.replace(names[name.strip("{}")], "THAT")
    return text
