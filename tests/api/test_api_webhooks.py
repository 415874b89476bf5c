"""Webhooks over HTTP, and their deliveries to real receivers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from api_world import SEALER, Api, World, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

from patience import PATIENCE_S
from tls_files import self_signed
from trainmaster.client import SignatureError, verify_webhook
from trainmaster.server.coordinator import webhook_delivery
from trainmaster.server.coordinator.webhook_delivery import is_public, url_problem
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.coordinator.webhooks import Deliveries, most_tries, retry_delay_s
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.store import events, leases
from trainmaster.server.store.scope import Scope
from webhook_receiver import HANG, Receiver, receiving

EVERYTHING = Scope.everything()
LIFE = ["PENDING", "QUEUED", "SCHEDULING", "PREPARING", "TRAINING", "COMPLETED"]
SHORTLY_S = 0.05


def lead(world: World, holder: str) -> int:
    """Take the lead from whoever has it; the epoch."""

    def work(connection: Connection) -> int:
        present = leases.current(connection, EVERYTHING)
        if present is not None:
            leases.release(connection, EVERYTHING, present)
        lease = leases.acquire(connection, EVERYTHING, holder, "http://x", time.time(), 3600)
        assert lease is not None
        return lease.epoch

    return world.database.write_now(work)


@contextlib.contextmanager
def delivering(world: World, *, epoch: int | None = None, timeout_s: float = 10.0, **options: Any) -> Iterator[None]:
    """The leader's deliveries, for the length of a block; by default without much of a wait between tries."""
    led = lead(world, "a") if epoch is None else epoch
    subscriptions = Subscriptions(world.database, SEALER, private_addresses=True, timeout_s=timeout_s)
    deliveries = Deliveries(
        world.database,
        subscriptions,
        epoch=lambda: led,
        **{"retry_after_s": lambda failures: SHORTLY_S, **options},
    )
    deliveries.start()
    try:
        yield
    finally:
        deliveries.stop()


def subscribe(api: Api, receiver: Receiver, **fields: Any) -> Any:
    return api.call("POST", "/v1/webhooks", 201, json={"url": receiver.url, "secret": receiver.secret, **fields})


def show(api: Api, webhook: Any) -> Any:
    return api.call("GET", f"/v1/webhooks/{webhook['webhook_id']}")


def live(api: Api, world: World, **fields: Any) -> str:
    """A job's whole life."""
    job_id = api.submit(**fields)
    world.start(job_id)
    world.end(job_id)
    return job_id


# Routes


def test_webhook_is_made_shown_changed_and_removed(api: Api) -> None:
    made = api.call("POST", "/v1/webhooks", 201, json={"url": "https://example.com/x", "statuses": ["FAILED"]})
    assert made["secret"].startswith("whsec_")
    shown = show(api, made)
    assert {**shown, "secret": made["secret"]} == made
    assert api.call("GET", "/v1/webhooks")["webhooks"] == [shown]
    path = f"/v1/webhooks/{made['webhook_id']}"
    changed = api.call("PATCH", path, json={"statuses": [], "url": "https://example.com/y"})
    assert (changed["statuses"], changed["url"]) == ([], "https://example.com/y")
    assert api.call("DELETE", path) == {}
    assert api.call("GET", path, 404)["code"] == "NOT_FOUND"
    for method in ("DELETE", "PATCH"):
        api.call(method, path, 404)
    api.call("POST", f"{path}/test", 404)


def test_same_webhook_made_twice_is_one(api: Api) -> None:
    wanted = {"url": "https://example.com/x", "secret": "sixteen characters"}
    first = api.call("POST", "/v1/webhooks", 201, json=wanted)
    assert api.call("POST", "/v1/webhooks", 200, json=wanted) == first
    api.call("POST", "/v1/webhooks", 201, json={**wanted, "secret": "other characters"})
    assert len(api.call("GET", "/v1/webhooks")["webhooks"]) == 2


def test_webhooks_of_another_account_are_not_there(api: Api, world: World) -> None:
    made = api.call("POST", "/v1/webhooks", 201, json={"url": "https://example.com/x"})
    other = {"Authorization": f"Bearer {world.key('somebody-else')}"}
    path = f"/v1/webhooks/{made['webhook_id']}"
    assert api.call("GET", "/v1/webhooks", headers=other)["webhooks"] == []
    for method, where in (("GET", path), ("PATCH", path), ("DELETE", path), ("POST", f"{path}/test")):
        api.call(method, where, 404, headers=other)


