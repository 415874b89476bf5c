"""Rows from files: every format, every filter, sampling, and errors that name the row."""

from __future__ import annotations

import bz2
import datetime
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from trainmaster.server.core.spec.data import DataSource, Filter, Sampling
from trainmaster.training.data import formats
from trainmaster.training.data.row_selection import select
from trainmaster.training.data.rows import RowCounts, rows_of, write_rows
from trainmaster.training.document import LocalSource
from trainmaster.training.steps import InputError, RowError

ROWS = [{"id": 1, "text": "one"}, {"id": 2, "text": "zwei ü"}, {"id": 3, "text": "three\nlines"}]
TABLE = pa.Table.from_pylist(ROWS)


def lines() -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def written_arrow_stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


def written_csv(path: Path) -> None:
    pyarrow.csv.write_csv(TABLE, path)


def written_zst(path: Path) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as sink:
        sink.write(lines())


WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_bytes(lines()),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines() + b"\n\n"),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines())),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(lines())),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(lines())),
    "a.jsonl.zst": written_zst,
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "inside.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "lines.json": lambda path: path.write_bytes(lines()),
    "a.csv": written_csv,
    "a.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path, row_group_size=2),
    "a.feather": lambda path: pyarrow.feather.write_feather(TABLE, path),
    "stream.arrow": written_arrow_stream,
}


def source(tmp_path: Path, *rows: dict[str, Any], name: str = "a.jsonl") -> LocalSource:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LocalSource(path=name, files=(path,), format=formats.require_format(name, name))


def values(local: LocalSource, **options: Any) -> list[dict[str, Any]]:
    return [row.values for row in rows_of(DataSource(path=local.path, **options), local, RowCounts())]


