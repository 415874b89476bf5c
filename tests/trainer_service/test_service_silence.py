"""Clients that fall silent: what they trained and did not save is saved for them, on a real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from plain_client import wait_for
from real_engine import RealEngine
from running_front import RunningFront
from running_service import Client, FailedError, TestModel

from trainmaster.trainer_service.model_checkpoints import LEFT_BEHIND_TTL_S

STEPS = range(5)


@pytest.fixture(scope="module")
def front(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    directory = tmp_path_factory.mktemp("silence")
    engine = partial(RealEngine, tiny=tiny, directory=directory)
    with RunningFront(engine=engine, session_expires_s=5, save_again_s=0.5) as started:
        yield started


@pytest.fixture(scope="module")
def uninterrupted(front: RunningFront) -> list[float]:
    """The losses of a model whose client stays."""
    return lasting(front).create_model(seed=5).train(STEPS)


def lasting(front: RunningFront) -> Client:
    """A client whose session the server keeps: it ends when the server says so."""
    client = Client(front, door="tinker")
    client.session_id = f"sess-kept-{client.session_id[-8:]}"
    return client


def interrupt(model: TestModel, reason: str = "interrupted") -> None:
    """As the server says that a client is gone."""
    model.client.post(f"sessions/{model.client.session_id}/finish", {"reason": {"type": reason}})


def train_half(model: TestModel) -> list[float]:
    """Two steps, and a pass whose gradients wait for the third."""
    return [*model.train(STEPS[:2]), model.loss(2)]


def heard(model: TestModel) -> str:
    """What a client hears that wakes and goes on."""
    with pytest.raises(FailedError) as caught:
        model.loss()
    assert caught.value.category == "server"
    return str(caught.value)


def leave(front: RunningFront, model: TestModel) -> str:
    """The same, once its model is gone."""
    wait_for(lambda: model.model_id not in front.engine.engine.models)
    wait_for(lambda: "being saved" not in heard(model))
    return heard(model)


def name_of(model: TestModel, step: int) -> str:
    return f"{model.model_id.replace(':', '-')}-step-{step}"


def test_expired_session_leaves_what_it_did_not_save(front: RunningFront, uninterrupted: list[float]) -> None:
    client = Client(front)
    model, untouched, saved = (client.create_model(seed=5) for _ in range(3))
    saved.train([0])
    saved.save("by-its-client")
    untouched.step()  # without gradients, which changes nothing
    assert train_half(model) == uninterrupted[:3]
    name = name_of(model, 2)
    assert f"which expired. Its last saved state is {name}: make a new model and load it" in leave(front, model)
    assert "None of its states was saved" in leave(front, untouched)
    assert "Its last saved state is by-its-client" in leave(front, saved)
    assert front.http.get("list_checkpoints").json()["checkpoints"] == ["by-its-client", name]
    (about,) = front.engine.attributes(f"weights/{name}")
    assert about["expires_at"] == pytest.approx(time.time() + LEFT_BEHIND_TTL_S, abs=60)
    # Weights, moments and the gradients that waited: as if nobody had slept.
    again = lasting(front).create_model(seed=99)
    again.load(name)
    again.step()
    assert again.train(STEPS[3:]) == uninterrupted[3:]


def test_session_that_the_server_interrupts_is_saved_and_one_that_is_finished_is_not(
    front: RunningFront, uninterrupted: list[float]
) -> None:
    model, finished = (lasting(front).create_model(seed=5) for _ in range(2))
    train_half(model)
    finished.train([0])
    interrupt(model)
    interrupt(finished, "success")
    path = f"tinker://{model.model_id}/weights/{name_of(model, 2)}"
    assert f"which was interrupted. Its last saved state is {path}:" in leave(front, model)
    assert "which was finished by its client. None of its states was saved" in leave(front, finished)
    again = lasting(front).create_model(seed=99)
    again.load(path)
    again.step()
    assert again.train(STEPS[3:]) == uninterrupted[3:]


def test_what_takes_the_place_of_a_save_to_stay_stays(front: RunningFront) -> None:
    client = lasting(front)
    model, unchanged = client.create_model(), client.create_model()
    for each in (model, unchanged):
        each.train([0])
        each.do("save_weights", {})
    model.loss(1)
    interrupt(model)
    for each in (model, unchanged):
        assert name_of(each, 1) in leave(front, each)
    for each, version in ((model, "2"), (unchanged, "1")):
        place = f"weights/{each.model_id}/{name_of(each, 1)}"
        (about,) = front.engine.attributes(place)
        assert "expires_at" not in about
        assert [path.name for path in (front.engine.checkpoints / place).glob("[0-9]*")] == [version]


def test_model_that_cannot_be_saved_stays_and_is_saved_later(front: RunningFront) -> None:
    model = lasting(front).create_model()
    model.train([0])
    weights = front.engine.checkpoints / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    aside = weights.rename(weights.with_name("aside"))
    weights.write_text("in the way")
    interrupt(model)
    told = f"{model.model_id}, whose client is gone, could not be saved, and stays"
    wait_for(lambda: sum(note.startswith(told) for note in front.engine.notes()) >= 2)
    assert model.model_id in front.engine.engine.models
    assert "being saved" in heard(model)
    weights.unlink()
    aside.rename(weights)
    assert name_of(model, 1) in leave(front, model)
