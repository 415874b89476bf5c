"""Going on in a new process: after a save, a pause in the middle of a step, a signal, and a death."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from running_service import Client, FailedError, RunningService, TestModel, running

from patience import PATIENCE_S
from process_signals import kill_marked
from trainmaster.protocol.reasons import EXIT_STOPPED

STEPS = range(6)


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a model that nobody stopped."""
    with running(tmp_path_factory.mktemp("uninterrupted"), tiny) as service:
        return Client(service).create_model(seed=5).train(STEPS)


def waiting(model: TestModel, count: int) -> list[dict[str, object]]:
    """The acknowledgements of more passes than can be done at once."""
    return [model.ask_forward_backward(seed, sequences=8, length=256) for seed in range(count)]


def outcomes(model: TestModel, acks: list[dict[str, object]]) -> list[FailedError]:
    """What those heard whose requests were not done; those of a front that is gone are left out."""
    failed = []
    for ack in acks:
        try:
            model.client.result(ack)
        except FailedError as error:
            failed.append(error)
        except httpx.TransportError:
            break
    return failed


def test_saved_state_in_a_new_process_gives_the_same_losses(
    tiny: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    with running(tmp_path, tiny) as service:
        model = Client(service).create_model(seed=5)
        assert model.train(STEPS[:3]) == uninterrupted[:3]
        assert model.save("half") == "half"
        trained = model.logprobs()
    with running(tmp_path, tiny, attempt=2) as service:
        client = Client(service)
        model = client.create_model(seed=99)
        model.load("half")
        assert model.logprobs() == trained
        assert model.train(STEPS[3:]) == uninterrupted[3:]
        # The weights alone are the same weights, but a new optimizer takes another course.
        again = client.create_model(seed=99)
        again.load("half", optimizer=False)
        assert again.logprobs() == trained
        assert again.train(STEPS[3:5])[0] == uninterrupted[3]
        assert again.train(STEPS[5:]) != uninterrupted[5:]


def test_pause_saves_weights_optimizer_and_gradients_of_every_model(
    tiny: Path, tmp_path: Path, uninterrupted: list[float]
) -> None:
    with running(tmp_path, tiny) as service:
        models = [Client(service, door=door).create_model(seed=5) for door in ("fireworks", "tinker")]
        frozen = Client(service).create_model(rank=None, base_only=True)
        for model in models:
            model.train(STEPS[:2])
            assert model.loss(2) == uninterrupted[2]  # its gradients wait for a step
        service.ask_to_stop()
        assert service.wait() == [EXIT_STOPPED], service.log()
        saved = service.events("checkpoint")
    assert [event["name"] for event in saved] == [f"{model.model_id.replace(':', '-')}-step-2" for model in models]
    assert frozen.model_id not in str(saved)
    assert [event["kind"] for event in saved] == ["training"] * 2
    names = [saved[0]["name"], f"tinker://{models[1].model_id}/weights/{saved[1]['name']}"]
    with running(tmp_path, tiny, attempt=2) as service:
        assert service.http.get("/list_checkpoints").json()["checkpoints"] == names
        for name in names:
            model = Client(service).create_model()
            model.load(name)
            model.step()
            assert model.train(STEPS[3:]) == uninterrupted[3:]


def test_pause_answers_what_waits_and_names_what_was_saved(tiny: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny) as service:
        model = Client(service).create_model()
        acks = waiting(model, 40)
        client = Client(service)
        sampled = client.sample(client.sampler(base_model="tiny/model"), 0, [1, 2], max_tokens=500, stop=[])
        service.ask_to_stop("inactive")
        heard = outcomes(model, acks[::-1])
        assert service.wait() == [EXIT_STOPPED]
        (saved,) = service.events("checkpoint")
    assert heard, "the engine was faster than the pause"
    assert {error.category for error in heard} == {"server"}
    assert all(saved["name"] in str(error) and "inactive" in str(error) for error in heard)
    assert sampled["request_id"]


def test_sigterm_saves_and_cancel_does_not(tiny: Path, tmp_path: Path) -> None:
    for number, (cause, saves) in enumerate([(None, 1), ("cancel", 0)]):
        with running(tmp_path / str(number), tiny) as service:
            model = Client(service).create_model()
            model.train([0])
            if cause is not None:
                service.ask_to_stop(cause, save=False, grace_s=10)
            service.ranks[0].terminate()
            assert service.wait() == [EXIT_STOPPED]
            assert len(service.events("checkpoint")) == saves


def test_killed_trainer_leaves_dead_models_and_says_what_was_saved(tiny: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny) as service:
        model = Client(service).create_model()
        model.train([0])
        path = model.save("before")
        ack = model.ask_forward_backward(1)
        service.kill()
    with running(tmp_path, tiny, attempt=2) as service:
        client = Client(service)
        model.client = client
        for lost in (ack, model.ask_forward_backward(2)):
            with pytest.raises(FailedError, match=path) as caught:
                client.result(lost)
            assert caught.value.category == "server"
        revived = client.create_model()
        revived.load(path)
        assert revived.train([1])  # it goes on, under an id of its own


def test_stop_while_a_save_is_under_way_commits_both(tiny: Path, tmp_path: Path) -> None:
    with running(tmp_path, tiny) as service:
        model = Client(service).create_model()
        model.train([0])
        ack = model.ask("save_weights", {"path": "mine"})
        service.ask_to_stop()
        assert model.client.result(ack)["path"] == "mine"
        assert service.wait() == [EXIT_STOPPED]
        names = [event["name"] for event in service.events("checkpoint")]
    assert names == ["mine", f"{model.model_id.replace(':', '-')}-step-1"]


def test_front_and_engine_end_with_each_other(tiny: Path, tmp_path: Path) -> None:
    with running(tmp_path / "front", tiny) as service:
        (front,) = _children(service.ranks[0].pid)
        kill_marked(front, "trainmaster.trainer_service.front")
        (code,) = service.wait()
        assert code not in (0, EXIT_STOPPED)
        assert "front process ended" in service.log()
    with running(tmp_path / "engine", tiny) as service:
        (front,) = _children(service.ranks[0].pid)
        service.ranks[0].kill()
        deadline = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{front}").exists() and Path(f"/proc/{front}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.long  # test_service_front.py has this of the front
def test_service_is_not_healthy_before_it_is_ready(tiny: Path, tmp_path: Path) -> None:
    service = RunningService(tmp_path, tiny, executed=True)
    try:
        answers = set()
        while 200 not in answers:
            assert service.ranks[0].poll() is None, service.log()
            try:
                answers.add(service.http.get("/healthz").status_code)
            except httpx.TransportError:
                time.sleep(0.02)
        assert answers == {200, 503}
    finally:
        service.close()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
