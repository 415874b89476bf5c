"""The loop of the engine process, in this process and on a real engine: what goes together, by turns, and wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running_service import BASE_MODEL, data

from patience import PATIENCE_S
from real_server import wait_for
from trainmaster.engine.engine import Engine
from trainmaster.engine.sampler import Sampler
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.report import Reporter
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import StopCause
from trainmaster.trainer_service import channel
from trainmaster.trainer_service.configuration import Configuration
from trainmaster.trainer_service.messages import EngineReady, EngineStopped, Reply, Request
from trainmaster.trainer_service.process import ServiceControl, TrainerService
from trainmaster.trainer_service.reports import FatalError
from trainmaster.trainer_service.sampling import KEEP_ADAPTERS


class Loop:
    """A service whose requests are put in its way before it begins, and whose engine is watched."""

    def __init__(
        self, tiny: Path, directory: Path, *, clock: Callable[[], float] = time.monotonic, **settings: Any
    ) -> None:
        self.directory = directory
        self.log: list[Any] = []
        self.engine = Engine(tiny)
        sampler = self.sampler = Sampler(self.engine.base, tiny)
        self._watch(self.engine, "run", lambda passes: [each.model_id for each in passes])
        self._watch(sampler, "step", lambda: "sample")
        near, far = channel.pair()
        reporter = Reporter(
            {
                environment.CHECKPOINT_DIR: str(directory / "checkpoints"),
                environment.CONTROL_FILE: str(directory / "control.json"),
            }
        )
        self.front = channel.EngineChannel(far)
        self._channel = channel.EngineChannel(near)
        self.service = TrainerService(
            Configuration(base_model=BASE_MODEL, model_path=tiny, lora_rank=8, **settings),
            engine=self.engine,
            sampler=sampler,
            channel=self._channel,
            reporter=reporter,
            control=ServiceControl(reporter),
            clock=clock,
        )
        self.raised: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._count = 0

    def start(self) -> Loop:
        self._thread.start()
        assert isinstance(self.front.receive(PATIENCE_S), EngineReady)
        return self

    def ask(self, op: str, model_id: str = "", body: Any = None, **fields: Any) -> str:
        self._count += 1
        encoded = None if body is None else json.dumps(body).encode()
        self.front.send(Request(request_id=str(self._count), op=op, model_id=model_id, fields=fields, body=encoded))
        return str(self._count)

    def create(self, *model_ids: str) -> None:
        for model_id in model_ids:
            self.ask("create_model", model_id, lora_config={"rank": 4, "seed": 0})
            assert not self.reply().error

    def ask_pass(self, model_id: str, seed: int = 0, **shape: int) -> str:
        given = {"data": data(seed, **shape), "loss_fn": "cross_entropy"}
        return self.ask("forward_backward", model_id, {"forward_backward_input": given})

    def reply(self) -> Reply:
        message = self.front.receive(PATIENCE_S)
        assert isinstance(message, Reply)
        return message

    def stop(self) -> None:
        (self.directory / "control.json").write_text(
            json.dumps({"version": 1, "seq": 1, "stop": StopCause.CANCEL, "save": False, "grace_s": 5.0})
        )
        while not isinstance(self.front.receive(PATIENCE_S), EngineStopped):
            pass

    def ended(self) -> Exception | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.raised

    def close(self) -> None:
        if self._thread.is_alive():
            self.stop()
            self._thread.join(PATIENCE_S)
        self.front.close()
        self._channel.close()

    def _run(self) -> None:
        try:
            self.service.run()
        except Exception as error:
            self.raised = error

    def _watch(self, what: Any, name: str, entry: Callable[..., Any]) -> None:
        method = getattr(what, name)

        def watched(*args: Any) -> Any:
            self.log.append(entry(*args))
            return method(*args)

        setattr(what, name, watched)


@pytest.fixture
def loop(tiny: Path, tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tiny, tmp_path)
    yield made
    made.close()


def test_passes_of_models_that_wait_together_run_in_one(loop: Loop) -> None:
    loop.start()
    loop.create("a:train:0", "b:train:0", "c:train:0")
    first = loop.ask_pass("a:train:0", length=400, sequences=16)
    wait_for(lambda: loop.log, "the first pass")
    # While it is computed, the others come.
    asked = [loop.ask_pass(model, seed) for seed in range(2) for model in ("b:train:0", "c:train:0")]
    replies = [loop.reply() for _ in range(5)]
    assert [reply.request_id for reply in replies] == [first, *asked]
    assert not any(reply.error for reply in replies)
    runs = [entry for entry in loop.log if entry != "sample"]
    assert runs[0] == ["a:train:0"]
    assert runs[-1] == ["b:train:0", "c:train:0"]
    assert len(runs) <= 4


SAMPLE = {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": {"max_tokens": 400, "stop": []}}


def open_session(loop: Loop) -> None:
    loop.ask("create_sampling_session", base_model=BASE_MODEL, sampling_session_id="s")
    assert not loop.reply().error


def test_training_and_sampling_go_by_turns(loop: Loop) -> None:
    loop.start()
    loop.create("a:train:0")
    open_session(loop)
    sample = loop.ask("asample", body=SAMPLE, sampling_session_id="s")
    passes = [loop.ask_pass("a:train:0", seed) for seed in range(8)]
    replies = [loop.reply().request_id for _ in range(9)]
    # Small passes do not wait for the end of a long sample, and it goes on between them.
    assert replies == [*passes, sample]
    turns = "".join("s" if entry == "sample" else "t" for entry in loop.log)
    assert "ts" in turns[: turns.rindex("t")]


PASS_S, TOKEN_S = 1.0, 0.1


@pytest.mark.parametrize(("share", "passes"), [(0.05, 24), (0.25, 8), (0.5, 8), (0.75, 8)])
def test_samples_get_their_share_of_the_time(tiny: Path, tmp_path: Path, share: float, passes: int) -> None:
    """By a clock on which a pass takes a second, and a token of a sample a tenth of it."""
    loop = Loop(
        tiny,
        tmp_path,
        clock=lambda: sum(TOKEN_S if entry == "sample" else PASS_S for entry in loop.log),
        sampling_share=share,
    )
    all_asked = threading.Event()
    step = loop.sampler.step

    def step_once_all_wait() -> Any:
        assert all_asked.wait(PATIENCE_S)
        return step()

    loop.sampler.step = step_once_all_wait  # type: ignore[method-assign]
    try:
        loop.start()
        loop.create("a:train:0")
        open_session(loop)
        asked = {loop.ask("asample", body=SAMPLE, sampling_session_id="s")}
        asked |= {loop.ask_pass("a:train:0", seed) for seed in range(passes)}
        all_asked.set()
        assert {loop.reply().request_id for _ in range(passes + 1)} == asked
    finally:
        loop.close()
    turns = "".join("s" if entry == "sample" else "t" for entry in loop.log)
    contended = turns[turns.index("t") + 1 : turns.rindex("t") + 1]
    trained_s, sampled_s = contended.count("t") * PASS_S, contended.count("s") * TOKEN_S
    assert sampled_s == pytest.approx(trained_s * share / (1 - share), abs=2 * TOKEN_S)
    assert turns.count("s") == 400


def test_out_of_memory_gives_up_one_model_until_it_is_loaded_again(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.start()
    loop.create("a:train:0", "b:train:0")
    loop.ask_pass("a:train:0")
    loop.ask("save_weights", "a:train:0", path="good")
    assert [loop.reply().error for _ in range(2)] == ["", ""]
    step = loop.engine.optim_step

    def fail(model_id: str, options: Any) -> Any:
        if model_id == "a:train:0":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        return step(model_id, options)

    monkeypatch.setattr(loop.engine, "optim_step", fail)
    loop.ask("optim_step", "a:train:0")
    failed = loop.reply()
    assert (failed.category, "out of memory" in failed.error) == ("server", True)
    monkeypatch.undo()
    # Nobody knows how far the step came: nobody goes on from there.
    loop.ask_pass("a:train:0")
    refused = loop.reply()
    assert (refused.category, "good" in refused.error) == ("server", True)
    loop.ask("load_weights", "a:train:0", path="good", optimizer=True)
    loop.ask("optim_step", "a:train:0")
    loop.ask_pass("b:train:0")
    assert [loop.reply().error for _ in range(3)] == [""] * 3


def test_sampling_sessions_that_were_long_unused_go_and_named_weights_come_back(loop: Loop) -> None:
    loop.start()
    loop.create("a:train:0")
    loop.ask("save_weights_for_sampler", "a:train:0", path="named")
    assert not loop.reply().error
    loop.ask("create_sampling_session", model_path="named", sampling_session_id="on-named")
    assert not loop.reply().error
    for number in range(KEEP_ADAPTERS + 1):
        loop.ask("save_weights_for_sampler", "a:train:0", sampling_session_id=f"s{number}")
        assert not loop.reply().error
    body = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 2}}
    told = {}
    for session in ("s0", f"s{KEEP_ADAPTERS}", "on-named"):
        loop.ask("asample", body=body, sampling_session_id=session)
        told[session] = loop.reply().error
    assert "under a name" in told.pop("s0")
    assert set(told.values()) == {""}
    loop.ask("end_session", session_id="a", model_ids=["a:train:0"], sampling_session_ids=["on-named"])
    loop.ask("asample", body=body, sampling_session_id="on-named")
    assert loop.reply().error
    loop.ask_pass("a:train:0")
    assert "no model" in loop.reply().error


def test_failure_of_the_device_ends_the_process(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    loop.start()
    loop.create("a:train:0")

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(loop.engine, "optim_step", fail)
    loop.ask("optim_step", "a:train:0")
    assert isinstance(loop.ended(), FatalError)


def test_loss_of_the_job_ends_the_process_without_a_commit(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Reporter) -> None:
        raise NotOwnerError("another attempt owns the job")

    monkeypatch.setattr(Reporter, "require_ownership", fail)
    loop.start()
    loop.create("a:train:0")
    loop.ask("save_weights_for_sampler", "a:train:0", path="late")
    assert isinstance(loop.ended(), FatalError)
    assert not (loop.directory / "checkpoints" / "sampler" / "late" / "1").exists()


def test_requests_of_a_front_that_is_gone_end_the_loop(loop: Loop) -> None:
    loop.start()
    loop.front.close()
    assert isinstance(loop.ended(), channel.ChannelClosedError)
