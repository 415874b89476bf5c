"""Blobs over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from api_world import Api, Served, World

DATA = b"#!/bin/sh\necho hi\n"
DIGEST = hashlib.sha256(DATA).hexdigest()


def test_blob_is_shipped_once_and_fetched(api: Api, world: World) -> None:
    assert api.http.head(f"/v1/blobs/{DIGEST}").status_code == 404
    assert api.call("PUT", f"/v1/blobs/{DIGEST}", 201, content=DATA) == {"sha256": DIGEST, "size_bytes": len(DATA)}
    assert api.call("PUT", f"/v1/blobs/{DIGEST}", 200, content=DATA)["size_bytes"] == len(DATA)
    response = api.http.get(f"/v1/blobs/{DIGEST}")
    assert (response.status_code, response.content) == (200, DATA)
    head = api.http.head(f"/v1/blobs/{DIGEST}")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(DATA)), b"")
    left = [path for path in world.roots.path("blobs", api.account_id).rglob("*") if path.is_file()]
    assert [path.name for path in left] == [DIGEST]


def test_blob_of_another_account_is_not_found(api: Api, world: World) -> None:
    api.call("PUT", f"/v1/blobs/{DIGEST}", 201, content=DATA)
    other = {"Authorization": f"Bearer {world.key('blob-other')}"}
    assert api.call("GET", f"/v1/blobs/{DIGEST}", 404, headers=other)["code"] == "NOT_FOUND"


def test_blob_with_another_content_is_refused(api: Api, world: World) -> None:
    error = api.call("PUT", f"/v1/blobs/{DIGEST}", 422, content=DATA + b"!")
    assert error["details"][0]["field"] == "sha256"
    assert not [path for path in world.roots.path("blobs", api.account_id).rglob("*") if path.is_file()]
    assert api.http.head(f"/v1/blobs/{DIGEST}").status_code == 404


@pytest.mark.parametrize("digest", ["x", DIGEST.upper(), DIGEST + "0", "..%2f" + DIGEST])
def test_impossible_digest_is_refused(api: Api, digest: str) -> None:
    assert api.http.put(f"/v1/blobs/{digest}", content=DATA).status_code in {404, 422}


def test_blob_over_the_limit_is_refused(api: Api, world: World) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    with Served.serve(world.context(max_blob_bytes=1000)) as served:
        response = api.http.put(f"{served.url}/v1/blobs/{DIGEST}", content=pieces())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "PAYLOAD_TOO_LARGE")


def test_large_blob_arrives_whole(api: Api) -> None:
    data = bytes(range(256)) * (20 << 10)
    digest = hashlib.sha256(data).hexdigest()
    pieces = (data[begin : begin + 100_000] for begin in range(0, len(data), 100_000))
    assert api.call("PUT", f"/v1/blobs/{digest}", 201, content=pieces)["size_bytes"] == len(data)
    assert api.http.get(f"/v1/blobs/{digest}").content == data


def test_token_fetches_the_blobs_of_its_job_alone(api: Api, world: World) -> None:
    other = hashlib.sha256(b"other").hexdigest()
    api.call("PUT", f"/v1/blobs/{DIGEST}", 201, content=DATA)
    api.call("PUT", f"/v1/blobs/{other}", 201, content=b"other")
    files = [{"path": "run.sh", "sha256": DIGEST}]
    job_id = api.submit(workload={"kind": "script", "path": "run.sh", "files": files})
    world.queue(job_id)
    token = {"Authorization": f"Bearer {world.place(job_id).live.token}"}
    assert api.http.get(f"/v1/blobs/{DIGEST}", headers=token).content == DATA
    assert api.call("GET", f"/v1/blobs/{other}", 404, headers=token)["code"] == "NOT_FOUND"
    world.see(job_id, {"type": "started"})
    world.end(job_id)
    assert api.call("GET", f"/v1/blobs/{DIGEST}", 401, headers=token)["code"] == "AUTH_TOKEN_INVALID"


def test_job_that_names_a_missing_blob_is_refused(api: Api) -> None:
    files = [{"path": "run.sh", "sha256": DIGEST}]
    document = {"name": "n", "workload": {"kind": "script", "path": "run.sh", "files": files}}
    assert "PUT" in api.call("POST", "/v1/jobs", 422, json=document)["details"][0]["message"]
