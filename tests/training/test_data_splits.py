"""Which rows `split` of a source stands for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_servers import FileServer, Hub, serving

from trainmaster.server.core.spec.data import DataSource
from trainmaster.server.core.training.sources import Slice, read_split
from trainmaster.trainer.builtin_trainer import training_from
from trainmaster.trainer.runtimes import RuntimeCatalog
from trainmaster.trainer.types import DataFormat, TorchTuneConfig, TorchTuneInstructDataset
from trainmaster.training.data.rows import RowCounts, rows_of, write_rows
from trainmaster.training.document import LocalSource
from trainmaster.training.fetching import fetch_source
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.file_choice import card_data, choose_from_hub
from trainmaster.training.steps import InputError

FORMATS = ("jsonl", "json", "csv", "parquet", "arrow")


@pytest.fixture
def access(tmp_path: Path) -> Access:
    (tmp_path / "work").mkdir()
    return Access(cache=tmp_path / "cache", working_directory=tmp_path / "work", data_roots=(tmp_path,))


def write(path: Path, numbers: Sequence[int]) -> None:
    """A file whose rows hold these numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": str(number)} for number in numbers]
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            path.write_text("text\n" + "".join(f"{number}\n" for number in numbers))
        case ".parquet":
            pa.parquet.write_table(pa.Table.from_pylist(rows), path)
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def rows(source: DataSource, local: LocalSource) -> list[int]:
    return [int(row.values["text"]) for row in rows_of(source, local, RowCounts())]


def read(access: Access, path: str, split: str | None) -> list[int]:
    source = DataSource(path=path, split=split)
    return rows(source, fetch_source(source, access))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, range(20)),
        ("train", range(20)),
        ("train[:8]", range(8)),
        ("train[8:]", range(8, 20)),
        ("train[10:12]", range(10, 12)),
        ("train[-3:]", range(17, 20)),
        ("train[:-18]", range(2)),
        ("train[:10%]", range(2)),
        ("train[10%:20%]", range(2, 4)),
        ("train[-5%:]", range(19, 20)),
        ("train[50%:12]", range(10, 12)),
        ("train[:1000]", range(20)),
        ("train[:2]+train[18:]", (0, 1, 18, 19)),
    ],
)
def test_split_of_one_file_is_train_and_its_slices(
    access: Access, suffix: str, split: str | None, expected: Sequence[int]
) -> None:
    write(access.working_directory / f"rows.{suffix}", range(20))
    assert read(access, f"rows.{suffix}", split) == list(expected)


@pytest.mark.parametrize("split", ["test", "validation[:2]", "nonsense", "train+test"])
def test_split_that_one_file_does_not_have_is_refused_with_the_one_it_has(access: Access, split: str) -> None:
    write(access.working_directory / "rows.parquet", range(4))
    with pytest.raises(InputError, match=r"rows\.parquet has no split '\w+'; it has train$"):
        read(access, "rows.parquet", split)


def test_file_whose_name_tells_a_split_has_that_one_too(access: Access) -> None:
    write(access.working_directory / "test.jsonl", range(4))
    assert read(access, "test.jsonl", "test[:2]") == [0, 1]
    assert read(access, "test.jsonl", "train") == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"has no split 'validation'; it has train, test$"):
        read(access, "test.jsonl", "validation")


