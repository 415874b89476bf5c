"""The training loop over the engine's model: one flat loop, which logs, evaluates, saves and stops between two steps.

Where a stop prevents an evaluation that was due, the next attempt makes it first, with the checkpoint that depends on
it, so that an interrupted training takes the same course and has the same best checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainmaster.jobs import rng
from trainmaster.jobs.trees import ANYTHING
from trainmaster.training.document import Document
from trainmaster.training.loop.batches import ANY_ROW, Batch, Order, Rows, evaluation_batches, read_ahead
from trainmaster.training.loop.engine_model import EngineModel
from trainmaster.training.loop.measures import Measures, SentSteps
from trainmaster.training.loop.optimizer import make_optimizer, make_scheduler
from trainmaster.training.loop.peers import Peers
from trainmaster.training.loop.schedule import Schedule
from trainmaster.training.progress_report import Course, Reporting
from trainmaster.training.session import Session, Stopped, step_to_resume_at
from trainmaster.training.state import (
    load_optimizer,
    load_scheduler,
    load_weights,
    make_optimizer_state,
    optimizer_state,
    trained_weights,
)


class EngineTrainer:
    def __init__(
        self,
        document: Document,
        model: EngineModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train: Rows,
        evaluation: Rows | None,
        peers: Peers,
    ) -> None:
        parameters, data = document.hyperparameters, document.data
        self.tokenizer = tokenizer
        self._model = model
        self._train, self._evaluation = train, evaluation
        self._peers = peers
        self._batch_size = data.batch_size
        self._pins = peers.device.type == "cuda" and data.pin_memory is not False
        self._order = Order(
            rows=len(train),
            batch_size=data.batch_size,
            accumulation=data.gradient_accumulation_steps,
            seed=data.seed or 0,
            ranks=peers.count,
            rank=peers.index,
        )
        self._fixed_steps = int(parameters["max_steps"] or 0) > 0
        self._schedule = Schedule.of(document, steps_per_epoch=self._order.steps_per_epoch)
        self._max_grad_norm = float(parameters["max_grad_norm"] or 0) or float("inf")
        self._optimizer = make_optimizer(model.container, parameters)
        self._scheduler = make_scheduler(self._optimizer, parameters, steps=self._schedule.steps)
        self._reporting: Reporting | None = None
        self._window = Measures(peers, model.objective.measures)
        self._last: tuple[torch.Tensor, float] | None = None
        """Gradient norm and learning rate of the last step."""
        self._sent: tuple[int, SentSteps, float] | None = None
        """What is to be logged of a step, once it has arrived."""
        self._tokens = 0.0
        """All ranks have trained on, up to the last log."""

    def bare_model(self) -> PreTrainedModel | PeftModel:
        return self._model.container

    def report_to(self, reporting: Reporting) -> None:
        self._reporting = reporting

    def run(self, session: Session) -> None:
        self._session = session
        start = self._resume()
        if self._reporting is not None:
            rows = self._batch_size * self._order.accumulation * self._peers.count
            self._reporting.course = Course(
                device=self._peers.device, ranks=self._peers.count, step_rows=rows, steps=self._schedule.steps
            )
        self._make_up_for_evaluation(start)
        if self._reporting is not None:
            self._reporting.begin(start, self._order.epoch_after(start), self._model.container)
        for step, batches in enumerate(() if session.patience.is_over else self._batches(start), start=start + 1):
            self._train_on(batches)
            if step == start + 1:
                # The optimizer has its state now: allocate memory before the first save.
                session.prepare(self._tree())
            self._end_step(step)
            if session.patience.is_over:
                break
        self._log_sent()
        session.wait()
        if session.patience.is_over:
            session.end_early(self._schedule.steps)
        if (tree := session.load_best({"model": trained_weights(self._model.container)})) is not None:
            load_weights(self._model.container, tree["model"])
        self._model.gather()

    # A step.

    def _batches(self, start: int) -> Iterator[Sequence[Batch]]:
        """The batches of every step from `start` on. Beside a GPU, a thread makes them while it computes."""
        made = (
            [self._read(self._train, rows) for rows in self._order.step(number)]
            for number in range(start, self._schedule.steps)
        )
        return read_ahead(made) if self._peers.device.type == "cuda" else made

    def _read(self, rows: Rows, indices: np.ndarray) -> Batch:
        batch = rows.batch(indices)
        return batch.pinned() if self._pins else batch

    def _train_on(self, batches: Sequence[Batch]) -> None:
        divisor = self._number(sum(map(self._model.objective.count, batches)))
        divisor = self._peers.sum(divisor).clamp_(min=1)
        for number, batch in enumerate(batches, start=1):
            losses = self._model.losses(batch.to(self._peers.device), divisor)
            self._model.weights.backward(losses[0], last=number == len(batches))
            self._window.add(batch, losses)
        norm = self._model.step(self._optimizer, max_norm=self._max_grad_norm)
        self._last = norm, float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
        self._window.steps += 1

    def _number(self, value: int) -> torch.Tensor:
        """On the device, without waiting for it."""
        return torch.full((), value, dtype=torch.float64, device=self._peers.device)

    # Between two steps.

    def _end_step(self, step: int) -> None:
        session, schedule = self._session, self._schedule
        self._log_sent()
        if self._reporting is not None:
            self._reporting.step_ended(step, self._order.epoch_after(step))
        evaluates, saves = schedule.evaluates(step), schedule.saves(step)
        rated = saves and session.best_needs_evaluation
        saves = session.poll() or saves
        if schedule.logs(step) or session.stop is not None:
            self._send(step)
        if session.stop is None:
            try:
                wanted = evaluates or (saves and session.best_needs_evaluation)
                evaluated = self._evaluate(step) if wanted else {}
            except _StoppedEvaluating:
                evaluates = True
            else:
                session.patience.note(evaluated)
                if saves or session.patience.is_over:
                    self._commit(step, evaluated)
                return
        assert session.stop is not None
        if session.stop.save and session.saved_step != step:
            self._commit(step, {}, evaluation_due=evaluates or rated, save_due=rated)
        self._log_sent()
        session.wait()
        raise Stopped(session.stop)

    def _send(self, step: int) -> None:
        """Begin to log. Beside a GPU, the metrics arrive while the next step is being computed."""
        assert self._last is not None
        norm, rate = self._last
        self._sent = step, self._window.send(norm), rate
        self._window = Measures(self._peers, self._model.objective.measures)
        if self._peers.device.type == "cpu":
            self._log_sent()

    def _log_sent(self) -> None:
        if self._sent is None:
            return
        (step, sent, rate), self._sent = self._sent, None
        metrics = sent.metrics()
        self._tokens += metrics["num_tokens"]
        self._log(step, {**metrics, "learning_rate": rate, "num_tokens": self._tokens})

    def _log(self, step: int, logs: Mapping[str, float]) -> None:
        if self._reporting is not None:
            self._reporting.log(step, self._order.epoch_after(step), logs)
        self._session.take_metrics(logs)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Raises _StoppedEvaluating: a stop does not wait for the end of an evaluation."""
        self._log_sent()
        if self._evaluation is None:
            return {}
        session, peers, size = self._session, self._peers, self._batch_size
        objective = self._model.objective
        measures, rounds = Measures(peers, objective.measures), -(-len(self._evaluation) // (size * peers.count))
        own = evaluation_batches(len(self._evaluation), size, ranks=peers.count, rank=peers.index)
        with session.evaluating(), torch.no_grad():
            for number in range(rounds):
                session.poll()
                if session.stop is not None:
                    raise _StoppedEvaluating(session.stop)
                if number < len(own) or self._model.sharded:
                    batch = self._read(self._evaluation, own[number] if number < len(own) else ANY_ROW)
                    divisor = self._number(max(1, objective.count(batch)))
                    losses = self._model.losses(batch.to(peers.device), divisor)
                    if number < len(own):
                        measures.add(batch, losses)
            metrics = {f"eval_{name}": value for name, value in measures.of_evaluation(rounds).items()}
        self._log(step, metrics)
        return metrics

    # Checkpoints.

    def _commit(
        self, step: int, evaluated: Mapping[str, float], *, evaluation_due: bool = False, save_due: bool = False
    ) -> None:
        self._log_sent()
        schedule = self._schedule
        state = {
            "global_step": step,
            "epoch": self._order.epoch_after(step),
            "max_steps": schedule.steps,
            "logging_steps": schedule.logging_steps,
            "eval_steps": schedule.eval_steps,
            "save_steps": schedule.save_steps,
            "train_batch_size": self._batch_size,
            "log_history": [],  # the server has the metrics
        }
        self._session.save(
            self._tree(),
            state=state,
            evaluated=evaluated,
            progress={
                "steps_per_epoch": self._order.steps_per_epoch,
                "evaluation_due": evaluation_due,
                "save_due": save_due,
                "tokens": self._tokens + self._peers.total(self._window.tokens),
            },
        )

    def _tree(self) -> dict[str, Any]:
        model = self._model.container
        return {
            "model": trained_weights(model),
            "optimizer": optimizer_state(model, self._optimizer),
            "scheduler": self._scheduler.state_dict(),
        }

    def _resume(self) -> int:
        """Load the checkpoint to resume from, if any; returns the steps that are done."""
        resumed, model = self._session.resumed, self._model.container
        if resumed is None:
            return 0
        step = step_to_resume_at(
            resumed,
            steps_per_epoch=self._order.steps_per_epoch,
            steps=self._schedule.steps,
            fixed=self._fixed_steps,
            note=self._session.reporter.note if self._peers.index == 0 else None,
        )
        if self._model.sharded:
            # A sharded state is read into tensors that are there, of each rank its shard.
            make_optimizer_state(self._optimizer)
        template = self._tree()
        template["optimizer"]["groups"] = template["scheduler"] = ANYTHING
        tree = resumed.take_tree(template)
        load_weights(model, tree["model"])
        load_optimizer(model, self._optimizer, tree["optimizer"])
        load_scheduler(self._scheduler, tree["scheduler"], step=step)
        self._model.follow()
        self._tokens = resumed.metadata.get("tokens", 0)
        if resumed.rng_state is not None:
            rng.restore(resumed.rng_state)
        return step

    def _make_up_for_evaluation(self, step: int) -> None:
        resumed = self._session.resumed
        if resumed is not None and resumed.metadata.get("evaluation_due"):
            evaluated = self._evaluate(step)
            self._session.patience.note(evaluated)
            if resumed.metadata.get("save_due"):
                self._commit(step, evaluated)


class _StoppedEvaluating(Stopped):
    """In an evaluation that an earlier attempt left over, nothing is to be saved: the next attempt makes it."""
