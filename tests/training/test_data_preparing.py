"""The preparing steps as a job runs them: what they leave, what they keep, and what happens when two run at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_tokenizer import GENERATION, PLAIN, make_tokenizer, shown
from patience import PATIENCE_S
from trainmaster.jobs import inputs, report
from trainmaster.jobs.report import Reporter
from trainmaster.training import data_check, steps
from trainmaster.training import prepare as preparing
from trainmaster.training.data import dataset, load
from trainmaster.training.fetching import __main__ as fetching_step
from trainmaster.training.fetching.access import Access

PAIRS = [{"prompt": f"{number}:", "completion": "x" * (number % 5 + 1), "n": number} for number in range(40)]


class Job:
    """A job's surroundings, as a worker sets them up; what is run in them reports into files."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.model = directory / "model"
        self._monkeypatch = monkeypatch
        for name in ("inputs", "prepared", "cache", "work"):
            (directory / name).mkdir()
        make_tokenizer().save_pretrained(self.model)
        (self.model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 64}))
        (self.model / "model.safetensors").write_bytes(b"weights")
        self.write("train.jsonl", PAIRS)
        variables = {
            "TRAINMASTER_INPUTS_DIR": directory / "inputs",
            "TRAINMASTER_PREPARED_DIR": directory / "prepared",
            "TRAINMASTER_CACHE_DIR": directory / "cache",
            "TRAINMASTER_DATA_ROOTS": directory,
            "TRAINMASTER_EVENTS_FILE": directory / "events.jsonl",
            "TRAINMASTER_METRICS_FILE": directory / "metrics.jsonl",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.chdir(directory / "work")
        reporter = Reporter(os.environ)
        for name in ("phase", "note", "metrics", "fail"):
            monkeypatch.setattr(report, name, getattr(reporter, name))
        self.configure()

    def write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.directory / "work" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def configure(self, training_type: str = "SFT", *, base_model: dict[str, Any] | None = None, **data: Any) -> None:
        document = {
            "name": "job",
            "training_config": {
                "training_type": training_type,
                "base_model": {"model_id": str(self.model), **(base_model or {})},
                "hyperparameters": {"learning_rate": 0.1},
            },
            "data_config": {"sources": [{"path": "train.jsonl"}], "seed": 5, **data},
            "output_config": {},
            "resource_config": {},
        }
        (self.directory / "inputs" / "training.json").write_text(json.dumps(document))

    def prepare(self, step: Callable[[], None] = preparing.main) -> dict[str, Any]:
        steps.run(step)
        return inputs.prepared()

    def reported(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def notes(self) -> list[str]:
        return [event["message"] for event in self.reported("events") if event["type"] == "note"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def texts(path: str | None) -> list[str]:
    from datasets import load_from_disk

    tokenizer = make_tokenizer()
    return [
        shown(tokenizer, row["input_ids"], [label != dataset.IGNORED for label in row["labels"]])
        for row in load_from_disk(str(path))
    ]


def test_split_decides_which_rows_are_trained_on_and_is_part_of_the_key(job: Job) -> None:
    whole = job.prepare()
    job.configure(sources=[{"path": "train.jsonl", "split": "train[:10%]"}])
    part = job.prepare()
    assert (whole["train_rows"], part["train_rows"]) == (40, 4)
    assert part["rows_key"] != whole["rows_key"]
    assert part["sources"][0]["slices"] == [[1, ":10%"]]


def test_length_above_the_positions_of_the_model_ends_the_job(job: Job) -> None:
    job.configure(max_seq_length=65)
    with pytest.raises(SystemExit, match=r"^BAD_INPUT: .*max_seq_length is 65, but the base model has 64 positions"):
        job.prepare()


def test_load_gives_a_script_the_rows_of_the_split(job: Job) -> None:
    job.configure(sources=[{"path": "train.jsonl"}])
    job.prepare(fetching_step.main)
    assert len(load().train) == 40
    job.configure(sources=[{"path": "train.jsonl", "split": "train[-3:]"}])
    job.prepare(fetching_step.main)
    assert sorted(row["n"] for row in load().train) == [37, 38, 39]


@pytest.mark.parametrize(
    ("there", "gone", "message"),
    [
        ("pytorch_model.bin", "model.safetensors", r"has no weights in \*\.safetensors, .* load no pickles"),
        ("adapter_config.json", None, "is an adapter; name the model that it belongs to"),
    ],
)
def test_model_that_would_be_unpickled_or_lead_elsewhere_is_refused(
    job: Job, there: str, gone: str | None, message: str
) -> None:
    (job.model / there).write_text("{}")
    if gone is not None:
        (job.model / gone).unlink()
    with pytest.raises(SystemExit, match=message):
        job.prepare()
    assert [event["reason"] for event in job.reported("events") if event["type"] == "failed"] == ["BAD_INPUT"]
    assert not (job.directory / "cache" / "prepared").exists()
    job.prepare(fetching_step.main)  # a script of one's own loads what it likes


def test_preparing_leaves_datasets_and_says_where_they_are(job: Job) -> None:
    job.configure(validation_split=0.25)
    found = job.prepare()
    expected = sorted(f"{row['prompt']}[{row['completion']}</s>]" for row in PAIRS)
    assert sorted(texts(found["train_path"]) + texts(found["eval_path"])) == expected
    assert (found["train_rows"], found["eval_rows"], found["max_seq_length"]) == (30, 10, 64)
    assert found["train_tokens"] > 100
    assert found["model_path"] == found["tokenizer_path"] == str(job.model)
    assert found["sources"] == [
        {"path": "train.jsonl", "files": [str(job.directory / "work/train.jsonl")], "format": "jsonl"}
    ]


def test_preparing_reports_its_phase_progress_and_what_it_found(job: Job) -> None:
    job.prepare()
    assert {"type": "phase", "phase": "preparing"}.items() <= job.reported("events")[0].items()
    percents = [record["values"]["prepare_percent"] for record in job.reported("metrics")]
    assert percents == sorted(percents)
    assert (percents[0], percents[-1]) == (0.0, 100.0)
    assert any(note.startswith("train.jsonl: 1 file of jsonl") for note in job.notes)
    assert job.notes[-1].startswith("40 samples with ")


def test_without_validation_there_is_no_eval_path(job: Job) -> None:
    assert job.prepare()["eval_path"] is None


def test_second_attempt_takes_what_the_first_prepared(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job.prepare()
    os.utime(job.directory / "work" / "train.jsonl")  # shipped anew: another time, the same content
    monkeypatch.setattr(dataset, "build", None)
    assert job.prepare() == first


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"max_seq_length": 30},
        {"validation_split": 0.5},
        {"preprocess": {"add_bos": True}},
        {"sources": [{"path": "train.jsonl", "filters": [{"column": "n", "op": "lt", "value": 20}]}]},
        {"sources": [{"path": "train.jsonl", "sampling": {"max_samples": 5}}]},
    ],
)
def test_anything_that_decides_the_tokens_makes_another_entry(job: Job, change: dict[str, Any]) -> None:
    first = job.prepare()
    job.configure(**change)
    assert job.prepare()["rows_key"] != first["rows_key"]


def test_changed_data_and_another_tokenizer_make_another_entry(job: Job) -> None:
    first = job.prepare()["rows_key"]
    job.write("train.jsonl", PAIRS[:-1])
    second = job.prepare()["rows_key"]
    make_tokenizer(PLAIN).save_pretrained(job.model)
    assert len({first, second, job.prepare()["rows_key"]}) == 3


def test_other_weights_are_another_model(job: Job) -> None:
    first = job.prepare()
    assert job.prepare()["model_key"] == first["model_key"]
    (job.model / "model.safetensors").write_bytes(b"WEIGHTS")
    second = job.prepare()
    assert second["model_key"] != first["model_key"]
    assert second["rows_key"] == first["rows_key"]


def test_what_does_not_decide_the_tokens_makes_no_other_entry(job: Job) -> None:
    first = job.prepare()["rows_key"]
    (job.directory / "work" / "train.jsonl").rename(job.directory / "moved.jsonl")
    job.configure(sources=[{"path": str(job.directory / "moved.jsonl")}], num_workers=2)
    (job.model / "model.safetensors").write_bytes(b"other weights")
    assert job.prepare()["rows_key"] == first


def test_jobs_own_template_and_tokenizer_options_reach_the_ranks(job: Job) -> None:
    from transformers import AutoTokenizer

    chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    job.write("train.jsonl", chat)
    template = GENERATION.replace("<|end|>", "!")
    job.configure(preprocess={"chat_template": template, "tokenizer_config": {"padding_side": "left"}})
    found = job.prepare()
    assert texts(found["train_path"]) == ["<|user|>a!<|assistant|>[b!]"]
    tokenizer = AutoTokenizer.from_pretrained(found["tokenizer_path"])
    assert (tokenizer.chat_template, tokenizer.padding_side) == (template, "left")


def test_tokenizer_that_is_named_is_used(job: Job) -> None:
    other = job.directory / "other"
    make_tokenizer(adds_bos=True).save_pretrained(other)
    job.write("train.jsonl", [{"text": "a"}])
    for place in ({"base_model": {"tokenizer_id": str(other)}}, {"preprocess": {"tokenizer_id": str(other)}}):
        job.configure(**place)
        found = job.prepare()
        assert texts(found["train_path"]) == ["[<s>a</s>]"]
        assert found["tokenizer_path"] == str(other)


def test_what_is_left_out_on_the_way_is_noted(job: Job) -> None:
    rows = [{"prompt": "1" * 20, "completion": "x"}, {"prompt": "1", "completion": "x" * 20}, *PAIRS]
    job.write("train.jsonl", rows)
    job.configure(max_seq_length=12, sources=[{"path": "train.jsonl", "sampling": {"max_samples": 42}}])
    job.prepare()
    assert "2 samples are longer than 12 tokens: their ends are cut off" in job.notes
    assert "1 of those are left out, as nothing that is trained on is left of them" in job.notes
    job.configure(sources=[{"path": "train.jsonl", "sampling": {"max_samples": 5}}])
    job.prepare()
    assert "train.jsonl: 5 of 42 rows are used" in job.notes


@pytest.mark.parametrize(
    ("change", "reason", "message"),
    [
        ({"sources": [{"path": "no.jsonl"}]}, "BAD_INPUT", "no.jsonl: there is no such file"),
        ({"sources": [{"path": "bad.jsonl"}]}, "BAD_INPUT", "bad.jsonl, line 2, column 'text': is a number"),
        ({"sources": [{"path": "http://127.0.0.1:1/a.jsonl"}]}, "STORAGE_UNAVAILABLE", "does not answer"),
        ({"sources": [{"path": "scaidrive://a.jsonl"}]}, "CREDENTIALS_REFUSED", "no token for scaidrive"),
    ],
)
def test_preparing_that_fails_says_why_and_whether_to_try_again(
    job: Job, change: dict[str, Any], reason: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.training.fetching.http.BACK_OFF_S", ())
    monkeypatch.setenv("TRAINMASTER_SCAIDRIVE_URL", "http://127.0.0.1:1")
    job.write("bad.jsonl", [{"text": "a"}, {"text": 3}])
    job.configure(**change)
    with pytest.raises(SystemExit, match=message):
        job.prepare()
    failed = job.reported("events")[-1]
    assert (failed["type"], failed["reason"]) == ("failed", reason)
    assert message in failed["message"]
    assert not (job.directory / "prepared" / "prepared.json").exists()
    assert not list((job.directory / "cache").rglob("scratch"))


def test_package_that_is_not_installed_is_named_with_the_remedy(job: Job) -> None:
    def needs_more() -> None:
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")

    with pytest.raises(
        SystemExit, match=r"datasets is not installed where jobs run: pip install 'trainmaster\[train\]'"
    ):
        job.prepare(needs_more)


# Two at once, and one that dies. Children are forked, since every import of transformers costs seconds.


@pytest.fixture
def forked() -> Iterator[Callable[[Callable[[], None]], int]]:
    children: list[int] = []

    def fork(work: Callable[[], None]) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
        return child

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    make_tokenizer()  # what it imports is there before the first fork
    yield fork
    for child in children:
        with contextlib.suppress(ChildProcessError):  # a test has reaped it
            if os.waitpid(child, os.WNOHANG)[0] == 0:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def ended_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def marked(build: Any, directory: Path) -> Any:
    """A build that leaves a mark each time it begins."""

    def counted(*arguments: Any, **options: Any) -> Any:
        (directory / f"build-{os.getpid()}").touch()
        return build(*arguments, **options)

    return counted


def test_two_jobs_prepare_the_same_once(
    job: Job, forked: Callable[[Callable[[], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "build", marked(dataset.build, job.directory))
    children = [forked(preparing.main) for _ in range(2)]
    assert all(ended_well(child) for child in children)
    assert len(list(job.directory.glob("build-*"))) == 1
    assert len(texts(inputs.prepared()["train_path"])) == len(PAIRS)


def test_preparing_that_was_killed_is_done_again_by_the_next(
    job: Job, forked: Callable[[Callable[[], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = dataset.build

    def stuck(*arguments: Any, **options: Any) -> Any:
        real(*arguments, **options)
        (job.directory / "stuck").touch()
        time.sleep(PATIENCE_S)

    monkeypatch.setattr(dataset, "build", stuck)
    child = forked(preparing.main)
    deadline = time.monotonic() + PATIENCE_S
    while not (job.directory / "stuck").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (job.directory / "prepared" / "prepared.json").exists()
    monkeypatch.setattr(dataset, "build", real)
    assert len(texts(job.prepare()["train_path"])) == len(PAIRS)
    assert not list((job.directory / "cache").rglob("*.unfinished"))


def test_entry_that_nobody_used_for_long_is_forgotten(job: Job) -> None:
    first = Path(job.prepare()["train_path"]).parent
    (first.parent / "stale.unfinished").mkdir()
    for path in (first, first.parent / "stale.unfinished"):
        os.utime(path, (0, 0))
    assert Path(job.prepare()["train_path"]).parent == first  # used again, so it stays
    assert not (first.parent / "stale.unfinished").exists()
    os.utime(first, (0, 0))
    job.configure(seed=99)
    second = Path(job.prepare()["train_path"]).parent
    assert [path.name for path in second.parent.iterdir()] == [second.name]


# A script of one's own


def test_fetching_leaves_files_and_the_model_to_the_script(job: Job) -> None:
    job.configure(base_model={"model_id": "org/model"})
    found = job.prepare(fetching_step.main)
    assert found["model_path"] is None
    assert [Path(file).name for file in found["sources"][0]["files"]] == ["train.jsonl"]
    job.configure()
    assert job.prepare(fetching_step.main)["model_path"] == str(job.model)
    assert inputs.hyperparameters() == {"learning_rate": 0.1}
    assert inputs.training()["name"] == "job"


def test_inputs_outside_a_job_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRAINMASTER_INPUTS_DIR", raising=False)
    with pytest.raises(RuntimeError, match="TRAINMASTER_INPUTS_DIR is not set"):
        inputs.training()
    monkeypatch.setenv("TRAINMASTER_PREPARED_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="this job has none"):
        inputs.prepared()


def test_load_gives_rows_after_filters_projection_sampling_and_split(job: Job) -> None:
    source = {
        "path": "train.jsonl",
        "columns": ["prompt", "n"],
        "filters": [{"column": "n", "op": "ge", "value": 20}],
        "sampling": {"max_samples": 10},
    }
    job.configure(sources=[source], validation_split=0.2, base_model={"model_id": "org/model"})
    job.prepare(fetching_step.main)
    rows = load()
    assert (len(rows.train), len(rows.eval)) == (8, 2)
    together = [*rows.train, *rows.eval]
    assert all(row == {"prompt": f"{row['n']}:", "n": row["n"]} and row["n"] >= 20 for row in together)
    assert len({row["n"] for row in together}) == 10
    assert rows.train[0] == next(iter(rows.train))
    assert [row["n"] for row in rows.train[2:4]] == [rows.train[2]["n"], rows.train[3]["n"]]
    assert list(load().train) == list(rows.train)


def test_load_is_what_a_trainer_would_train_on(job: Job) -> None:
    job.configure(validation_split=0.25)
    found = job.prepare()
    rows = load()
    assert [f"{row['prompt']}[{row['completion']}</s>]" for row in rows.train] == texts(found["train_path"])
    assert [f"{row['prompt']}[{row['completion']}</s>]" for row in rows.eval] == texts(found["eval_path"])


def test_ranks_that_load_at_once_read_the_files_once(
    job: Job, forked: Callable[[Callable[[], None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainmaster.training.data import rows

    job.prepare(fetching_step.main)
    monkeypatch.setattr(rows, "write_rows", marked(rows.write_rows, job.directory))
    children = [forked(lambda: load().train[0]) for _ in range(3)]
    assert all(ended_well(child) for child in children)
    assert len(list(job.directory.glob("build-*"))) == 1


# Code that comes with a model

TOKENS = {
    "TRAINMASTER_HUB_TOKEN": "hub-token-0001",
    "TRAINMASTER_SCAIDRIVE_TOKEN": "drive-token-0002",
    "HF_TOKEN": "hf-token-0003",
    "AWS_SECRET_ACCESS_KEY": "aws-key-0004",
}
SPIES = """
import os
from pathlib import Path
from transformers import PreTrainedTokenizerFast

class Spy(PreTrainedTokenizerFast):
    pass

seen = [f"{name}={value}" for name, value in os.environ.items()]
for pid in ("self", os.getppid()):
    try:
        seen.append(Path(f"/proc/{pid}/environ").read_text())
    except PermissionError:
        pass
Path("{seen}").write_text("\\n".join(seen))
"""


@pytest.fixture
def spying(job: Job) -> Path:
    """Has the job's tokenizer come with code that writes down what it can see of its process and its parent."""
    seen = job.directory / "seen"
    (job.model / "spies.py").write_text(SPIES.replace("{seen}", str(seen)))
    settings = json.loads((job.model / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "spies.Spy"]}, "tokenizer_class": "Spy"}
    (job.model / "tokenizer_config.json").write_text(json.dumps(settings))
    job.configure(base_model={"trust_remote_code": True})
    return seen


def run_with_tokens(job: Job, module: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **TOKENS, "HF_MODULES_CACHE": str(job.directory / "modules")}
    command = [sys.executable, "-s", "-P", "-m", module]
    # As under a worker, the parent has no tokens in its environment.
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)


def test_code_of_a_tokenizer_sees_no_token_while_it_prepares(job: Job, spying: Path) -> None:
    ended = run_with_tokens(job, "trainmaster.training.prepare", stdin=subprocess.DEVNULL)
    assert ended.returncode == 0, ended.stderr
    assert inputs.prepared()["train_rows"] == len(PAIRS)
    assert "TRAINMASTER_CACHE_DIR=" in spying.read_text()
    assert [token for token in TOKENS.values() if token in spying.read_text()] == []
    percents = [each["values"]["prepare_percent"] for each in job.reported("metrics")]
    assert percents == sorted(percents)


def test_code_of_a_tokenizer_sees_no_token_in_a_check(job: Job, spying: Path) -> None:
    job.configure(
        base_model={"trust_remote_code": True},
        sources=[{"path": "no.jsonl"}, {"path": "train.jsonl", "split": "train[:50%]"}],
    )
    request = {"document": inputs.training(), "limit": 2}
    ended = run_with_tokens(job, "trainmaster.training.data_check", input=json.dumps(request))
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["problem"], found["max_seq_length"]) == (None, 64)
    missing, there = found["sources"]
    assert "no such file" in missing["problems"][0]["message"]
    assert (there["ok"], there["rows"], len(there["samples"])) == (True, 20, 2)
    assert "TRAINMASTER_CACHE_DIR=" in spying.read_text()
    assert [token for token in TOKENS.values() if token in spying.read_text()] == []


# Checks


def checked(job: Job, limit: int = 2) -> dict[str, Any]:
    access = Access.from_environ(os.environ, beginning_bytes=data_check.BEGINNING_BYTES)
    return data_check.check(inputs.training(), access, limit=limit)


def test_check_shows_what_the_model_will_see(job: Job) -> None:
    job.configure(max_seq_length=6)
    found = checked(job)
    (source,) = found["sources"]
    assert found["ok"]
    assert (source["format"], source["rows"], source["kept"], source["complete"]) == ("jsonl", 40, 40, True)
    assert source["columns"] == ["prompt", "completion", "n"]
    assert source["tokens"] == {"min": 4, "median": 7, "max": 9}
    assert source["cut"] == sum(len(row["prompt"]) + len(row["completion"]) + 1 > 6 for row in PAIRS)
    assert len(source["samples"]) == 2
    first = source["samples"][0]
    assert first["segments"] == [
        {"text": "0:", "tokens": 2, "trained": False},
        {"text": "x</s>", "tokens": 2, "trained": True},
    ]
    assert first["tokens"] == ["0", ":", "x", "</s>"]


def test_check_names_every_wrong_row_up_to_a_limit(job: Job) -> None:
    job.write("train.jsonl", [*PAIRS, {"text": 3}, {"prompt": "a"}, *[{} for _ in range(50)]])
    (source,) = checked(job)["sources"]
    assert not source["ok"]
    assert [problem["row"] for problem in source["problems"]] == list(range(41, 51))
    assert source["problems"][0]["column"] == "text"


def test_check_looks_at_rows_that_it_does_not_tokenize(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "MAX_ENCODED", 5)
    job.write("train.jsonl", [*PAIRS, {"text": 3}])
    (source,) = checked(job)["sources"]
    assert source["tokenized"] == 5
    assert [problem["row"] for problem in source["problems"]] == [41]


def test_check_goes_on_with_other_sources_and_without_a_tokenizer(job: Job) -> None:
    sources = [{"path": "no.jsonl"}, {"path": "train.jsonl"}]
    job.configure(sources=sources, base_model={"model_id": str(job.directory)})
    found = checked(job)
    assert not found["ok"]
    assert "holds no tokenizer" in found["problem"]
    assert [source["ok"] for source in found["sources"]] == [False, True]
    assert "no such file" in found["sources"][0]["problems"][0]["message"]
    assert json.loads(found["sources"][1]["samples"][0]["values"]) == PAIRS[0]


def test_check_reads_no_more_than_it_has_to(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "MAX_READ", 10)
    (source,) = checked(job)["sources"]
    assert source["rows"] <= 10
    assert not source["complete"]


def test_sizes_are_shown_for_people() -> None:
    assert steps.size_text(3_200_000_000_000) == "3.2 TB"
