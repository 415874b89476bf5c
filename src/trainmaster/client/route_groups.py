"""Groups of routes, such as `client.cluster` and `client.webhooks`, and the check of a webhook's deliveries."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from trainmaster.client.connection import Connection, given
from trainmaster.client.errors import NotFoundError, SignatureError
from trainmaster.client.types import (
    Account,
    Backend,
    BackendSummary,
    CheckedData,
    CreatedWebhook,
    Key,
    NewKey,
    Node,
    NodeEvent,
    Queue,
    QueueEntry,
    RuntimeDocument,
    RuntimeList,
    Summary,
    Trial,
    Webhook,
)


class RouteGroup:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection


class Cluster(RouteGroup):
    """The routes about nodes and queues. What changes them needs a key with the scope `cluster_admin`."""

    def summary(self) -> Summary:
        """The cluster as a whole."""
        return cast(Summary, self._connection.call("GET", "/v1/cluster"))

    def backends(self) -> Sequence[BackendSummary]:
        """Where jobs can run, the default first."""
        return cast(Sequence[BackendSummary], self._connection.call("GET", "/v1/backends")["backends"])

    def backend(self, name: str) -> Backend:
        """One backend; the engine that runs its jobs is asked now."""
        return cast(Backend, self._connection.call("GET", f"/v1/backends/{quote(name, safe='')}"))

    def nodes(self) -> Sequence[Node]:
        """Every node, and what is free on it."""
        return cast(Sequence[Node], self._connection.call("GET", "/v1/nodes")["nodes"])

    def node(self, node: str) -> Node:
        """One node."""
        return cast(Node, self._connection.call("GET", _node(node)))

    def node_events(self, node: str, *, limit: int = 100) -> Sequence[NodeEvent]:
        """What happened to a node, the newest first."""
        found = self._connection.call("GET", _node(node, "events"), params={"limit": limit})
        return cast(Sequence[NodeEvent], found["events"])

    def drain(self, node: str, *, reason: str = "", force: bool = False, grace_seconds: float | None = None) -> Node:
        """Give a node no more work; with `force`, preempt what runs there. It is DRAINED when nothing is left."""
        body = {"reason": reason, "force": force, "grace_seconds": grace_seconds}
        return cast(Node, self._connection.call("POST", _node(node, "drain"), json=body))

    def enable(self, node: str) -> Node:
        """Give a node work again."""
        return cast(Node, self._connection.call("POST", _node(node, "enable"), json={}))

    def change_node(
        self, node: str, *, labels: Sequence[str] | None = None, capabilities: Sequence[str] | None = None
    ) -> Node:
        """Set the labels or capabilities that a node has beside those that its backend reports; None leaves them."""
        body = given(labels=labels, capabilities=capabilities)
        return cast(Node, self._connection.call("PATCH", _node(node), json=body))

    def queues(self) -> Sequence[Queue]:
        """Every queue, and what is in it."""
        return cast(Sequence[Queue], self._connection.call("GET", "/v1/queues")["queues"])

    def put_queue(self, name: str, *, weight: float = 1.0, quota_gpus: int | None = None) -> Queue:
        """Make a queue, or set both its weight and its quota."""
        body = {"weight": weight, "quota_gpus": quota_gpus}
        return cast(Queue, self._connection.call("PUT", _queue(name), json=body))

    def delete_queue(self, name: str) -> None:
        """Remove a queue in which no job waits or runs."""
        self._connection.call("DELETE", _queue(name))

    def queue(self, name: str = "default", *, page_size: int = 100) -> Iterator[QueueEntry]:
        """The jobs that wait in a queue, in the order of the scheduler; pages are fetched as they are needed."""
        for page in self._connection.pages("/v1/queue", queue=name, page_size=page_size):
            yield from page["entries"]


def _node(node: str, route: str = "") -> str:
    return f"/v1/nodes/{quote(node, safe='')}" + (f"/{route}" if route else "")


def _queue(name: str) -> str:
    return f"/v1/queues/{quote(name, safe='')}"


class Runtimes(RouteGroup):
    """The server's runtimes. Those that are built in, and those of a client's own sources, are not among them."""

    def list(self) -> RuntimeList:
        """Every runtime, and which files cannot be used."""
        return cast(RuntimeList, self._connection.call("GET", "/v1/runtimes"))

    def get(self, name: str) -> RuntimeDocument:
        """One runtime."""
        return cast(RuntimeDocument, self._connection.call("GET", f"/v1/runtimes/{quote(name, safe='')}"))


class Admin(RouteGroup):
    """Accounts and keys. To change them, your own key needs the scope `cluster_admin`; without it, you see your own."""

    def accounts(self) -> Sequence[Account]:
        """Accounts, by name."""
        return cast(Sequence[Account], self._connection.call("GET", "/v1/accounts")["accounts"])

    def account(self, account_id: str) -> Account:
        """One account."""
        return cast(Account, self._connection.call("GET", _account(account_id)))

    def create_account(self, account_id: str, *, uid: int | None = None) -> Account:
        """Make an account; its jobs run as the system's user `uid` on the server's machine."""
        body = {"account_id": account_id, "uid": uid}
        return cast(Account, self._connection.call("POST", "/v1/accounts", json=body))

    def set_uid(self, account_id: str, uid: int | None) -> Account:
        """Say as which of the system's users the jobs of an account run."""
        return cast(Account, self._connection.call("PATCH", _account(account_id), json={"uid": uid}))

    def remove_account(self, account_id: str) -> Account:
        """Remove an account that has neither jobs nor keys."""
        return cast(Account, self._connection.call("DELETE", _account(account_id)))

    def keys(self) -> Sequence[Key]:
        """Keys, the oldest first, revoked ones among them."""
        return cast(Sequence[Key], self._connection.call("GET", "/v1/keys")["keys"])

    def own_key(self) -> Key:
        """The key that this client uses."""
        return cast(Key, self._connection.call("GET", "/v1/keys/current"))

    def create_key(
        self, name: str, *, scopes: Sequence[str], account_id: str | None = None, prefix: str | None = None
    ) -> NewKey:
        """Make a key of an account, by default your own; `prefix` is what the key begins with."""
        body = given(name=name, scopes=[*scopes], account_id=account_id, prefix=prefix)
        return cast(NewKey, self._connection.call("POST", "/v1/keys", json=body))

    def revoke_key(self, key_id: str) -> Key:
        """Revoke a key, for good."""
        return cast(Key, self._connection.call("DELETE", f"/v1/keys/{quote(key_id, safe='')}"))