@pytest.mark.parametrize(
    "names",
    [
        {"train": ["train.jsonl"], "test": ["test.jsonl"]},
        {"train": ["train/a.csv", "train/b.csv"], "test": ["test/a.csv"]},
        {
            "train": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            "test": ["data/test-00000-of-00001.parquet"],
        },
    ],
)
def test_split_of_a_directory_is_what_its_file_names_tell(access: Access, names: dict[str, list[str]]) -> None:
    number, expected = 0, {}
    for split, files in names.items():
        expected[split] = list(range(number, number + 10 * len(files)))
        for file in files:
            write(access.working_directory / "set" / file, range(number, number + 10))
            number += 10
    train, test = expected["train"], expected["test"]
    assert read(access, "set", "train") == train
    assert read(access, "set", "test") == test
    assert read(access, "set", "train[-2:]") == train[-2:]
    assert read(access, "set", "train[:50%]+test[:1]") == [*train[: len(train) // 2], test[0]]
    assert read(access, "set", None) == train, "rows that are held out are not trained on unless they are asked for"
    with pytest.raises(InputError, match=r"set has no split 'validation'; it has train, test$"):
        read(access, "set", "validation")


def test_slice_of_a_split_goes_over_all_its_files(access: Access) -> None:
    for name, numbers in (("a", range(5)), ("b", range(5, 10)), ("c", range(10, 15))):
        write(access.working_directory / f"set/{name}.jsonl", numbers)
    assert read(access, "set", "train[4:11]") == list(range(4, 11))
    assert read(access, "set/*.jsonl", "train[-1:]") == [14]


def test_directory_with_one_file_has_the_split_that_its_name_tells(access: Access) -> None:
    write(access.working_directory / "set/test/rows.jsonl", range(3))
    assert read(access, "set", "test") == [0, 1, 2]
    with pytest.raises(InputError, match=r"set has no split 'train'; it has test$"):
        read(access, "set", "train")


def test_pattern_without_a_split_means_every_file_that_matches(access: Access) -> None:
    write(access.working_directory / "train.jsonl", [1])
    write(access.working_directory / "test.jsonl", [2])
    assert read(access, "*.jsonl", None) == [2, 1]
    assert read(access, "*.jsonl", "train") == [1]


def test_slice_without_rows_is_an_error_that_names_the_split(access: Access, tmp_path: Path) -> None:
    write(access.working_directory / "rows.jsonl", range(4))
    source = DataSource(path="rows.jsonl", split="train[10:20]")
    with pytest.raises(InputError, match=r"rows\.jsonl: its split train\[10:20\] has no rows"):
        write_rows(tmp_path / "rows.arrow", [source], [fetch_source(source, access)])


def test_slice_survives_the_way_to_the_ranks(access: Access) -> None:
    write(access.working_directory / "rows.jsonl", range(20))
    source = DataSource(path="rows.jsonl", split="train[:10%]+train[-1:]")
    prepared = json.loads(json.dumps(fetch_source(source, access).to_json()))
    assert rows(source, LocalSource.from_json(prepared)) == [0, 1, 19]


def test_split_of_a_file_behind_a_url_is_honoured(access: Access) -> None:
    with serving(FileServer()) as server:
        server.files["/rows.jsonl"] = "".join(json.dumps({"text": str(number)}) + "\n" for number in range(10)).encode()
        path = f"{server.url}/rows.jsonl"
        assert read(access, path, "train[:30%]") == [0, 1, 2]
        with pytest.raises(InputError, match=r"has no split 'test'; it has train$"):
            read(access, path, "test")


def test_split_of_a_hub_dataset_is_honoured(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = {split: "".join(json.dumps({"text": str(at)}) + "\n" for at in numbers).encode()
             for split, numbers in (("train", range(10)), ("test", range(10, 15)))}  # fmt: skip
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(access.cache / "users-own"))
    with serving(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repositories["datasets/org/set"] = {f"data/{split}-00000-of-00001.jsonl": lines[split] for split in lines}
        hub.repositories["datasets/org/one"] = {"rows.jsonl": lines["train"]}
        assert read(access, "hf://org/set", "train[:2]+test[-1:]") == [0, 1, 14]
        assert read(access, "hf://org/set/data", "test") == list(range(10, 15))
        assert read(access, "hf://org/one", "train[:50%]") == list(range(5))
        for path in ("hf://org/one", "hf://org/one/rows.jsonl"):
            with pytest.raises(InputError, match=r"has no split 'test'; it has train$"):
                read(access, path, "test")


@pytest.mark.parametrize(("split", "expected"), [("train[:8]", range(8)), ("train[:10%]", range(2)), (None, range(20))])
def test_split_of_a_torchtune_dataset_is_honoured(access: Access, split: str | None, expected: Sequence[int]) -> None:
    write(access.working_directory / "rows.parquet", range(20))
    source = torchtune_source(access.working_directory / "rows.parquet", split)
    assert rows(source, fetch_source(source, access)) == list(expected)


@pytest.mark.parametrize("split", ["test", "nonsense"])
def test_split_that_a_torchtune_dataset_does_not_have_is_refused(access: Access, split: str) -> None:
    write(access.working_directory / "rows.parquet", range(20))
    with pytest.raises(InputError, match=f"has no split '{split}'; it has train$"):
        fetch_source(torchtune_source(access.working_directory / "rows.parquet", split), access)


def torchtune_source(path: Path, split: str | None) -> DataSource:
    """The source that a BuiltinTrainer of `TrainerClient` compiles to; its file is read from this machine."""
    runtime = replace(RuntimeCatalog().definition("trainmaster-sft"), pretrained_model="org/model", dataset=str(path))
    config = TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset(source=DataFormat.PARQUET, split=split))
    return DataSource.model_validate(training_from(config, runtime, None)["data_config"]["sources"][0])


def test_slices_of_the_splits_that_a_card_lists() -> None:
    card = card_data("---\nconfigs:\n- data_files:\n  - {split: a, path: x.parquet}\n  - {split: b, path: y-*}\n---\n")
    names = ["x.parquet", "y-0.parquet", "y-1.parquet", "README.md"]
    found = choose_from_hub(names, "hf://o/n", path="", format=None, split="b[:3]+a", card=card)
    assert found.names == ("y-0.parquet", "y-1.parquet", "x.parquet")
    assert [(part.files, str(part.rows)) for part in found.parts] == [(2, ":3"), (1, ":")]
    with pytest.raises(InputError, match=r"has no split 'train'; it has a, b$"):
        choose_from_hub(names, "hf://o/n", path="", format=None, split=None, card=card)


def test_split_named_by_shards_is_not_another_that_begins_like_it() -> None:
    names = ["train_sft-00000-of-00001.parquet", "train_gen-00000-of-00001.parquet"]
    found = choose_from_hub(names, "hf://o/n", path="", format=None, split="train_sft", card={})
    assert found.names == ("train_sft-00000-of-00001.parquet",)
    with pytest.raises(InputError, match=r"has no split 'train'; it has train_gen, train_sft$"):
        choose_from_hub(names, "hf://o/n", path="", format=None, split="train", card={})


@pytest.mark.parametrize(
    "text", ["", "train[", "train[5]", "train[a:b]", "train[:200%]", "train+", "train[:1.5]", "a b"]
)
def test_split_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no split|no slice|more than 100%"):
        read_split(text)


def test_rows_are_counted_only_where_a_slice_depends_on_them() -> None:
    def counting() -> int:
        raise AssertionError

    assert Slice.read("2:5").places(counting) == (2, 5)
    assert Slice.read("2:").places(counting) == (2, None)
    assert Slice.read("-2:").places(lambda: 10) == (8, 10)