def test_key_that_may_only_look_does_not_see_webhooks(api: Api, world: World) -> None:
    viewer = {"Authorization": f"Bearer {world.key(api.account_id, KeyScope.VIEW)}"}
    api.call("GET", "/v1/webhooks", 403, headers=viewer)
    api.call("POST", "/v1/webhooks", 403, headers=viewer, json={"url": "https://example.com"})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "url"),
        ({"url": ""}, "url"),
        ({"url": "ftp://example.com"}, "url"),
        ({"url": "https://"}, "url"),
        ({"url": "https://user:pass@example.com/"}, "url"),
        ({"url": "https://example.com/", "statuses": ["DONE"]}, "statuses[0]"),
        ({"url": "https://example.com/", "secret": "short"}, "secret"),
        ({"url": "https://example.com/", "secret": "\x00" * 20}, "secret"),
        ({"url": "https://example.com/", "secrte": "x"}, "secrte"),
    ],
)
def test_webhook_that_makes_no_sense_is_refused(api: Api, body: dict[str, Any], field: str) -> None:
    error = api.call("POST", "/v1/webhooks", 422, json=body)
    assert [detail["field"] for detail in error["details"]] == [field]


def test_account_has_so_many_webhooks_at_most(api: Api) -> None:
    for number in range(50):
        api.call("POST", "/v1/webhooks", 201, json={"url": f"https://example.com/{number}"})
    assert "at most 50" in api.call("POST", "/v1/webhooks", 409, json={"url": "https://example.com/"})["message"]


def test_secret_is_sealed_in_the_store_and_shown_once(api: Api, world: World, caplog: pytest.LogCaptureFixture) -> None:
    made = api.call("POST", "/v1/webhooks", 201, json={"url": "https://example.com/", "secret": "a-canary-in-a-mine"})
    assert made["secret"] == "a-canary-in-a-mine"
    everything = json.dumps([show(api, made), api.call("GET", "/v1/webhooks")])
    with world.database.read() as connection:
        everything += repr(connection.exec_driver_sql("SELECT * FROM webhooks").all())
    assert "a-canary-in-a-mine" not in everything + caplog.text


def test_trial_says_how_it_went(api: Api) -> None:
    with receiving(200, 500, 302) as receiver:
        made = subscribe(api, receiver)
        path = f"/v1/webhooks/{made['webhook_id']}/test"
        good, bad, moved = (api.call("POST", path) for _ in range(3))
        assert (good["delivered"], good["status_code"], good["problem"]) == (True, 200, "")
        assert (bad["delivered"], bad["status_code"], bad["problem"]) == (False, None, "answered with 500")
        assert moved["problem"] == "answered with 302; redirects are not followed"
        (event,) = receiver.taken
        assert (event["type"], event["job"], event["account_id"]) == ("test", None, api.account_id)
        assert event["event_id"] == good["event_id"] == receiver.arrived[0]["headers"]["X-Trainmaster-Event"]
        assert len(receiver.arrived) == 3


# Deliveries


def test_life_of_a_job_is_told_in_order_and_signed(api: Api, world: World) -> None:
    with receiving() as receiver, delivering(world):
        webhook = subscribe(api, receiver)
        job_id = live(api, world, name="nanogpt", labels={"team": "a"}, handle=f"h-{api.account_id}")
        wait_for(lambda: len(receiver.arrived) == len(LIFE))
        assert receiver.statuses == LIFE
        last, before = receiver.taken[-1], receiver.taken[-2]
        assert last["type"] == "job.completed"
        assert last["account_id"] == api.account_id
        assert last["created_at"].endswith("Z")
        assert {key: last["job"][key] for key in ("job_id", "name", "handle", "labels", "queue", "kind")} == {
            "job_id": job_id,
            "name": "nanogpt",
            "handle": f"h-{api.account_id}",
            "labels": {"team": "a"},
            "queue": "default",
            "kind": "command",
        }
        assert (last["job"]["previous_status"], last["job"]["reason"], last["job"]["attempt"]) == (
            "TRAINING",
            "SUCCEEDED",
            1,
        )
        assert int(last["event_id"]) > int(before["event_id"])
        assert receiver.arrived[-1]["headers"]["X-Trainmaster-Event"] == last["event_id"]
        shown = wait_for(lambda: (found := show(api, webhook))["cursor"] >= int(last["event_id"]) and found)
        assert shown["delivered_at"] is not None
        assert shown["problem"] == ""


