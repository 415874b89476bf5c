"""Fixtures for trainings: a warm process, a small model with rows, and jobs on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from trainings import Job, Make, Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    started = Zygote()
    yield started
    started.close()


@pytest.fixture(scope="session")
def tiny(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, `train` and `eval`."""
    directory = tmp_path_factory.mktemp("tiny")
    pid = zygote.start({}, directory / "log", call="tiny_model:make_all", arguments=[str(directory)])
    assert zygote.wait(pid) == 0, (directory / "log").read_text()
    return directory


@pytest.fixture
def check(zygote: Zygote, tmp_path: Path) -> Any:
    """Calls a function of checks.py where torch is."""

    def run(name: str, *arguments: Path) -> None:
        log = tmp_path / "check.log"
        pid = zygote.start({}, log, call=f"checks:{name}", arguments=[str(each) for each in arguments])
        assert zygote.wait(pid) == 0, log.read_text()

    return run


@pytest.fixture
def make_job(zygote: Zygote, tiny: Path, tmp_path: Path) -> Iterator[Make]:
    """Makes trainings; those that a test leaves running are killed."""
    made: list[Job] = []

    def make(training_type: str = "SFT", *, ranks: int = 1, evaluate: bool = False, **parts: Any) -> Job:
        directory = tmp_path / f"job-{len(made)}"
        directory.mkdir()
        preferences = "-judged" if parts.get("hyperparameters", {}).get("loss_type") == "kto" else "-pairs"
        job = Job(
            zygote=zygote,
            directory=directory,
            document=tiny_model.document(training_type, evaluate=evaluate, **parts),
            prepared=tiny_model.prepared(tiny, evaluate=evaluate, kind=preferences if training_type == "DPO" else ""),
            ranks=ranks,
            job_id=f"job-{len(made)}",
        )
        made.append(job)
        return job

    yield make
    for job in made:
        if job.pids:
            job.kill()
