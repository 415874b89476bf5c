"""Accounts and keys: made, listed, revoked, removed; by whom, and how much of it others see."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import httpx
import pytest
from api_world import Api, Served, World, wait_for

from patience import PATIENCE_S
from trainmaster.server.core.accounts import KeyScope, key_digest
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

As = Callable[..., Api]


@pytest.fixture
def with_key(world: World, served: Served, api: Api) -> Iterator[As]:
    """A client with a given key, or with a new one of the test's account that has these scopes."""
    opened: list[httpx.Client] = []

    def make(*scopes: KeyScope, key: str | None = None) -> Api:
        key = key or world.key(api.account_id, *scopes)
        http = httpx.Client(base_url=served.url, headers={"X-API-Key": key}, verify=False, timeout=PATIENCE_S)
        opened.append(http)
        return Api(http=http, world=world, account_id=api.account_id, key=key)

    yield make
    for http in opened:
        http.close()


def new_name() -> str:
    return f"team-{secrets.token_hex(4)}"


def test_account_is_made_changed_and_removed(api: Api) -> None:
    name = new_name()
    assert api.call("POST", "/v1/accounts", 201, json={"account_id": name, "uid": 1500})["uid"] == 1500
    assert api.call("GET", f"/v1/accounts/{name}")["account_id"] == name
    assert name in [account["account_id"] for account in api.call("GET", "/v1/accounts")["accounts"]]
    assert api.call("PATCH", f"/v1/accounts/{name}", json={"uid": None})["uid"] is None
    api.call("DELETE", f"/v1/accounts/{name}")
    api.call("GET", f"/v1/accounts/{name}", 404)
    api.call("DELETE", f"/v1/accounts/{name}", 404)
    api.call("PATCH", f"/v1/accounts/{name}", 404, json={"uid": 1})


def test_account_is_made_once(api: Api) -> None:
    name = new_name()
    api.call("POST", "/v1/accounts", 201, json={"account_id": name})
    assert name in api.call("POST", "/v1/accounts", 409, json={"account_id": name})["message"]


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-a", ".a", "a b", "ä", "a" * 64, "a\n", None, 5])
def test_name_that_is_no_directory_is_refused(api: Api, name: object) -> None:
    error = api.call("POST", "/v1/accounts", 422, json={"account_id": name})
    assert error["details"][0]["field"] == "account_id"


@pytest.mark.parametrize("uid", [0, -1, 2**31, 1.5, "root"])
def test_uid_that_nobody_may_have_is_refused(api: Api, uid: object) -> None:
    error = api.call("POST", "/v1/accounts", 422, json={"account_id": new_name(), "uid": uid})
    assert error["details"][0]["field"] == "uid"


def test_account_with_jobs_or_keys_is_not_removed(api: Api, with_key: As) -> None:
    job_id = api.submit()
    path = f"/v1/accounts/{api.account_id}"
    assert "jobs" in api.call("DELETE", path, 409)["message"]
    api.call("DELETE", f"/v1/jobs/{job_id}")
    assert "keys" in api.call("DELETE", path, 409)["message"]
    operator = with_key(key=api.world.key("operator"))
    for key in operator.call("GET", "/v1/keys")["keys"]:
        if key["account_id"] == api.account_id:
            operator.call("DELETE", f"/v1/keys/{key['key_id']}")
    operator.call("DELETE", path)


def test_default_account_stays(api: Api) -> None:
    api.world.key("default")
    assert "always" in api.call("DELETE", "/v1/accounts/default", 409)["message"]


def test_made_key_works_and_is_shown_once(api: Api, with_key: As) -> None:
    wanted = {"name": "ci", "scopes": ["manage", "view", "view"]}
    made = api.call("POST", "/v1/keys", 201, json=wanted)
    assert made["account_id"] == api.account_id
    assert made["scopes"] == ["view", "manage"]
    assert made["key"].startswith("eyJ")
    assert with_key(key=made["key"]).call("GET", "/v1/jobs")["jobs"] == []
    listed = api.http.get("/v1/keys").text
    assert made["key_id"] in listed
    assert made["key"] not in listed
    assert key_digest(made["key"]) not in listed
    with api.world.database.read() as connection:
        stored = accounts.get_key(connection, Scope(api.account_id), made["key_id"])
    assert stored.hash == key_digest(made["key"])
    assert stored.created_by == keys_id(api)