def test_webhook_begins_with_what_comes_after_it(api: Api, world: World) -> None:
    with receiving() as receiver, delivering(world):
        live(api, world)
        subscribe(api, receiver, statuses=["COMPLETED"])
        second = live(api, world)
        wait_for(lambda: receiver.arrived)
        assert [event["job"]["job_id"] for event in receiver.taken] == [second]


def test_webhook_tells_of_its_statuses_and_its_account_alone(api: Api, world: World) -> None:
    other = {"Authorization": f"Bearer {world.key('webhooks-other')}"}
    with receiving() as receiver, delivering(world):
        subscribe(api, receiver, statuses=["COMPLETED", "CANCELLED"])
        foreign = str(api.call("POST", "/v1/jobs", 201, json=api_job(), headers=other)["job_id"])
        world.start(foreign)
        world.end(foreign)
        live(api, world)
        cancelled = api.submit()
        api.call("POST", f"/v1/jobs/{cancelled}/cancel")
        wait_for(lambda: len(receiver.arrived) == 2)
        assert receiver.statuses == ["COMPLETED", "CANCELLED"]
        assert {event["account_id"] for event in receiver.taken} == {api.account_id}


def api_job() -> dict[str, Any]:
    return {
        "name": "n",
        "workload": {"kind": "command", "argv": ["true"]},
        "resource_config": {"gpu_count": 0},
    }


def test_event_that_is_not_taken_is_sent_again_before_the_next(api: Api, world: World) -> None:
    with receiving(500, 404, 302, 200, 503) as receiver, delivering(world):
        webhook = subscribe(api, receiver)
        live(api, world)
        wait_for(lambda: len(receiver.statuses) == len(LIFE))
        assert receiver.statuses == LIFE
        ids = [request["headers"]["X-Trainmaster-Event"] for request in receiver.arrived]
        assert len(set(ids[:4])) == 1
        assert len(set(ids[4:6])) == 1
        assert {request["path"] for request in receiver.arrived} == {"/hook"}
        wait_for(lambda: show(api, webhook)["failures"] == 0)


def test_receiver_that_does_not_answer_is_asked_again(api: Api, world: World) -> None:
    with receiving(HANG) as receiver, delivering(world, timeout_s=0.5):
        webhook = subscribe(api, receiver, statuses=["COMPLETED"])
        live(api, world)
        wait_for(lambda: show(api, webhook)["delivered_at"])
        assert receiver.statuses == ["COMPLETED"]
        assert len(receiver.arrived) == 2


def test_receiver_that_is_down_is_told_when_it_is_back(api: Api, world: World) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    gone = Receiver(url=f"http://127.0.0.1:{port}/hook")
    with delivering(world):
        webhook = subscribe(api, gone)
        live(api, world)
        failing = wait_for(lambda: (found := show(api, webhook))["failures"] > 1 and found)
        assert failing["problem"].startswith("cannot be reached")
        assert failing["next_try_at"] is not None
        with receiving(port=port) as receiver:
            wait_for(lambda: len(receiver.statuses) == len(LIFE))
            assert receiver.statuses == LIFE


def test_webhook_that_hangs_holds_no_other_up(api: Api, world: World) -> None:
    with receiving(*[HANG] * 100) as hanging, receiving() as other, delivering(world, timeout_s=60):
        subscribe(api, hanging)
        subscribe(api, other)
        live(api, world)
        wait_for(lambda: len(other.statuses) == len(LIFE))
        assert len(hanging.arrived) == 1


def test_event_that_nobody_takes_is_given_up_and_the_next_is_told(api: Api, world: World) -> None:
    with receiving(500, 500, 500) as receiver, delivering(world, tries=3):
        webhook = subscribe(api, receiver)
        live(api, world)
        wait_for(lambda: len(receiver.statuses) == len(LIFE) - 1)
        assert receiver.statuses == LIFE[1:]
        assert wait_for(lambda: (found := show(api, webhook))["given_up"] and found)["given_up"] == 1