def _account(account_id: str) -> str:
    return f"/v1/accounts/{quote(account_id, safe='')}"


PATIENCE_S = 180.0
"""A server takes up to two minutes."""


class Data(RouteGroup):
    """Training data."""

    def validate(
        self,
        data_config: Mapping[str, Any],
        *,
        base_model: Mapping[str, Any] | None = None,
        training_type: str = "SFT",
        hyperparameters: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        files: Sequence[Mapping[str, Any]] = (),
        limit: int = 3,
    ) -> CheckedData:
        """Have real rows read, and see what a model will see of them.

        Args:
            data_config: as a job has it.
            base_model: whose tokenizer is used; without it and `preprocess.tokenizer_id`, rows are only read.
            training_type: what the rows are for.
            hyperparameters: as a job has them.
            environment: variables such as HF_TOKEN, for this one time.
            files: uploaded files that relative paths name, as in `workload.files`.
            limit: how many rows of each source are shown.
        """
        body = {
            "data_config": data_config,
            "base_model": base_model,
            "training_type": training_type,
            "hyperparameters": hyperparameters or {},
            "environment": environment or {},
            "files": [*files],
            "limit": limit,
        }
        answer = self._connection.call("POST", "/v1/data/validate", json=body, patience_s=PATIENCE_S)
        return cast(CheckedData, answer)


class Webhooks(RouteGroup):
    """The webhooks of a key's account, as `Client.webhooks`."""

    def list(self) -> Sequence[Webhook]:
        """Every webhook, and how it does."""
        return cast(Sequence[Webhook], self._connection.call("GET", "/v1/webhooks")["webhooks"])

    def get(self, webhook_id: str) -> Webhook:
        """One webhook."""
        return cast(Webhook, self._connection.call("GET", _webhook(webhook_id)))

    def create(self, url: str, *, statuses: Sequence[str] = (), secret: str | None = None) -> CreatedWebhook:
        """Make a webhook; its secret, given or made, is in the answer and never again.

        Sent again when the connection breaks, and still made once: the same url with the same secret is the same.
        """
        secret = secret or SECRET_PREFIX + secrets.token_urlsafe(32)
        body = {"url": url, "statuses": [*statuses], "secret": secret}
        return cast(CreatedWebhook, self._connection.call("POST", "/v1/webhooks", json=body))

    def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        statuses: Sequence[str] | None = None,
        secret: str | None = None,
    ) -> Webhook:
        """Change a webhook; it continues with the next event."""
        body = given(url=url, statuses=None if statuses is None else [*statuses], secret=secret)
        return cast(Webhook, self._connection.call("PATCH", _webhook(webhook_id), json=body))

    def remove(self, webhook_id: str, *, missing_ok: bool = False) -> None:
        """Remove a webhook."""
        try:
            self._connection.call("DELETE", _webhook(webhook_id))
        except NotFoundError:
            if not missing_ok:
                raise

    def test(self, webhook_id: str) -> Trial:
        """Have the server send a test event now, and say how that went."""
        return cast(Trial, self._connection.call("POST", f"{_webhook(webhook_id)}/test"))


def _webhook(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"


TIMESTAMP_HEADER = "X-Trainmaster-Timestamp"
SIGNATURE_HEADER = "X-Trainmaster-Signature"
TOLERANCE_S = 300.0
"""How old a delivery may be when it arrives: one that somebody recorded is no good for long."""
SECRET_PREFIX = "whsec_"


def verify_webhook(
    secret: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> dict[str, Any]:
    """Check that a delivery comes from whoever has the secret, and is fresh; returns what it says.

    Args:
        secret: what was shown when the webhook was made.
        headers: of the request; the case of their names does not matter.
        body: of the request, byte by byte as it came.
        tolerance_s: how far the clocks of sender and receiver may be apart.
        now: Unix seconds; by default the time.

    Raises:
        SignatureError: it does not, or it is too old.
    """
    sent = {name.lower(): value for name, value in headers.items()}
    timestamp, signatures = sent.get(TIMESTAMP_HEADER.lower(), ""), sent.get(SIGNATURE_HEADER.lower(), "")
    if not timestamp.isdecimal() or not signatures:
        raise SignatureError("the delivery is not signed")
    if abs((time.time() if now is None else now) - int(timestamp)) > tolerance_s:
        raise SignatureError("the delivery is too old, or the clocks are far apart")
    expected = "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    if not any(hmac.compare_digest(expected.encode(), each.strip().encode()) for each in signatures.split(",")):
        raise SignatureError("the signature is not that of the secret")
    document: dict[str, Any] = json.loads(body)
    return document