def keys_id(api: Api) -> str:
    listed = api.call("GET", "/v1/keys")["keys"]
    return next(key["key_id"] for key in listed if key["account_id"] == api.account_id and key["name"] == "tester")


@pytest.mark.parametrize("prefix", ["tml-", "fw_", "team1"])
def test_key_begins_as_it_was_asked_to(api: Api, with_key: As, prefix: str) -> None:
    made = api.call("POST", "/v1/keys", 201, json={"name": "n", "scopes": ["view"], "prefix": prefix})
    assert made["key"].startswith(prefix)
    with_key(key=made["key"]).call("GET", "/v1/jobs")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"scopes": []}, "scopes"),
        ({"scopes": ["everything"]}, "scopes[0]"),
        ({"name": ""}, "name"),
        ({"name": "a\x00b"}, "name"),
        ({"prefix": ""}, "prefix"),
        ({"prefix": "a b"}, "prefix"),
        ({"prefix": "-"}, "prefix"),
        ({"account_id": "nobody-at-all"}, "account_id"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_key_that_makes_no_sense_is_refused(api: Api, change: dict[str, object], field: str) -> None:
    error = api.call("POST", "/v1/keys", 422, json={"name": "n", "scopes": ["view"], **change})
    assert [detail["field"] for detail in error["details"]] == [field]


def test_key_gives_no_scope_that_it_has_not(with_key: As) -> None:
    operator = with_key(KeyScope.CLUSTER_ADMIN, KeyScope.VIEW)
    operator.call("POST", "/v1/keys", 201, json={"name": "n", "scopes": ["view", "cluster_admin"]})
    error = operator.call("POST", "/v1/keys", 403, json={"name": "n", "scopes": ["view", "manage", "evaluate"]})
    assert error["code"] == "AUTH_INSUFFICIENT_SCOPE"
    assert "manage, evaluate" in error["message"]


def test_revoked_key_is_refused_at_once(api: Api, with_key: As) -> None:
    made = api.call("POST", "/v1/keys", 201, json={"name": "n", "scopes": ["view"]})
    user = with_key(key=made["key"])
    user.call("GET", "/v1/jobs")
    assert api.call("DELETE", f"/v1/keys/{made['key_id']}")["revoked_at"]
    assert user.call("GET", "/v1/jobs", 401)["code"] == "AUTH_TOKEN_INVALID"
    api.call("DELETE", f"/v1/keys/{made['key_id']}", 404)


def test_key_that_another_server_revoked_is_refused_soon(
    api: Api, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.server.http.auth._REMEMBER_S", 1.0)
    made = api.call("POST", "/v1/keys", 201, json={"name": "n", "scopes": ["view"]})
    with (
        Served.serve(world.context()) as other,
        httpx.Client(base_url=other.url, headers={"X-API-Key": made["key"]}, verify=False, timeout=PATIENCE_S) as user,
    ):
        assert user.get("/v1/jobs").status_code == 200
        api.call("DELETE", f"/v1/keys/{made['key_id']}")
        wait_for(lambda: user.get("/v1/jobs").status_code == 401)


def test_viewer_sees_the_keys_and_the_account_that_are_theirs(api: Api, with_key: As) -> None:
    api.world.key("somebody-else")
    viewer = with_key(KeyScope.VIEW)
    assert {key["account_id"] for key in viewer.call("GET", "/v1/keys")["keys"]} == {api.account_id}
    assert [each["account_id"] for each in viewer.call("GET", "/v1/accounts")["accounts"]] == [api.account_id]
    viewer.call("GET", "/v1/accounts/somebody-else", 404)
    assert "somebody-else" in [each["account_id"] for each in api.call("GET", "/v1/accounts")["accounts"]]
