"""One rank of a training: build the trainer, resume from a checkpoint, train, export."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import torch
import transformers

from trainmaster.jobs import report
from trainmaster.jobs.process import Process, current_process
from trainmaster.jobs.tracker import NONE, Mirror, tracker_for
from trainmaster.server.core.training.types import TRAINERS
from trainmaster.training import export
from trainmaster.training.document import Document, DocumentError, Prepared
from trainmaster.training.progress_report import Reporting, flops_per_token
from trainmaster.training.session import Resumed, Session, Stopped, compare_inputs, find_checkpoint
from trainmaster.training.trainer import JobTrainer


def train(document: Document, prepared: Prepared, *, scratch: Path) -> None:
    """Train, and leave the result in the job's output. Raises Stopped when the job was asked to stop, and has saved."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    export.destination(document)  # refuse a bad destination before training
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if report.rank() == 0:
        print("loading the model", flush=True)  # noqa: T201 - minutes, with a large one
    trainer = _build(document, prepared, scratch=scratch, world_size=world_size)
    process = current_process()
    resumed = None
    if (where := report.resume_from()) is not None:
        resumed = find_checkpoint(where, process=process, reporter=report.reporter, sharded=document.sharded)
        adapter = document.trains_adapter
        compare_inputs(resumed, prepared, process=process, reporter=report.reporter, adapter=adapter)
    tracker = tracker_for(
        str(document.hyperparameters["tracker"]) if process.index == 0 else NONE,
        directory=report.output_dir() / "tracker",
    )
    tracker_run = _join(tracker, document, resumed)
    reporting = _reporting(trainer, prepared, tracker, resumed) if process.index == 0 else None
    session = Session(
        document,
        prepared,
        process=process,
        reporter=report.reporter,
        reporting=reporting,
        resumed=resumed,
        tracker_run=tracker_run,
    )
    try:
        trainer.run(session)
        _export(document, prepared, trainer, session, process)
    finally:
        tracker.finish()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    report.finished()


def _build(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> JobTrainer:
    training_type = document.training.training_type
    if training_type not in TRAINERS:
        raise DocumentError(f"training type {training_type} is not one of {', '.join(TRAINERS)}")
    build: Callable[..., JobTrainer] = importlib.import_module(TRAINERS[training_type]).build
    return build(document, prepared, scratch=scratch, world_size=world_size)


def _join(tracker: Mirror, document: Document, resumed: Resumed | None) -> str | None:
    before = None if resumed is None else resumed.metadata.get("tracker_run")
    project = str(document.hyperparameters["tracker_project"] or "trainmaster")
    config = {
        "training_type": str(document.training.training_type),
        "base_model": document.training.base_model.model_id,
        "batch_size": document.data.batch_size,
        "learning_rate": document.hyperparameters["learning_rate"],
    }
    return tracker.start(document.name, project, config, run_id=before)


def _reporting(trainer: JobTrainer, prepared: Prepared, tracker: Mirror, resumed: Resumed | None) -> Reporting:
    flops = flops_per_token(trainer.bare_model(), prepared.train_tokens / max(1, prepared.train_rows))
    tokens = 0 if resumed is None else resumed.metadata.get("tokens", 0)
    reporting = Reporting(report.reporter, tracker, flops_per_token=flops, tokens=tokens)
    trainer.report_to(reporting)
    return reporting


def _export(document: Document, prepared: Prepared, trainer: JobTrainer, session: Session, process: Process) -> None:
    session.poll()
    if session.stop is not None:
        # The last checkpoint is committed: the next attempt only exports.
        raise Stopped(session.stop)
    model = trainer.bare_model()
    state = export.whole_state(model)
    if process.index != 0:
        return
    report.phase("exporting")
    place = export.export(document, prepared, model, trainer.tokenizer, output_dir=report.output_dir(), state=state)
    report.note(f"the result is in {place}")
    print(f"the result is in {place}", flush=True)  # noqa: T201