@pytest.mark.parametrize("name", WRITERS)
def test_file_in_any_format_gives_its_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    local = LocalSource(path=name, files=(tmp_path / name,), format=formats.require_format(name, name))
    expected = [{**row, "id": str(row["id"])} for row in ROWS] if name == "a.csv" else ROWS
    assert values(local) == expected


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.csv"])
def test_projection_leaves_the_named_columns_in_any_format(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    local = LocalSource(path=name, files=(tmp_path / name,), format=formats.require_format(name, name))
    kept = values(local, columns=("text",), filters=(Filter(column="id", op="gt", value=1),))
    assert kept == [{"text": row["text"]} for row in ROWS[1:]]


def test_text_file_is_one_document(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(f"{name}\n\nsecond paragraph")
    local = LocalSource(path="d", files=(tmp_path / "a.txt", tmp_path / "b.txt"), format="text")
    assert values(local) == [{"text": "a.txt\n\nsecond paragraph"}, {"text": "b.txt\n\nsecond paragraph"}]


def test_text_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_DOCUMENT_BYTES", 10)
    (tmp_path / "a.txt").write_text("more than ten")
    with pytest.raises(InputError, match=r"one document.*jsonl"):
        values(LocalSource(path="a.txt", files=(tmp_path / "a.txt",), format="text"))


def test_tab_separated_file_is_read_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('prompt\tcompletion\n"a, b"\tc\n')
    local = LocalSource(path="a.tsv", files=(tmp_path / "a.tsv",), format="csv")
    assert values(local) == [{"prompt": "a, b", "completion": "c"}]


def test_dates_and_binary_text_of_tables_become_text(tmp_path: Path) -> None:
    table = pa.table({"at": [datetime.date(2026, 1, 2)], "raw": [b"bytes"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    local = LocalSource(path="a.parquet", files=(tmp_path / "a.parquet",), format="parquet")
    (row,) = rows_of(DataSource(path="a.parquet"), local, RowCounts())
    assert json.loads(row.text) == {"at": "2026-01-02", "raw": "bytes"}


def test_binary_column_is_refused_by_name_unless_it_is_left_out(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"image": [b"\xff\xd8"], "text": ["a"]}), tmp_path / "a.parquet")
    local = LocalSource(path="a.parquet", files=(tmp_path / "a.parquet",), format="parquet")
    with pytest.raises(RowError, match=r"row 1, column 'image'.*leave it out with `columns`"):
        values(local)
    assert values(local, columns=("text",)) == [{"text": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: is not valid JSON: Expecting value at column 6$"),
        ("a.jsonl", b'{"a": 1}\n\n[1]\n', r"a\.jsonl, line 3: holds a list; expected an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', r"a\.jsonl, line 2: is not UTF-8: byte 0xff"),
        (
            "a.jsonl",
            rb'{"a": "\ud83d\ude00"}' + b"\n" + rb'{"a": [{"b": "x\ud83d"}]}',
            r"a\.jsonl, line 2, column 'a': contains a lone surrogate \(\\ud83d\); fix or remove it",
        ),
        ("a.json", rb'[{"a": "b"}, {"a": "\uDE00"}]', r"a\.json, row 2, column 'a': contains a lone surrogate"),
        ("a.json", b"[1, 2]", r"a\.json, row 1: holds a number; expected an object"),
        ("a.json", b'"text"', r"a\.json: must hold a list of objects"),
        ("a.json", b"[{]", r"a\.json: is not valid JSON: .* line 1, column 3"),
        ("a.csv", b"a,b\n1,2\n3\n", r"a\.csv, line 3: has 1 cells, and the header 2"),
        ("a.csv", b"a,b\n1,2\n3,4,5\n", r"a\.csv, line 3: has 3 cells, and the header 2"),
        ("a.csv", b'a,b\n1,"2\n3,4\n', r"a\.csv, line 3: is not valid CSV"),
        ("a.csv", b"a,a\n1,2\n", r"a\.csv, line 1: its first line names a column twice"),
        ("a.csv", b"\xef\xbb\xbfa;b\n1;2\n", r"a\.csv, line 1: separates its columns with ';'"),
        ("a.csv", b"", r"a\.csv: is empty; its first line must name the columns"),
        ("a.parquet", b"not parquet", r"a\.parquet: is not valid Parquet"),
        ("a.arrow", b"not arrow at all", r"a\.arrow: is not a valid Arrow file"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:-20],
            r"a\.jsonl\.gz: cannot be read: Compressed file ended",
        ),
    ],
)
def test_broken_file_is_an_error_that_names_the_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        values(LocalSource(path=name, files=(tmp_path / name,), format=formats.require_format(name, name)))


def test_error_names_the_file_of_a_source_with_several(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", "{}"), ("b.jsonl", "{}\nx")):
        (tmp_path / name).write_text(text)
    local = LocalSource(path="/data/*.jsonl", files=(tmp_path / "a.jsonl", tmp_path / "b.jsonl"), format="jsonl")
    with pytest.raises(RowError, match=r"/data/\*\.jsonl \(file b\.jsonl\), line 2: is not valid JSON"):
        values(local)


def test_beginning_of_a_file_is_read_without_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines()[:-5])
    (tmp_path / "a.csv").write_text('a\n1\n"2 goes\non')
    jsonl = formats.read(tmp_path / "a.jsonl", "jsonl", whole=False)
    assert [row.values for row in jsonl] == ROWS[:2]
    assert [row.values for row in formats.read(tmp_path / "a.csv", "csv", whole=False)] == [{"a": "1"}]


FILTERED = [
    {"n": 1, "s": "alpha", "tags": ["x", "y"], "flag": True, "meta": {"score": 0.9}},
    {"n": 2, "s": "beta", "tags": [], "flag": False, "meta": {"score": 0.2}},
    {"n": 3.5, "s": "Gamma", "tags": ["y"], "flag": True, "meta": {}},
    {"n": None, "s": None},
]


@pytest.mark.parametrize(
    ("column", "op", "value", "kept"),
    [
        ("n", "eq", 2, [1]),
        ("n", "eq", 2.0, [1]),
        ("n", "ne", 2, [0, 2, 3]),
        ("n", "lt", 2, [0]),
        ("n", "le", 2, [0, 1]),
        ("n", "gt", 2, [2]),
        ("n", "ge", 2, [1, 2]),
        ("n", "in", [1, 3.5], [0, 2]),
        ("n", "not_in", [1, 3.5], [1, 3]),
        ("n", "is_null", None, [3]),
        ("n", "not_null", None, [0, 1, 2]),
        ("s", "eq", "beta", [1]),
        ("s", "gt", "alpha", [1]),
        ("s", "contains", "a", [0, 1, 2]),
        ("s", "contains", "amm", [2]),
        ("s", "not_contains", "amm", [0, 1, 3]),
        ("s", "matches", "^[a-z]+$", [0, 1]),
        ("tags", "contains", "y", [0, 2]),
        ("tags", "not_contains", "y", [1, 3]),
        ("flag", "eq", True, [0, 2]),
        ("flag", "eq", 1, []),
        ("meta.score", "ge", 0.5, [0]),
        ("meta.score", "is_null", None, [2, 3]),
    ],
)
def test_filter_keeps_the_rows_it_holds_for(column: str, op: str, value: Any, kept: list[int], tmp_path: Path) -> None:
    local = source(tmp_path, *FILTERED)
    found = values(local, filters=(Filter(column=column, op=op, value=value),))
    assert found == [FILTERED[index] for index in kept]


def test_filters_must_all_hold(tmp_path: Path) -> None:
    both = (Filter(column="n", op="gt", value=1), Filter(column="flag", op="eq", value=True))
    assert values(source(tmp_path, *FILTERED), filters=both) == [FILTERED[2]]


@pytest.mark.parametrize(
    ("op", "value", "kept"),
    [
        ("gt", 1.5, ["2", "10"]),
        ("eq", 10, ["10"]),
        ("in", [2, 3], ["2"]),
        ("is_null", None, [None]),
        ("lt", "2", ["1.5", "10"]),
    ],
)
def test_filter_on_csv_reads_numbers_where_it_compares_with_one(
    op: str, value: Any, kept: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("n,t\n1.5,a\n2,b\n10,c\n,d\n")
    local = LocalSource(path="a.csv", files=(tmp_path / "a.csv",), format="csv")
    assert [row["n"] for row in values(local, filters=(Filter(column="n", op=op, value=value),))] == kept


@pytest.mark.parametrize(
    ("column", "op", "value", "message"),
    [
        ("s", "lt", 3, r"line 1, column 's': is text \('alpha'\), and the filter compares it with 3"),
        ("n", "lt", "3", r"line 1, column 'n': is a number"),
        ("n", "contains", 3, r"column 'n': is a number; `contains` needs text or a list"),
        ("n", "matches", "3", r"column 'n': is a number; `matches` needs text"),
        ("nn", "eq", 3, r"`filters` names 'nn', which no row has; its columns are n, s, tags, flag, meta"),
        ("s", "matches", "(", r"is not a regular expression"),
    ],
)
def test_filter_that_does_not_go_with_the_data_is_an_error(
    column: str, op: str, value: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        values(source(tmp_path, *FILTERED), filters=(Filter(column=column, op=op, value=value),))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_projection_of_a_column_that_no_row_has_is_an_error(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    local = LocalSource(path=name, files=(tmp_path / name,), format=formats.require_format(name, name))
    with pytest.raises(InputError, match="`columns` names 'txt', which no row has; its columns are id, text"):
        values(local, columns=("txt",))


@pytest.mark.parametrize(
    ("rows", "filters", "message"),
    [
        ([], (), "it has no rows"),
        ([{"a": 1}, {"a": 2}], (Filter(column="a", op="gt", value=5),), "its filters keep none of its 2 rows"),
    ],
)
def test_source_of_which_nothing_is_left_is_an_error(
    rows: list[dict[str, Any]], filters: tuple[Filter, ...], message: str, tmp_path: Path
) -> None:
    local = source(tmp_path, *rows)
    with pytest.raises(InputError, match=f"a.jsonl: {message}"):
        write_rows(tmp_path / "rows", [DataSource(path="a.jsonl", filters=filters)], [local])


NOTHING = Sampling()


def chosen(counts: list[int], samplings: list[Sampling], *, split: float = 0.0, seed: int = 1) -> Any:
    return select(counts, samplings, validation_split=split, seed=seed)


def test_selection_without_sampling_has_every_row_once() -> None:
    found = chosen([3, 4], [NOTHING, NOTHING])
    assert sorted(found.train) == list(range(7))
    assert len(found.evaluation) == 0


def test_selection_is_the_same_for_ever() -> None:
    # Written down: another release, library or machine must not train on other rows, or in another order.
    found = chosen([6, 4], [NOTHING, Sampling(max_samples=2)], split=0.25, seed=42)
    assert found.train.tolist() == [0, 5, 1, 2, 7, 6]
    assert found.evaluation.tolist() == [4, 3]


def test_another_seed_is_another_selection() -> None:
    half = Sampling(ratio=0.5)
    one, other = (set(chosen([100], [half], seed=seed).train) for seed in (1, 2))
    assert len(one) == len(other) == 50
    assert one != other


def test_larger_part_holds_the_smaller_one() -> None:
    small, large = (set(chosen([100], [Sampling(ratio=ratio)]).train) for ratio in (0.1, 0.4))
    assert small < large


def test_max_samples_caps_what_ratio_takes() -> None:
    assert chosen([100], [Sampling(ratio=0.5, max_samples=20)]).used == (20,)
    assert chosen([100], [Sampling(ratio=0.1, max_samples=20)]).used == (10,)


@pytest.mark.parametrize(
    ("counts", "weights", "used"),
    [
        ([1000, 100], [1, 1], (100, 100)),
        ([1000, 100], [3, 1], (300, 100)),
        ([1000, 100], [0.75, 0.25], (300, 100)),
        ([100, 1000, 50], [1, 2, None], (50, 100, 50)),
        ([10, 10], [None, None], (10, 10)),
    ],
)
def test_weights_cut_sources_down_to_their_shares(
    counts: list[int], weights: list[float | None], used: tuple[int, ...]
) -> None:
    found = chosen(counts, [Sampling(weight=weight) for weight in weights])
    assert found.used == used
    starts = [sum(counts[:index]) for index in range(len(counts))]
    by_source = [
        sum(start <= row < start + count for row in found.train) for start, count in zip(starts, counts, strict=True)
    ]
    assert tuple(by_source) == used


def test_weights_apply_to_what_ratio_and_max_samples_leave() -> None:
    assert chosen([1000, 100], [Sampling(weight=1, max_samples=40), Sampling(weight=1)]).used == (40, 40)


def test_mixed_sources_are_interleaved() -> None:
    train = chosen([500, 500], [NOTHING, NOTHING]).train
    first_half = sum(row < 500 for row in train[:500])
    assert 200 < first_half < 300


@pytest.mark.parametrize(("split", "held_back"), [(0.1, 10), (0.25, 25), (0.99, 99)])
def test_validation_split_parts_the_rows(split: float, held_back: int) -> None:
    found = chosen([100], [NOTHING], split=split)
    assert len(found.evaluation) == held_back
    assert sorted([*found.train, *found.evaluation]) == list(range(100))


@pytest.mark.parametrize(("count", "split"), [(3, 0.1), (2, 0.01), (20, 0.05)])
def test_validation_split_of_few_rows_keeps_one_for_validation(count: int, split: float) -> None:
    found = chosen([count], [NOTHING], split=split)
    assert (len(found.train), len(found.evaluation)) == (count - 1, 1)


def test_rows_of_a_source_for_validation_are_all_for_that() -> None:
    half = Sampling(ratio=0.5)
    for samplings, used in ([NOTHING, NOTHING, NOTHING], (4, 10, 6)), ([NOTHING, half, NOTHING], (4, 5, 6)):
        found = select([4, 10, 6], samplings, validation_split=0.0, seed=1, validation=[False, True, False])
        assert found.used == used
        assert sorted(found.train) == [0, 1, 2, 3, *range(14, 20)]
        assert len(found.evaluation) == used[1]
        assert set(found.evaluation) <= set(range(4, 14))
    with_split = select([10, 3], [NOTHING, NOTHING], validation_split=0.2, seed=1, validation=[False, True])
    assert (len(with_split.train), len(with_split.evaluation)) == (8, 5)
    assert list(with_split.evaluation[2:]) == [10, 11, 12]


def test_weights_share_what_is_trained_on() -> None:
    apart = [False, True, False]
    found = select(
        [10, 100, 10], [Sampling(weight=2), NOTHING, NOTHING], validation_split=0.0, seed=1, validation=apart
    )
    assert found.used == (10, 100, 5)


@pytest.mark.parametrize(("counts", "message"), [([5, 0], "sources for validation"), ([0, 5], "no row is left: the")])
def test_source_without_rows_is_an_error(counts: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        select(counts, [NOTHING, NOTHING], validation_split=0.0, seed=1, validation=[False, True])


@pytest.mark.parametrize(("count", "split"), [(1, 0.1), (1, 0.5), (2, 0.9)])
def test_validation_split_that_leaves_nothing_to_train_on_is_an_error(count: int, split: float) -> None:
    with pytest.raises(InputError, match="which leaves nothing to"):
        chosen([count], [NOTHING], split=split)
