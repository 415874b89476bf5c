"""The engine process's loop: takes requests off the channel, trains and samples by turns, saves, and stops when asked.

Requests of one model are done in order, those of several together. Where training and samples both wait, samples get
the share of the time that `sampling_share` says.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from trainmaster.engine.engine import Engine
from trainmaster.engine.sampler import Sampler
from trainmaster.jobs.attempt import LOOK_EVERY_S
from trainmaster.jobs.attempt import Stop as StopRequest
from trainmaster.jobs.report import Reporter
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.trainer_requests import ModelMode
from trainmaster.trainer_service.channel import EngineChannel
from trainmaster.trainer_service.checkpoint_names import CommittedCheckpoint, description
from trainmaster.trainer_service.configuration import Configuration
from trainmaster.trainer_service.messages import EngineReady, EngineStopped, Reply, Request
from trainmaster.trainer_service.model_checkpoints import Saving
from trainmaster.trainer_service.model_operations import PASSES, ModelOperations
from trainmaster.trainer_service.reports import Gauges
from trainmaster.trainer_service.sampling import SamplingSessions

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServiceControl:
    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._signalled = False

    def stop(self) -> StopRequest | None:
        if self._signalled and self._reporter.stop_requested() is None:
            # Whoever sends a signal for the server has said why just before.
            time.sleep(2 * LOOK_EVERY_S)
        stop = self._reporter.stop_requested()
        if stop is None and self._signalled:
            return StopRequest(cause=StopCause.PREEMPT, save=True, deadline=math.inf)
        return stop

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask for a stop within the block; a second one kills."""
        before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: object) -> None:
        self._signalled = True
        signal.signal(number, signal.SIG_DFL)
        name = signal.Signals(number).name
        sys.stderr.write(f"trainmaster: {name}: stops after what is under way; a second one ends it at once\n")


IDLE_S = 0.1
"""How long to sleep when there is nothing to do: a stop is seen as late as that."""
SAVING_S = 0.005
"""Likewise while a save is under way, whose end somebody waits for."""
LONGEST_WAIT_S = 60.0
"""How long one side waits at most for what the other is owed, whatever the share: work may take unusually long, such as
the first of its kind."""


@dataclass(eq=False)
class TrainerService:
    configuration: Configuration
    _: KW_ONLY
    engine: Engine
    sampler: Sampler
    channel: EngineChannel
    reporter: Reporter
    control: ServiceControl
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        configuration, engine, reply = self.configuration, self.engine, self.channel.send
        self._gauges = Gauges(self.reporter)
        self._saving = Saving(self.reporter, base_model=configuration.base_model)
        self._sampling = SamplingSessions(configuration, engine, self.sampler, self._saving, reply)
        self._training = ModelOperations(configuration, engine, self._saving, self._sampling, self._gauges, reply)
        self._queues: dict[str, deque[Request]] = {}
        self._owed_s = 0.0
        """What samples still get before training goes on; below 0, what they had too much."""

    def run(self) -> StopRequest:
        """Serve until a stop is asked for, and do what it asks; which it was. Raises ChannelClosedError, FatalError."""
        self.channel.send(
            EngineReady(capabilities=self._capabilities(), checkpoints=tuple(self._saving.named.listing()))
        )
        self.reporter.phase("training")
        while True:
            if (stop := self.control.stop()) is not None:
                self._stop(stop)
                return stop
            if self.reporter.save_requested():
                self._training.save_all()
            self._take(0.0 if self._has_work() else SAVING_S if self._saving.busy else IDLE_S)
            self._sample(self._train())
            self._saving.poll()
            self._gauges.report(
                models=len(self._training.models),
                queued=sum(map(len, self._queues.values())),
                sampling=self._sampling.pending,
            )

    def _take(self, wait_s: float) -> None:
        """Take in what has come; wait up to `wait_s` for the first."""
        while (message := self.channel.receive(wait_s)) is not None:
            wait_s = 0.0
            if isinstance(message, Request):
                self._take_request(message)

    def _take_request(self, request: Request) -> None:
        if request.op == "asample":
            self._sampling.submit(request)
        elif request.op == "cancel":
            self._sampling.cancel(str(request.fields["request_id"]))
        elif request.op == "end_session":
            self._sampling.end(request.fields["sampling_session_ids"])
            for model_id in request.fields["model_ids"]:
                self._queues.setdefault(model_id, deque()).append(request)
        else:
            self._queues.setdefault(request.model_id, deque()).append(request)

    def _has_work(self) -> bool:
        return self._training_waits() or self._sampling.pending > 0

    def _training_waits(self) -> bool:
        return any(not self._training.must_wait(queue[0]) for queue in self._queues.values())

    def _train(self) -> float:
        """Do one request of each model, all passes together; how long that took."""
        began = self.clock()
        passes = []
        for model_id, queue in list(self._queues.items()):
            request = queue[0]
            if self._training.must_wait(request):
                continue
            queue.popleft()
            if not queue:
                del self._queues[model_id]
            if request.op in PASSES:
                passes.append(request)
            elif request.op == "end_session":
                self._training.models.unload(model_id)
            else:
                self._training.perform(request)
        if passes:
            self._training.run(passes)
        return self.clock() - began

    def _sample(self, trained_s: float) -> None:
        """Draw samples until they have their share of the time; a token of each if no training waits."""
        ratio = self.configuration.sampling_share / (1 - self.configuration.sampling_share)
        self._owed_s = min(self._owed_s + trained_s * ratio, LONGEST_WAIT_S)
        if not self._training_waits():
            # What samples had while nobody trained does not count against them.
            self._owed_s = max(self._owed_s, 0.0)
            self._draw()
        while self._sampling.pending and self._owed_s > 0:
            self._draw()
        if not self._sampling.pending:
            self._owed_s = 0.0
        self._owed_s = max(self._owed_s, -LONGEST_WAIT_S * ratio)

    def _draw(self) -> None:
        """One token of each sample, if there are any; it counts as time of samples."""
        if self._sampling.pending:
            began = self.clock()
            self._gauges.sampled(self._sampling.step())
            self._owed_s -= self.clock() - began
            self._take(0.0)

    def _stop(self, stop: StopRequest) -> None:
        self._saving.poll(wait=True)
        saved = (
            {found.manifest.attributes["model_id"]: found for found in self._training.save_all()} if stop.save else {}
        )
        for model_id, queue in self._queues.items():
            for request in queue:
                if request.op != "end_session":
                    self.channel.send(_stopped(request, stop, saved.get(model_id)))
        self._queues.clear()
        self._sampling.refuse_all(f"the trainer was stopped ({stop.cause}): sample again when it runs")
        self._saving.close()
        about = tuple(description(found.manifest) for found in saved.values())
        self.channel.send(EngineStopped(reason=f"the trainer was stopped ({stop.cause})", checkpoints=about))

    def _capabilities(self) -> Mapping[str, Any]:
        configuration = self.configuration
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": self.engine.max_context_length,
                    "trainable": configuration.mode is not ModelMode.FORWARD_ONLY,
                    "sampleable": True,
                }
                for name in (configuration.base_model, *configuration.aliases)
            ]
        }


def _stopped(request: Request, stop: StopRequest, saved: CommittedCheckpoint | None) -> Reply:
    message = f"the trainer was stopped ({stop.cause}) before this was done"
    if saved is not None:
        path = description(saved.manifest)["path"]
        message += f"; {request.model_id} was saved as {path}: make a new model from it to continue"
    return Reply(request_id=request.request_id, error=message, category="server")
