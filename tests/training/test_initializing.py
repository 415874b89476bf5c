"""What an initializer's step does beyond the job that it is part of: roles, broken downloads, and what it may reach."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import obstore
import pytest
from data_servers import Hub, serving

from seaweed_server import KEY, SECRET, SeaweedServer
from trainmaster.jobs import objects
from trainmaster.training import initializer as initializing
from trainmaster.training.fetching import cache, hub, s3
from trainmaster.training.fetching.access import Access, initializer_access
from trainmaster.training.steps import CredentialsError, InputError, SourceUnavailableError

ROLE = "arn:aws:iam::123456789012:role/reader"
PIECE = 8 << 20


@pytest.fixture
def access(tmp_path: Path) -> Access:
    return Access(cache=tmp_path / "cache", working_directory=tmp_path)


@pytest.fixture
def sts() -> Iterator[dict[str, Any]]:
    """A service that hands out keys: what it is asked for, how it answers, and where it is."""
    state: dict[str, Any] = {"asked": [], "status": 200}
    keys = f"<AccessKeyId>{KEY}</AccessKeyId><SecretAccessKey>{SECRET}</SecretAccessKey>"
    given = f"<AssumeRoleResult><Credentials>{keys}<Expiration>2100-01-01T00:00:00Z</Expiration></Credentials>"
    good = f'<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">{given}</AssumeRoleResult>'
    refusal = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not you</Message></Error></ErrorResponse>"

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
            state["asked"].append((form, self.headers["authorization"]))
            body = (f"{good}</AssumeRoleResponse>" if state["status"] == 200 else refusal).encode()
            self.send_response(state["status"])
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        state["url"] = f"http://127.0.0.1:{listener.server_port}"
        yield state
        listener.shutdown()
        thread.join()


def test_request_for_a_role_is_signed_as_the_service_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    body = (
        "Action=AssumeRole&Version=2011-06-15&RoleArn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Freader"
        "&RoleSessionName=trainmaster"
    )
    moment = datetime(2026, 3, 4, 5, 6, 7)  # noqa: DTZ001
    # What botocore makes of the same.
    signature = "0506b860a7aa48820aa2dbd80ff0f6ae2671b3af3ee96ceb856c78d9baed3329"
    assert signature in s3.signed("https://sts.eu-west-1.amazonaws.com/", body, moment)["authorization"]
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
    signature = "65cfc7aeb52568f2acbe6bb4ada569dc1752fb5528aafc7dc09c06519186d344"
    assert signature in s3.signed("https://sts.eu-west-1.amazonaws.com/", body, moment)["authorization"]


def test_objects_are_read_with_the_keys_of_a_role(
    s3_root: str, sts: dict[str, Any], access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = objects.open_place(s3_root)
    objects.put(place, place.below("a.txt"), b"content")
    # The keys of the environment may do nothing but ask for the role.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "asker")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of no use here")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", sts["url"])
    with pytest.raises(CredentialsError):
        s3.directory(s3_root, access)
    assuming = s3.in_role(ROLE, access)
    assert (s3.directory(s3_root, assuming) / "a.txt").read_bytes() == b"content"
    (form, authorization), *_ = sts["asked"]
    assert form["RoleArn"] == [ROLE]
    assert "Credential=asker/" in authorization
    sts["status"] = 403
    with pytest.raises(CredentialsError, match="cannot be assumed: AccessDenied: not you; give AWS_ACCESS_KEY_ID"):
        s3.in_role(ROLE, access)
    sts["status"] = 503
    with pytest.raises(SourceUnavailableError, match="answers 503"):
        s3.in_role(ROLE, access)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(InputError, match="there are none; give AWS_ACCESS_KEY_ID"):
        s3.in_role(ROLE, access)


def test_object_that_broke_off_goes_on_where_it_was(
    s3_root: str, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = bytes(range(256)) * (2 * PIECE // 256) + b"the end"
    place = objects.open_place(s3_root)
    objects.put(place, place.below("big"), content)
    objects.put(place, place.below("small"), b"tiny")

    class KilledError(Exception):
        pass

    def die(share: float) -> None:
        if share > 0.4:
            raise KilledError

    with pytest.raises(KilledError):
        s3.directory(s3_root, access, die)
    got, get = [], obstore.get
    monkeypatch.setattr(
        obstore,
        "get",
        lambda store, key, *, options: got.append(options["range"][0]) or get(store, key, options=options),
    )
    told: list[float] = []
    directory = s3.directory(s3_root, access, told.append)
    assert (directory / "big").read_bytes() == content
    assert got == [2 * PIECE] or got == [PIECE, 2 * PIECE], "what had come was not asked for again"
    assert max(told) == pytest.approx(1.0)
    assert sorted(path.name for path in directory.iterdir()) == ["big", "small"]
    got.clear()
    assert s3.directory(s3_root, access, told.append) == directory
    assert not got
    # A part of it is another entry; a new version of an object is fetched.
    assert [path.name for path in s3.directory(s3_root, access, ignored=["big"]).iterdir()] == ["small"]
    objects.put(place, place.below("small"), b"changed")
    assert (s3.directory(s3_root, access) / "small").read_bytes() == b"changed"
    assert (directory / "small").read_bytes() == b"tiny", "who uses the old one still does"


def test_repository_that_is_here_is_used_while_the_hub_does_not_answer(
    access: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)  # it tries again for a while
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "usual"))
    with serving(Hub(repositories={"datasets/org/rows": {"a.txt": b"first", "b.txt": b"second"}})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        fetched = hub.repository("hf://org/rows", "dataset", access, ignored=["b.txt"])
        served.down = True
        assert hub.repository("hf://org/rows", "dataset", access, ignored=["b.txt"]) == fetched
        # What is here is no more than a part of this one.
        with pytest.raises(SourceUnavailableError, match=r"b\.txt"):
            hub.repository("hf://org/rows", "dataset", access)


def test_full_disk_is_told_before_anything_is_fetched(
    s3_root: str, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = objects.open_place(s3_root)
    objects.put(place, place.below("a"), b"content")
    monkeypatch.setattr(cache, "SPARE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="needs 7 bytes more") as caught:
        s3.directory(s3_root, access)
    assert caught.value.errno == errno.ENOSPC


def test_bucket_that_is_not_there_is_the_jobs_mistake(seaweed: SeaweedServer, s3_root: str, access: Access) -> None:
    with pytest.raises(InputError, match="check its name, and the store's endpoint"):
        s3.directory("s3://no-such-bucket/rows", access)
    place = objects.open_place(s3_root)
    objects.put(place, place.below("a.bin"), b"content")
    with pytest.raises(InputError, match="nothing is left of it"):
        s3.directory(s3_root, access, ignored=["*.bin"])


@pytest.mark.parametrize(
    ("private", "spec", "endpoints", "field"),
    [
        ("0", {"endpoint": "http://127.0.0.1:9000"}, [], "workload.initializers.dataset.endpoint"),
        ("0", {}, ["HF_ENDPOINT"], "workload.environment.HF_ENDPOINT"),
        ("0", {}, [], None),  # the operator's own
        ("1", {"endpoint": "http://127.0.0.1:9000"}, ["HF_ENDPOINT"], None),
    ],
)
def test_addresses_of_the_job_must_be_public_where_the_server_says_so(
    private: str, spec: dict[str, Any], endpoints: list[str], field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "set back after the test")
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:9001")
    monkeypatch.setenv("TRAINMASTER_PRIVATE_URLS", private)
    named = {"type": "s3", "storage_uri": "s3://bucket/rows", **spec}
    document = {"dataset": named, "endpoints_of_the_job": endpoints}
    if field is None:
        initializer_access("dataset", named, document)
    else:
        with pytest.raises(InputError, match=f"{field}: it leads to .* which is not a public address"):
            initializer_access("dataset", named, document)


def test_file_that_would_lie_outside_is_not_placed(tmp_path: Path) -> None:
    for name in ("../out", "/out", "a/../../out"):
        with pytest.raises(InputError, match="outside of its directory"):
            initializing._place({name: tmp_path}, tmp_path / "dataset")