def test_changed_url_is_told_at_once_of_what_was_not_taken(api: Api, world: World) -> None:
    with receiving(*[500] * 100) as wrong, receiving() as right, delivering(world, retry_after_s=lambda failures: 3600):
        webhook = subscribe(api, wrong)
        live(api, world)
        wait_for(lambda: show(api, webhook)["failures"] == 1)
        api.call("PATCH", f"/v1/webhooks/{webhook['webhook_id']}", json={"url": right.url})
        wait_for(lambda: len(right.statuses) == len(LIFE))
        assert right.statuses == LIFE


def test_removed_webhook_is_told_nothing_more(api: Api, world: World) -> None:
    with receiving(*[500] * 1000) as receiver, delivering(world):
        webhook = subscribe(api, receiver)
        live(api, world)
        wait_for(lambda: len(receiver.arrived) > 2)
        api.call("DELETE", f"/v1/webhooks/{webhook['webhook_id']}")
        probe = subscribe(api, receiver, statuses=["COMPLETED"])
        receiver.answers.clear()
        last = live(api, world)
        wait_for(lambda: show(api, probe)["delivered_at"])
        assert [event["job"]["job_id"] for event in receiver.taken][-1] == last


def test_next_leader_goes_on_where_the_last_one_was(api: Api, world: World) -> None:
    with receiving(200, 200, *[500] * 1000) as receiver:
        with delivering(world):
            subscribe(api, receiver)
            live(api, world)
            wait_for(lambda: len(receiver.arrived) > 3)
        receiver.answers.clear()
        with delivering(world):
            wait_for(lambda: len(receiver.statuses) == len(LIFE))
        assert receiver.statuses == LIFE


def test_deposed_leader_moves_no_cursor(api: Api, world: World) -> None:
    stale = lead(world, "old")
    current = lead(world, "new")
    with receiving() as receiver:
        with delivering(world, epoch=stale):
            webhook = subscribe(api, receiver, statuses=["COMPLETED"])
            live(api, world)
            wait_for(lambda: receiver.arrived)
        assert show(api, webhook)["delivered_at"] is None
        with delivering(world, epoch=current):
            wait_for(lambda: show(api, webhook)["delivered_at"])
        assert len({event["event_id"] for event in receiver.taken}) == 1


def test_server_that_does_not_lead_delivers_nothing(api: Api, world: World) -> None:
    with receiving() as receiver:
        webhook = subscribe(api, receiver, statuses=["COMPLETED"])
        subscriptions = Subscriptions(world.database, SEALER, private_addresses=True)
        asked: Future[None] = Future()

        def nobody() -> None:
            if not asked.done():
                asked.set_result(None)

        deliveries = Deliveries(world.database, subscriptions, epoch=nobody)
        deliveries.start()
        live(api, world)
        asked.result(PATIENCE_S)
        deliveries.stop()
        assert receiver.arrived == []
        assert show(api, webhook)["delivered_at"] is None


def test_what_does_not_concern_a_webhook_is_passed_over_for_good(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.server.coordinator.webhooks.LEAP", 3)
    with receiving() as receiver, delivering(world):
        webhook = subscribe(api, receiver, statuses=["FAILED"])
        live(api, world)
        with world.database.read() as connection:
            end = events.last_id(connection, EVERYTHING)
        wait_for(lambda: show(api, webhook)["cursor"] >= end)
        assert receiver.arrived == []


# Where deliveries may go


@pytest.mark.parametrize(
    "url",
    [
        "",
        "x",
        "//example.com",
        "file:///etc/passwd",
        "gopher://example.com",
        "javascript:alert(1)",
        "http://",
        "http:///path",
        "http://:80/",
        "http://user@example.com/",
        "http://a b/",
        "http://example.com/\r\nX: y",
        "http://example.com:99999/",
        "http://example.com:0/",
        "http://example.com:x/",
        "http://[::1/",
        "http://[zz]/",
        "http://example.com/#part",
        "http://exämple.com/",
        "http://example.com\\@127.0.0.1/",
        "http://example.com/" + "x" * 3000,
    ],
)
def test_url_that_leads_nowhere_is_refused(url: str) -> None:
    assert url_problem(url, private_addresses=True)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[fc00::1]",
        "[ff02::1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
    ],
)
def test_private_address_is_refused_unless_allowed(host: str) -> None:
    assert "no public address" in str(url_problem(f"http://{host}/", private_addresses=False))
    assert url_problem(f"http://{host}/", private_addresses=True) is None


