"""The data cache: Iceberg tables as shards on local disk, and each rank's share of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from iceberg_tables import ROWS, table_at, table_on

from seaweed_server import KEY, SECRET, SeaweedServer
from trainmaster.jobs import data_cache
from trainmaster.training.fetching.access import Access
from trainmaster.training.steps import CredentialsError, InputError
from trainmaster.training.tables.shard_writer import sharded

SIZES = {"head_cpu": None, "head_mem": None, "worker_cpu": "500m", "worker_mem": "4Gi"}


def spec(location: str, count: int = 2, **options: Any) -> dict[str, Any]:
    return {"storage_uri": "cache://made/rows", "metadata_loc": location, "num_data_nodes": count, **SIZES, **options}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a table in it."""
    return tmp_path_factory.mktemp("tables")


@pytest.fixture(scope="module")
def location(home: Path) -> str:
    return table_at(f"file://{home}/warehouse", home)


def test_table_is_sharded_once_and_each_rank_has_its_share(home: Path, location: str, tmp_path: Path) -> None:
    access = Access(cache=tmp_path / "cache", working_directory=tmp_path / "work", data_roots=(home,))
    told: list[float] = []
    directory = sharded(spec(location), access, told.append)
    assert told == [0.5, 1.0]
    assert [shard.rows for shard in data_cache.shards(directory)] == [495, 495]
    assert sharded(spec(location), access, told.append) == directory
    assert len(told) == 2, "it was there"

    def rows(rank: int, world_size: int) -> list[int]:
        batches = data_cache.record_batches(rank, world_size, path=directory)
        return [row for batch in batches for row in batch["id"].to_pylist()]

    for world_size in (1, 2, 3, 7):
        shares = [rows(rank, world_size) for rank in range(world_size)]
        assert sorted(row for share in shares for row in share) == list(ROWS)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    files = [data_cache.shard_files(rank, 3, path=directory) for rank in range(3)]
    assert [[file.name for file in share] for share in files] == [
        ["shard-00000-of-00002.arrow"],
        ["shard-00001-of-00002.arrow"],
        [],
    ]
    assert data_cache.schema(directory).names == ["id", "text"]
    # A shard that is there is not written again.
    other = tmp_path / "other"
    draft = other / "tables" / f"{directory.name}.unfinished"
    draft.mkdir(parents=True)
    (draft / "shard-00000-of-00002.arrow").write_bytes((directory / "shard-00000-of-00002.arrow").read_bytes())
    told.clear()
    sharded(spec(location), Access(cache=other, working_directory=tmp_path, data_roots=(home,)), told.append)
    assert told == [1.0]
    # Those who may not read the table have no shards of it either.
    roots = make(tmp_path / "roots")
    copied = roots / "copied.metadata.json"
    copied.write_bytes(Path(location.removeprefix("file://")).read_bytes())
    with pytest.raises(InputError, match="below its data roots alone"):
        sharded(spec(str(copied)), replace(access, working_directory=roots, data_roots=(roots,)), told.append)


def test_copy_with_the_same_ids_and_other_files_has_shards_of_its_own(tmp_path: Path) -> None:
    access = Access(cache=tmp_path / "cache", working_directory=tmp_path, data_roots=(tmp_path,))
    first, second = (Path(table_at(f"file://{tmp_path}/{name}", make(tmp_path / name))[7:]) for name in ("a", "b"))
    mine, copied = (json.loads(path.read_text()) for path in (first, second))
    ids = dict(
        zip(*([str(each["snapshot-id"]) for each in table["snapshots"]] for table in (copied, mine)), strict=True)
    )
    text = second.read_text().replace(copied["table-uuid"], mine["table-uuid"])
    second.write_text(re.sub(r'(?<=snapshot-id":)\d+', lambda found: ids[found[0]], text))
    assert json.loads(second.read_text())["current-snapshot-id"] == mine["current-snapshot-id"]
    shards = sharded(spec(str(first), 1), access, lambda _: None)
    # The same files by another metadata, as after a change of the table's properties, are not written again.
    mine["properties"]["comment"] = "another"
    again = first.with_name("again.metadata.json")
    again.write_text(json.dumps(mine))
    assert sharded(spec(str(again), 1), access, lambda _: None) == shards
    # Other columns of them are.
    mine["schemas"][0]["fields"].pop()
    again.write_text(json.dumps(mine))
    narrow = sharded(spec(str(again), 1), access, lambda _: None)
    assert data_cache.schema(narrow).names == ["id"]
    assert sharded(spec(str(second), 1), access, lambda _: None) not in (shards, narrow)


def make(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    roots = tmp_path / "roots"
    roots.mkdir()
    access = Access(cache=tmp_path / "cache", working_directory=roots, data_roots=(roots,))
    (roots / "broken.metadata.json").write_text('{"format-version": 2}')
    (tmp_path / "outside.metadata.json").write_text("{}")
    for path, message in {
        roots / "none.metadata.json": "there is no such file",
        roots / "broken.metadata.json": "cannot be read as a table of Iceberg",
        tmp_path / "outside.metadata.json": "below its data roots alone",
    }.items():
        with pytest.raises(InputError, match=message):
            sharded(spec(str(path)), access, lambda _: None)


def test_files_that_metadata_names_must_be_allowed_too(location: str, tmp_path: Path) -> None:
    roots = make(tmp_path / "roots")
    copied = roots / "copied.metadata.json"
    copied.write_bytes(Path(location.removeprefix("file://")).read_bytes())
    access = Access(cache=tmp_path / "cache", working_directory=roots, data_roots=(roots,))
    with pytest.raises(InputError, match="below its data roots alone"):
        sharded(spec(str(copied)), access, lambda _: None)


def test_table_on_an_object_store_wants_keys(
    seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = table_on(seaweed, tmp_path)
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    access = Access(cache=tmp_path / "cache", working_directory=tmp_path, data_roots=())
    directory = sharded(spec(location, 1), access, lambda _: None)
    assert sum(shard.rows for shard in data_cache.shards(directory)) == 990
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialsError, match="give AWS_ACCESS_KEY_ID"):
        sharded(spec(location, 1), access, lambda _: None)
    role = {"access_key_id": KEY, "secret_access_key": SECRET, "token": None}
    assert sharded(spec(location, 1), replace(access, s3_credentials=lambda: role), lambda _: None) == directory
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(InputError, match="there is no such table"):
        sharded(spec(f"{seaweed.new_prefix()}/none.metadata.json"), access, lambda _: None)


def test_directory_without_shards_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="is the job's dataset of the type cache"):
        data_cache.shard_files()
    with pytest.raises(ValueError, match="there is no rank 2 among 2"):
        data_cache.shard_files(2, 2)
