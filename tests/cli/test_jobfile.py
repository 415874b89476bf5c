from __future__ import annotations

import io
from pathlib import Path

import pytest

from trainmaster.cli.exits import UsageError
from trainmaster.cli.job_file import changed, load, pairs, set_values


def loaded(tmp_path: Path, text: str) -> object:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return load(str(file))[0]


def test_yaml_is_read_as_people_mean_it(tmp_path: Path) -> None:
    document = loaded(
        tmp_path,
        """
        words: [on, no, "yes", 1:30, 012, 2024-01-31, 1_000]
        numbers: [1, -2, 0.5, 1e-4, 5E+3, .5]
        others: [true, False, null, ~]
        """,
    )

    assert document == {
        "words": ["on", "no", "yes", "1:30", "012", "2024-01-31", "1_000"],
        "numbers": [1, -2, 0.5, 1e-4, 5e3, 0.5],
        "others": [True, False, None, None],
    }


def test_json_is_read_too(tmp_path: Path) -> None:
    assert loaded(tmp_path, '{"name": "n", "labels": {"a": "b"}}') == {"name": "n", "labels": {"a": "b"}}


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    file.write_text('{"name": "n"}')

    assert load(str(file))[1] == tmp_path


def test_dash_is_the_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("name: n"))

    assert load("-") == ({"name": "n"}, tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: a\nname: b\n", r"line 2, column 1: 'name' is there twice"),
        ("name: [a", r"line 1"),
        ('{"name": ', "not valid JSON"),
        ("- a\n- b\n", "no job file"),
        ("", "no job file"),
        ("name: !!binary aGk=\n", "JSON cannot"),
        ("name: &a [*a]\n", "JSON cannot"),
    ],
)
def test_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        loaded(tmp_path, text)


def test_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.yaml: No such file"):
        load(str(tmp_path / "absent.yaml"))


def test_file_with_a_misspelt_name_leads_to_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").touch()
    with pytest.raises(UsageError, match=r"No such file or directory; did you mean first\.yaml\?"):
        load(str(tmp_path / "frist.yaml"))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("train.py", r"workload: \{kind: script, path: train\.py\}"),
        ("rows.jsonl", r"trainmaster init --data rows\.jsonl"),
        ("my rows.csv", r"trainmaster init --data 'my rows\.csv'"),
    ],
)
def test_program_or_data_in_place_of_a_job_file_is_refused_with_what_to_do(name: str, instead: str) -> None:
    with pytest.raises(UsageError, match=instead):
        load(name)


def test_set_reaches_into_the_document_and_leaves_the_original() -> None:
    document = {"name": "n", "workload": {"argv": ["a", "b"], "files": [{"path": "x"}]}}

    changed = set_values(
        document,
        [
            "resource_config.gpu_count=2",
            'workload.argv=["sh", "-c", "exit 0"]',
            "workload.files.0.path=y",
            r"labels.team\.name=a=b",
            "name=on",
            "workload.environment.RATE=1e-3",
        ],
    )

    assert changed == {
        "name": "on",
        "workload": {"argv": ["sh", "-c", "exit 0"], "files": [{"path": "y"}], "environment": {"RATE": 1e-3}},
        "resource_config": {"gpu_count": 2},
        "labels": {"team.name": "a=b"},
    }
    assert document == {"name": "n", "workload": {"argv": ["a", "b"], "files": [{"path": "x"}]}}


@pytest.mark.parametrize("setting", ["name", "=x", "a..b=1", "name.first=x", "list.3=x", "list.x=1", "name=[a"])
def test_set_that_leads_nowhere_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        set_values({"name": "n", "list": [1]}, [setting])


def test_labels_are_parted_at_the_first_equals_sign() -> None:
    assert pairs(["a=b", "c=", "d=e=f"], "--label") == {"a": "b", "c": "", "d": "e=f"}


@pytest.mark.parametrize("setting", ["a", "=b"])
def test_label_without_a_key_or_a_value_is_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="key=value"):
        pairs([setting], "--label")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: first\nworkload:\n\tkind: script\n", "line 3, column 1: there is a tab; YAML wants spaces"),
        ("name: first\nworkload: {}\n\tlabels: {}\n", "there is a tab; YAML wants spaces"),
        ("name:\tfirst\n\tlabels: {}\n", "there is a tab; YAML wants spaces"),
        ("name: a: b\n", "line 1, column 8: a ':' is not expected here"),
        ('name: "a\n', "a quote is opened and never closed"),
        ("name: @a\n", "a value cannot begin with @; put it in quotes"),
        ("name: [a, b\n", "a ',' is missing, or a ']'"),
        ("name: {a: b\n", "a ',' is missing, or a '}'"),
        ("name: *a\n", "'*a' names an anchor that is not there"),
        ("name: !a b\n", "the tag !a is not supported"),
        ("name: a\x07\n", "holds a character 0x7"),
        ("name: a\nlabels\n", "a ':' is missing after the name of a field"),
        ("a:\n  - b\n c: d\n", "the indentation does not fit the lines above"),
    ],
)
def test_mistake_in_yaml_is_told_in_our_words(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, text)

    assert says in str(caught.value)


@pytest.mark.parametrize("labels", [["a"], "a", 3])
def test_label_beside_labels_that_are_none_is_a_sentence(labels: object) -> None:
    with pytest.raises(UsageError, match="labels: must be names with values"):
        changed({"labels": labels}, [], labels=["a=b"])


def test_setting_below_null_makes_an_object() -> None:
    assert set_values({"a": None}, ["a.b.c=1"]) == {"a": {"b": {"c": 1}}}
