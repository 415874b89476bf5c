"""Groups of routes, such as `client.cluster` and `client.webhooks`, and the check of a webhook's deliveries."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from trainmaster.client import types
from trainmaster.client.connection import Connection, given, route
from trainmaster.client.errors import NotFoundError, SignatureError


class RouteGroup:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._call = connection.call


class ClusterRoutes(RouteGroup):
    """The routes about nodes and queues. What changes them needs a key with the scope `cluster_admin`."""

    def summary(self) -> types.Summary:
        """The cluster as a whole."""
        return cast(types.Summary, self._call("GET", "/v1/cluster"))

    def backends(self) -> Sequence[types.BackendSummary]:
        """Where jobs can run, the default first."""
        return cast(Sequence[types.BackendSummary], self._call("GET", "/v1/backends")["backends"])

    def backend(self, name: str) -> types.Backend:
        """One backend; the engine that runs its jobs is asked now."""
        return cast(types.Backend, self._call("GET", route("backends", name)))

    def put_backend(self, name: str, *, kind: str, options: Mapping[str, Any] | None = None) -> types.BackendSummary:
        """Add a cluster that jobs can name as their backend, or replace what is known of it."""
        body = {"kind": kind, "options": dict(options or {})}
        return cast(types.BackendSummary, self._call("PUT", route("backends", name), json=body))

    def remove_backend(self, name: str) -> None:
        """Remove a cluster on which no job waits or runs."""
        self._call("DELETE", route("backends", name))

    def runtimes(self, name: str) -> types.RuntimeList:
        """The training runtimes of a cluster with Kubeflow Trainer, asked now."""
        return cast(types.RuntimeList, self._call("GET", route("backends", name, "runtimes")))

    def foreign_jobs(self, name: str) -> Sequence[types.ForeignJob]:
        """The jobs that others made on a cluster, the newest first."""
        return cast(Sequence[types.ForeignJob], self._call("GET", route("backends", name, "foreign-jobs"))["jobs"])

    def foreign_job(self, name: str, job: str) -> types.ForeignJob:
        """One of them, by the name that it has there."""
        return cast(types.ForeignJob, self._call("GET", route("backends", name, "foreign-jobs", job)))

    def foreign_log(self, name: str, job: str, step: str, *, cursor: str = "") -> types.ForeignLog:
        """What a step of one of them has written since a cursor. Needs a key with the scope `cluster_admin`."""
        parameters = {"step": step, "cursor": cursor}
        found = self._call("GET", route("backends", name, "foreign-jobs", job, "logs"), params=parameters)
        return cast(types.ForeignLog, found)

    def nodes(self) -> Sequence[types.Node]:
        """Every node, and what is free on it."""
        return cast(Sequence[types.Node], self._call("GET", "/v1/nodes")["nodes"])

    def node(self, node: str) -> types.Node:
        return cast(types.Node, self._call("GET", route("nodes", node)))

    def node_events(self, node: str, *, limit: int = 100) -> Sequence[types.NodeEvent]:
        """What happened to a node, the newest first."""
        found = self._call("GET", route("nodes", node, "events"), params={"limit": limit})
        return cast(Sequence[types.NodeEvent], found["events"])

    def drain(
        self, node: str, *, reason: str = "", force: bool = False, grace_seconds: float | None = None
    ) -> types.Node:
        """Give a node no more work; with `force`, preempt what runs there. It is DRAINED when nothing is left."""
        body = {"reason": reason, "force": force, "grace_seconds": grace_seconds}
        return cast(types.Node, self._call("POST", route("nodes", node, "drain"), json=body))

    def enable(self, node: str) -> types.Node:
        """Give a node work again."""
        return cast(types.Node, self._call("POST", route("nodes", node, "enable"), json={}))

    def change_node(
        self, node: str, *, labels: Sequence[str] | None = None, capabilities: Sequence[str] | None = None
    ) -> types.Node:
        """Set the labels or capabilities that a node has beside those that its backend reports; None leaves them."""
        body = given(labels=labels, capabilities=capabilities)
        return cast(types.Node, self._call("PATCH", route("nodes", node), json=body))

    def queues(self) -> Sequence[types.Queue]:
        """Every queue, and what is in it."""
        return cast(Sequence[types.Queue], self._call("GET", "/v1/queues")["queues"])

    def put_queue(self, name: str, *, weight: float = 1.0, quota_gpus: int | None = None) -> types.Queue:
        """Make a queue, or set both its weight and its quota."""
        body = {"weight": weight, "quota_gpus": quota_gpus}
        return cast(types.Queue, self._call("PUT", route("queues", name), json=body))

    def delete_queue(self, name: str) -> None:
        """Remove a queue in which no job waits or runs."""
        self._call("DELETE", route("queues", name))

    def queue(self, name: str = "default", *, page_size: int = 100) -> Iterator[types.QueueEntry]:
        """The jobs that wait in a queue, in the order of the scheduler; pages are fetched as they are needed."""
        for page in self._connection.pages("/v1/queue", queue=name, page_size=page_size):
            yield from page["entries"]


class Runtimes(RouteGroup):
    """The server's runtimes. Those that are built in, and those of a client's own sources, are not among them."""

    def list(self) -> types.RuntimeList:
        """Every runtime, and which files cannot be used."""
        return cast(types.RuntimeList, self._call("GET", "/v1/runtimes"))

    def get(self, name: str) -> types.RuntimeDocument:
        return cast(types.RuntimeDocument, self._call("GET", route("runtimes", name)))


class Admin(RouteGroup):
    """Accounts and keys. To change them, your own key needs the scope `cluster_admin`; without it, you see your own."""

    def accounts(self) -> Sequence[types.Account]:
        """Accounts, by name."""
        return cast(Sequence[types.Account], self._call("GET", "/v1/accounts")["accounts"])

    def account(self, account_id: str) -> types.Account:
        return cast(types.Account, self._call("GET", route("accounts", account_id)))

    def create_account(self, account_id: str, *, uid: int | None = None) -> types.Account:
        """Make an account; its jobs run as the system's user `uid` on the server's machine."""
        return cast(types.Account, self._call("POST", "/v1/accounts", json={"account_id": account_id, "uid": uid}))

    def set_uid(self, account_id: str, uid: int | None) -> types.Account:
        """Set the uid that runs the jobs of an account."""
        return cast(types.Account, self._call("PATCH", route("accounts", account_id), json={"uid": uid}))

    def remove_account(self, account_id: str) -> types.Account:
        """Remove an account that has neither jobs nor keys."""
        return cast(types.Account, self._call("DELETE", route("accounts", account_id)))

    def keys(self) -> Sequence[types.Key]:
        """Keys, the oldest first, revoked ones among them."""
        return cast(Sequence[types.Key], self._call("GET", "/v1/keys")["keys"])

    def own_key(self) -> types.Key:
        """The key that this client uses."""
        return cast(types.Key, self._call("GET", "/v1/keys/current"))

    def create_key(
        self, name: str, *, scopes: Sequence[str], account_id: str | None = None, prefix: str | None = None
    ) -> types.NewKey:
        """Make a key of an account, by default your own; `prefix` is what the key begins with."""
        body = given(name=name, scopes=[*scopes], account_id=account_id, prefix=prefix)
        return cast(types.NewKey, self._call("POST", "/v1/keys", json=body))

    def revoke_key(self, key_id: str) -> types.Key:
        """Revoke a key, for good."""
        return cast(types.Key, self._call("DELETE", route("keys", key_id)))


PATIENCE_S = 180.0
"""A server takes up to two minutes."""


class Data(RouteGroup):
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
    ) -> types.CheckedData:
        """Have real rows read, and see what a model will see of them.

        Args:
            base_model: whose tokenizer is used; without it and `preprocess.tokenizer_id`, rows are only read.
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
        return cast(types.CheckedData, self._call("POST", "/v1/data/validate", json=body, patience_s=PATIENCE_S))