def test_public_address_is_fine() -> None:
    for url in ("https://example.com/x?y=z", "http://93.184.216.34:8080/", "https://[2606:2800:220:1::1]/"):
        assert url_problem(url, private_addresses=False) is None


@pytest.mark.parametrize("name", ["localhost", "127.1", "2130706433", "0x7f.1"])
def test_name_that_resolves_to_a_private_address_is_not_connected_to(name: str) -> None:
    with receiving() as receiver:
        port = receiver.url.rpartition(":")[2]
        with pytest.raises(webhook_delivery.DeliveryError, match=r"no public address|has no address"):
            post(f"http://{name}:{port}", ca=None, private_addresses=False)
        assert receiver.arrived == []


@given(st.text(max_size=60) | st.from_regex(r"https?://[ -~]{0,40}", fullmatch=True))
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_url_is_taken_or_refused_with_words(url: str) -> None:
    problem = url_problem(url, private_addresses=False)
    assert problem is None or problem


def test_global_addresses_are_told_from_others() -> None:
    assert is_public(ipaddress.ip_address("1.1.1.1"))
    assert not is_public(ipaddress.ip_address("::ffff:10.0.0.1"))


# Retries and signatures


def test_tries_are_further_and_further_apart_for_a_day() -> None:
    assert [retry_delay_s(failures) for failures in range(1, 10)] == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    waited_s = sum(retry_delay_s(failures) for failures in range(1, most_tries()))
    assert 24 * 3600 <= waited_s < 24 * 3600 + 600


def test_signature_is_checked() -> None:
    message = webhook_delivery.trial("test-1", "a", 1000.0)
    headers = webhook_delivery.headers_of(message, "the secret", 1000.0)
    assert verify_webhook("the secret", headers, message.body, now=1010.0)["type"] == "test"
    lower = {name.lower(): value for name, value in headers.items()}
    assert verify_webhook("the secret", lower, message.body, now=990.0)["type"] == "test"
    rotated = {**headers, "X-Trainmaster-Signature": "v1=00, " + headers["X-Trainmaster-Signature"]}
    assert verify_webhook("the secret", rotated, message.body, now=1000.0)
    wrong: list[tuple[str, dict[str, str], bytes, float]] = [
        ("another secret", headers, message.body, 1000.0),
        ("the secret", headers, message.body + b" ", 1000.0),
        ("the secret", headers, message.body, 2000.0),
        ("the secret", {**headers, "X-Trainmaster-Timestamp": "1001"}, message.body, 1000.0),
        ("the secret", {**headers, "X-Trainmaster-Timestamp": "soon"}, message.body, 1000.0),
        ("the secret", {**headers, "X-Trainmaster-Signature": ""}, message.body, 1000.0),
        ("the secret", {**headers, "X-Trainmaster-Signature": "v1=ä"}, message.body, 1000.0),
        ("the secret", {}, message.body, 1000.0),
    ]
    for secret, sent, body, now in wrong:
        with pytest.raises(SignatureError):
            verify_webhook(secret, sent, body, now=now)


# TLS


def test_receiver_with_tls_is_checked_by_its_name(tmp_path: Path) -> None:
    """The connection goes to an address; the certificate must be that of the name."""
    files = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    with receiving(tls=context) as receiver:
        port = receiver.url.rpartition(":")[2]
        assert post(f"https://localhost:{port}", ca=files.cert) == 200
        assert receiver.taken[0]["type"] == "test"
        for host, ca in (("127.1", files.cert), ("localhost", None)):
            with pytest.raises(webhook_delivery.DeliveryError, match="certificate verify failed"):
                post(f"https://{host}:{port}", ca=ca)
        assert len(receiver.arrived) == 1


def post(url: str, *, ca: Path | None, private_addresses: bool = True) -> int:
    """Send a test event."""

    async def send() -> int:
        now = time.time()
        message = webhook_delivery.trial("test-1", "a", now)
        poster = webhook_delivery.Poster(private_addresses=private_addresses, ca=ca, timeout_s=30)
        return await poster.post(url, message, webhook_delivery.headers_of(message, Receiver.secret, now))

    return asyncio.run(send())
