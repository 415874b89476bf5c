"""Signed addresses of saved weights: what they lead to, for how long, and for whom."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from datetime import datetime
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from tinker_world import Client, StandIn

from patience import PATIENCE_S
from trainmaster.server.doors.tinker import downloads
from trainmaster.server.store.scope import Scope

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 7, "deep/odd name.txt": b"x"}


@pytest.fixture
def model_id(client: Client, trainer: StandIn) -> str:
    return client.model(trainer)


@pytest.fixture
def address(client: Client, model_id: str) -> str:
    """Of weights with files."""
    directory = Path(client.save(model_id, "a", "external"))
    for name, data in {**FILES, "manifest.json": b"{}"}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return f"training_runs/{model_id}/checkpoints/external_weights/a"


def fetched(url: str, **headers: str) -> httpx.Response:
    """As any program fetches it: without a key."""
    return httpx.get(url, headers=headers, timeout=PATIENCE_S, verify=False)


def altered(url: str, **query: str) -> str:
    parts = urlsplit(url)
    given = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return parts._replace(query=urlencode({**given, **query})).geturl()


def test_each_file_has_an_address_of_its_own(client: Client, address: str) -> None:
    answer = client.get(f"{address}/external_weights_urls")
    assert set(answer["urls"]) == set(FILES)
    for name, url in answer["urls"].items():
        assert fetched(url).content == FILES[name]
    part = fetched(answer["urls"]["adapter_model.safetensors"], Range="bytes=10-19")
    assert (part.status_code, part.content) == (206, FILES["adapter_model.safetensors"][10:20])
    expires = datetime.fromisoformat(answer["expires"]).timestamp()
    assert 3500 < expires - client.world.context().clock() <= 3600


def test_archive_has_all_files_and_its_length(client: Client, address: str) -> None:
    answer = client.get(f"{address}/archive")
    response = fetched(answer["url"])
    assert int(response.headers["content-length"]) == len(response.content)
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        assert all(member.isfile() for member in archive.getmembers())
        found = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}  # type: ignore[union-attr]
    assert found == {**FILES, "manifest.json": b"{}", "checkpoint_complete": b""}


def test_archive_is_not_held_in_memory(client: Client, model_id: str) -> None:
    directory = Path(client.save(model_id, "large", "sampler"))
    directory.mkdir(parents=True)
    with (directory / "weights").open("wb") as file:
        file.truncate(64 << 20)
    url = client.get(f"training_runs/{model_id}/checkpoints/sampler_weights/large/archive")["url"]
    tracemalloc.start()
    try:
        with httpx.stream("GET", url, verify=False) as response:
            size = sum(len(piece) for piece in response.iter_raw())
        assert size > 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_checkpoint_with_very_many_files_is_refused(
    client: Client, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job can put millions there, and all of them would be held in memory."""
    url = client.get(f"{address}/archive")["url"]
    monkeypatch.setattr("trainmaster.server.doors.tinker.downloads.MAX_FILES", len(FILES))  # and the manifest
    client.get(f"{address}/external_weights_urls", expect=400)
    refused = fetched(url)
    assert refused.status_code == 400
    assert "more than 3 files" in refused.json()["error"]["message"]


@pytest.mark.parametrize("what", ["archive", "external_weights_urls"])
def test_weights_of_others_have_no_address_unless_they_are_public(
    client: Client, stranger: Client, address: str, what: str
) -> None:
    stranger.get(f"{address}/{what}", expect=404)
    client.post(f"{address}/publish")
    answer = stranger.get(f"{address}/{what}")
    url = answer["url"] if what == "archive" else answer["urls"]["deep/odd name.txt"]
    assert fetched(url).status_code == 200


def test_address_is_good_for_what_was_signed_and_nothing_else(
    client: Client, stranger: Client, address: str, model_id: str
) -> None:
    client.save(model_id, "b", "external")
    urls = client.get(f"{address}/external_weights_urls")["urls"]
    url = urls["adapter_config.json"]
    for wrong in (
        altered(url, signature="0" * 64),
        altered(url, signature=""),
        altered(url, signature="é"),
        altered(url, expires="9" * 12),
        altered(url, expires="9" * 5000),
        altered(url, expires="soon"),
        altered(url, account=stranger.account_id),
        url.partition("?")[0],
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("/files/adapter_config.json", "/archive"),
        url.replace("external-a-", "external-b-"),
        url.replace("/files/", "/files/../"),
    ):
        response = fetched(wrong)
        assert response.status_code in (403, 404), (wrong, response.text)
        assert response.content not in FILES.values()
    # A key helps no further than the signature does.
    assert client.http.get(altered(url, signature="0" * 64)).status_code == 403


def test_address_expires(client: Client, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert downloads.GOOD_FOR_S > 600
    monkeypatch.setattr("trainmaster.server.doors.tinker.downloads.GOOD_FOR_S", -1)
    url = client.get(f"{address}/archive")["url"]
    response = fetched(url)
    assert response.status_code == 403
    assert "has expired" in response.json()["error"]["message"]


def test_deleted_weights_are_gone_whatever_was_signed(client: Client, address: str) -> None:
    url = client.get(f"{address}/archive")["url"]
    client.call("DELETE", address)
    assert fetched(url).status_code == 404


def test_links_lead_nowhere_else(client: Client, address: str, model_id: str, tmp_path: Path) -> None:
    """A job writes its own checkpoints, and could leave links there."""
    (tmp_path / "secret").write_text("secret")
    directory = Path(client.save(model_id, "a", "external"))
    (directory / "link").symlink_to(tmp_path / "secret")
    assert "link" not in client.get(f"{address}/external_weights_urls")["urls"]
    assert b"secret" not in fetched(client.get(f"{address}/archive")["url"]).content


def test_address_needs_no_trainer_and_no_job(client: Client, address: str) -> None:
    job_id = client.trainer_job().job_id
    client.world.end(job_id, "KILLED_BY_SIGNAL")
    client.world.commands.delete(Scope(client.account_id), job_id).result()
    assert fetched(client.get(f"{address}/archive")["url"]).status_code == 200
