"""A mixin over transformers' `Trainer` that saves and loads our checkpoints, at the loop's places for its own.

The loop stops between two steps or while evaluating, at the same place on every rank. Where a stop prevents an
evaluation that was due, the next attempt makes it first, with the checkpoint that depends on it, so that an interrupted
training takes the same course and has the same best checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from trainmaster.jobs import rng
from trainmaster.jobs.trees import ANYTHING
from trainmaster.training.session import Resumed, Session, Stopped, step_to_resume_at
from trainmaster.training.state import (
    load_optimizer,
    load_scheduler,
    load_weights,
    make_optimizer_state,
    optimizer_state,
    trained_weights,
)


class Checkpointing(Trainer):
    """A `Trainer` that saves through a session, resumes from it, and stops when the job is asked to."""

    session: Session
    _evaluated: tuple[int, Mapping[str, float]] = (-1, {})
    _last_boundary = -1
    _save_after_evaluation = False

    def run(self, session: Session) -> None:
        """Train to the end and load the best model. Raises Stopped when the job was asked to stop and has saved."""
        self.session = session
        self.train(resume_from_checkpoint=None if session.resumed is None else self._place(session.resumed))
        session.wait()
        if session.patience.is_over:
            session.end_early(self.state.max_steps)
        model = self.bare_model()
        if (tree := session.load_best({"model": trained_weights(model)})) is not None:
            load_weights(model, tree["model"])

    # The boundary between two steps.

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        step, control, session = self.state.global_step, self.control, self.session
        # The loop gets here twice at the end of an epoch: after the last step, and then to evaluate and save.
        before_end = step != self._last_boundary and (
            control.should_training_stop or float(self.state.epoch or 0.0).is_integer()
        )
        before_evaluation = before_end and self.args.eval_strategy == IntervalStrategy.EPOCH
        saves = control.should_save or self._save_after_evaluation
        rated = session.best_needs_evaluation and (
            saves or (before_end and self.args.save_strategy == SaveStrategy.EPOCH)
        )
        if self._last_boundary < 0:
            # The optimizer has its state now: allocate memory before the first save.
            session.prepare(self._tree())
        self._last_boundary = step
        # A run shorter than logging_steps would otherwise never report its loss.
        control.should_log = control.should_log or step == self.state.max_steps
        control.should_save = session.poll() or control.should_save
        if session.stop is not None:
            due = control.should_evaluate or before_evaluation or rated
            control.should_log, control.should_evaluate, control.should_save = True, False, False
        elif control.should_save and before_evaluation:
            control.should_save, self._save_after_evaluation = False, True
        elif self._save_after_evaluation:
            control.should_save, self._save_after_evaluation = True, False
        if control.should_save and session.best_needs_evaluation:
            control.should_evaluate = True
        try:
            super()._maybe_log_save_evaluate(*args, **kwargs)
        except _StoppedEvaluating:
            due = True
        if session.stop is not None:
            if session.stop.save and session.saved_step != step:
                self._commit(evaluation_due=due, save_due=due and rated)
            session.wait()
            raise Stopped(session.stop)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Leaves the random numbers of training as they were: a later attempt may have to repeat the evaluation."""
        before = rng.capture()
        try:
            with self.session.evaluating():
                metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        finally:
            rng.restore(before)
        self._evaluated = (self.state.global_step, metrics)
        self.session.patience.note(metrics)
        if self.session.patience.is_over:
            self.control.should_save = self.control.should_training_stop = True
        return metrics

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """A stop does not wait for the end of an evaluation."""
        self.session.poll()
        if (stop := self.session.stop) is not None:
            raise _StoppedEvaluating(stop)
        return super().prediction_step(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        self.session.take_metrics(logs)

    # Saving.

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:  # noqa: ARG002 - the loop's
        self._commit()

    def _commit(self, *, evaluation_due: bool = False, save_due: bool = False) -> None:
        self.store_flos()
        step, metrics = self._evaluated
        state = dataclasses.asdict(self.state)
        state["log_history"] = []  # the server has the metrics
        self.session.save(
            self._tree(),
            state=state,
            evaluated=metrics if step == self.state.global_step else {},
            progress={
                "steps_per_epoch": self._steps_per_epoch(),
                "evaluation_due": evaluation_due,
                "save_due": save_due,
                "tokens": getattr(self, "_total_train_tokens", 0),
            },
        )

    def _tree(self) -> dict[str, Any]:
        model, optimizer, scheduler = self.bare_model(), *self._stepped()
        tree: dict[str, Any] = {
            "model": trained_weights(model),
            "optimizer": optimizer_state(model, optimizer),
            "scheduler": scheduler.state_dict(),
        }
        if (scaler := self.accelerator.scaler) is not None:
            tree["scaler"] = scaler.state_dict()
        return tree

    def _stepped(self) -> tuple[Optimizer, LambdaLR]:
        """Optimizer and schedule, which the loop makes before its first step."""
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        return self.optimizer, self.lr_scheduler

    # Loading, all at once, when the loop has prepared model and optimizer.

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _load_scaler(self, checkpoint: str | None) -> None:
        pass

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        resumed = self.session.resumed
        if checkpoint is None or resumed is None:
            return
        model, optimizer, scheduler = self.bare_model(), *self._stepped()
        if self.is_fsdp_enabled:
            # A sharded state is read into tensors that are there, of each rank its shard.
            make_optimizer_state(optimizer)
        template = self._tree()
        template["optimizer"]["groups"] = template["scheduler"] = ANYTHING
        tree = resumed.take_tree(template)
        load_weights(model, tree["model"])
        load_optimizer(model, optimizer, tree["optimizer"])
        load_scheduler(scheduler, tree["scheduler"], step=self.state.global_step)
        if (scaler := self.accelerator.scaler) is not None and "scaler" in tree:
            scaler.load_state_dict(tree["scaler"])
        if hasattr(self, "_total_train_tokens"):
            self._total_train_tokens = resumed.metadata.get("tokens", 0)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        resumed = self.session.resumed
        if checkpoint is not None and resumed is not None and resumed.rng_state is not None:
            rng.restore(resumed.rng_state)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call]
        resumed = self.session.resumed
        if resumed is not None and resumed.metadata.get("evaluation_due"):
            self._evaluate(None, None)
            if resumed.metadata.get("save_due"):
                self._load_rng_state(resumed.where)
                self._commit()
        return prepared

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps or self.session.patience.is_over:
            # Only the export is left. Within an epoch, the loop would make one more step.
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]

    # The position in the data.

    def _place(self, resumed: Resumed) -> str:
        """Write the loop's state to a directory for `train(resume_from_checkpoint=...)`."""
        assert self.args.output_dir is not None
        directory = Path(self.args.output_dir) / "resume"
        directory.mkdir(parents=True, exist_ok=True)
        state = {**resumed.metadata["trainer_state"], "global_step": self._step_to_resume_at(resumed)}
        (directory / TRAINER_STATE_NAME).write_text(json.dumps(state))
        return str(directory)

    def _step_to_resume_at(self, resumed: Resumed) -> int:
        steps_per_epoch, args = self._steps_per_epoch(), self.args
        return step_to_resume_at(
            resumed,
            steps_per_epoch=steps_per_epoch,
            steps=args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps_per_epoch),
            fixed=args.max_steps > 0,
            note=self.session.reporter.note if args.process_index == 0 else None,
        )

    def _steps_per_epoch(self) -> int:
        assert isinstance(self.train_dataset, Sized)
        rows, args = len(self.train_dataset), self.args
        rounded: Callable[[float], int] = math.floor if args.dataloader_drop_last else math.ceil
        batches = rounded(rounded(rows / args.per_device_train_batch_size) / args.world_size)
        return max(1, math.ceil(batches / args.gradient_accumulation_steps))

    def bare_model(self) -> nn.Module:
        """The model without the loop's wrappers; each rank has its own shard of a sharded one."""
        model: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation leaves the outermost module gathered
        return model


class _StoppedEvaluating(Stopped):
    """In an evaluation that an earlier attempt left over, nothing is to be saved: the next attempt makes it."""