class Webhooks(RouteGroup):
    """The webhooks of a key's account, as `Client.webhooks`."""

    def list(self) -> Sequence[types.Webhook]:
        """Every webhook, and how it does."""
        return cast(Sequence[types.Webhook], self._call("GET", "/v1/webhooks")["webhooks"])

    def get(self, webhook_id: str) -> types.Webhook:
        return cast(types.Webhook, self._call("GET", route("webhooks", webhook_id)))

    def create(self, url: str, *, statuses: Sequence[str] = (), secret: str | None = None) -> types.CreatedWebhook:
        """Make a webhook; its secret, given or made, is in the answer and never again.

        Sent again when the connection breaks, and still made once: the same url with the same secret is the same.
        """
        secret = secret or SECRET_PREFIX + secrets.token_urlsafe(32)
        body = {"url": url, "statuses": [*statuses], "secret": secret}
        return cast(types.CreatedWebhook, self._call("POST", "/v1/webhooks", json=body))

    def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        statuses: Sequence[str] | None = None,
        secret: str | None = None,
    ) -> types.Webhook:
        """Change a webhook; it continues with the next event."""
        body = given(url=url, statuses=None if statuses is None else [*statuses], secret=secret)
        return cast(types.Webhook, self._call("PATCH", route("webhooks", webhook_id), json=body))

    def remove(self, webhook_id: str, *, missing_ok: bool = False) -> None:
        try:
            self._call("DELETE", route("webhooks", webhook_id))
        except NotFoundError:
            if not missing_ok:
                raise

    def test(self, webhook_id: str) -> types.Trial:
        """Have the server send a test event now, and say how that went."""
        return cast(types.Trial, self._call("POST", route("webhooks", webhook_id, "test")))


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

    Raises SignatureError if it does not, or is too old.
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
