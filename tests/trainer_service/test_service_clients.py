"""The public clients, unchanged, against the front and a stub engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forgetful_proxy import ForgetfulProxy
from running_front import RunningFront
from stub_engine import BASE_MODEL

from patience import PATIENCE_S

ENVIRONMENTS = Path(os.environ.get("TRAINMASTER_CLIENTS_DIR", Path(__file__).parents[2] / ".venvs"))
"""Where each public client is installed, by name; `make setup-dev` makes them."""
SCRIPTS = Path(__file__).parent / "client_scripts"


LOSE = {"forward_backward": 2, "optim_step": 1, "create_model": 1, "retrieve_future": 3, "create_session": 1}


@dataclass(frozen=True)
class Session:
    """What a client's script told at the end of a case; the front that was its own, and a proxy between them."""

    told: dict[str, Any]
    front: RunningFront
    proxy: ForgetfulProxy | None

    def numbers(self) -> list[int]:
        """The seq_ids that the engine did, in its order."""
        return [seq_id for _, seq_id, op in self.front.engine.done if op != "create_model"]


def start(environment: str, *cases: str, **variables: str) -> subprocess.Popen[str]:
    """`cases` are each followed by a URL."""
    script = SCRIPTS / ("fireworks_session.py" if environment == "fireworks" else "tinker_session.py")
    return subprocess.Popen(
        [str(ENVIRONMENTS / environment / "bin" / "python"), str(script), *cases],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
    )


def run(environment: str, *cases: str) -> list[dict[str, Any]]:
    """What a client's script tells at the end of each case."""
    process = start(environment, *cases)
    try:
        told, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    return [json.loads(line) for line in told.splitlines()[-len(cases) // 2 :]]


def sessions(environment: str) -> dict[str, Session]:
    """All that is told by one process of a client, which goes from front to front."""
    slow = {"hold_s": 0.2, "delays": {"pass_s": 0.7, "step_s": 0.7}}
    lost: dict[str, dict[str, int]] = {"slow": {}, "lost": LOSE}
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "slow": ("slow", slow),
        "training": ("training", {}),
        "lost": ("training", {}),
        "chunks": ("chunks", {}),
        "errors": ("errors", {}),
    }
    if environment != "fireworks":
        cases["sampling"] = ("sampling", {"delays": {"sample_s": 0.1}})
    with contextlib.ExitStack() as stack:
        fronts = {name: stack.enter_context(RunningFront(**given)) for name, (_, given) in cases.items()}
        proxies = {name: stack.enter_context(ForgetfulProxy(fronts[name].url, lose=lost[name])) for name in lost}
        asked = [word for name, (case, _) in cases.items() for word in (case, (proxies.get(name) or fronts[name]).url)]
        told = run(environment, *asked)
    return {name: Session(each, fronts[name], proxies.get(name)) for name, each in zip(cases, told, strict=True)}


@pytest.fixture(
    scope="module",
    # What the oldest one says in JSON is in test_service_bodies.py, and clients/test_cookbook.py runs it, too.
    params=["tinker", *(pytest.param(f"tinker-{each}", marks=pytest.mark.long) for each in ("0.25.0", "0.24.1"))],
)
def tinker(request: pytest.FixtureRequest) -> dict[str, Session]:
    return sessions(request.param)


# clients/test_fireworks_client.py does the same through the server, and loses answers there.
@pytest.fixture(scope="module", params=[pytest.param("fireworks", marks=pytest.mark.long)])
def fireworks(request: pytest.FixtureRequest) -> dict[str, Session]:
    return sessions(request.param)


def test_tinker_trains_saves_and_resumes(tinker: dict[str, Session]) -> None:
    told = tinker["training"].told
    assert told["models"] == [BASE_MODEL]
    assert told["losses"] == [16.0, 8.0, pytest.approx(16 / 3)]
    assert told["forward"] == [[-1.0] * 2, [-1.0] * 3]
    assert told["path"].startswith("tinker://sess-")
    assert told["path"].endswith(":train:0/weights/three")
    assert told["after"] == 3
    assert told["model_name"] == BASE_MODEL
    assert told["resumed_loss"] == 4.0


def test_tinker_chunks_are_done_in_order_and_put_together(tinker: dict[str, Session]) -> None:
    told = tinker["chunks"].told
    assert tinker["chunks"].numbers() == [1, 2, 3, 4]
    expected = [-(number % 7 + 1) for number in range(2500)]
    assert told["logprobs"] == expected
    assert told["loss"] == -sum(expected)
    assert told["step"] == {"steps": 1, "gradients": 3}


def test_tinker_samples_from_what_was_saved(tinker: dict[str, Session]) -> None:
    told = tinker["sampling"].told
    for name, steps in {"kept": 1, "named": 2, "base": 0}.items():
        first = [10 + number + steps for number in range(20)]
        assert told[name] == [[[n, n + 1, n + 2], [n + 1, n + 2, n + 3]] for n in first]
    assert told["logprobs"] == [None, -1.0, -1.0]


def test_tinker_hears_errors_and_goes_on(tinker: dict[str, Session]) -> None:
    told = tinker["errors"].told
    message, category = told["load"]
    assert "nothing was saved as 'tinker://" in message
    assert category == "user"
    assert told["after"]["steps"] == 1
    message, category = told["create"]
    assert "there is no base model 'other' here" in message
    assert category == "user"
    assert "nothing was saved as 'tinker://none/sampler_weights/none'" in told["sampler"]


def test_tinker_loses_answers_and_changes_nothing(tinker: dict[str, Session]) -> None:
    assert_nothing_changed(tinker["lost"], models=2)


def test_tinker_asks_again_in_silence_for_what_takes_longer_than_a_poll_is_held(tinker: dict[str, Session]) -> None:
    assert_asked_in_silence(tinker["slow"])


def assert_nothing_changed(session: Session, *, models: int) -> None:
    """Each lost answer was asked for again; what was done already was not done twice."""
    assert session.proxy is not None
    assert session.proxy.lost == sum(LOSE.values())
    done = [number for number in session.numbers() if number]
    assert [request.op for request in session.front.engine.requests].count("create_model") == models
    assert session.told["losses"] == [16.0, 8.0, pytest.approx(16 / 3)]
    first_model = done[: max(done)]
    assert first_model == list(range(1, max(done) + 1))


def assert_asked_in_silence(session: Session) -> None:
    assert session.numbers() == [1, 2, 3, 4]
    assert session.proxy is not None
    assert session.proxy.try_again >= 4 * 2
    assert session.proxy.asked["forward_backward"] == session.proxy.asked["optim_step"] == 2
    assert session.told["found"] == [[16.0, 1], [8.0, 2]]
    assert session.told["warnings"] == []


def test_tinker_hears_of_the_engines_death_and_what_was_saved() -> None:
    with RunningFront(last_answers_s=30, delays={"step_s": 600.0}) as front:
        # Telemetry would be tried again and again at its end.
        process = start("tinker", "death", front.url, TINKER_TELEMETRY="0")
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"waiting": True}
            front.engine.die()
            told = json.loads(process.communicate(timeout=PATIENCE_S)[0])
        finally:
            process.kill()
            process.wait()
    assert told["category"] == "server"
    assert "its engine process died" in told["error"]
    assert f"Its last saved state is {told['path']}" in told["error"]


def test_tinker_may_compress_and_follow_all_samples_at_once() -> None:
    """What the server can switch on in the client: zstd bodies, and one question for all samples of a session."""
    config = {"proto_compress_fwdbwd": True, "sample_use_retrieve_futures": True}
    with RunningFront(delays={"sample_s": 0.1}) as front, ForgetfulProxy(front.url, config=config) as proxy:
        trained, sampled = run("tinker", "training", proxy.url, "sampling", proxy.url)
        assert proxy.encodings["zstd"] > 0
        assert proxy.asked["retrieve_futures"] > 0
    assert trained["losses"][0] == 16.0
    assert sampled["base"][0] == [[10, 11, 12], [11, 12, 13]]


def test_tinker_comes_again_when_samples_are_too_many() -> None:
    with RunningFront(max_pending_samples=15, delays={"sample_s": 0.1}) as front:
        with ForgetfulProxy(front.url) as proxy:
            (told,) = run("tinker", "sampling", proxy.url)
            asked = proxy.asked["asample"]
        done = [request.op for request in front.engine.requests].count("asample")
    assert done == 61
    assert asked > done
    assert len(told["kept"]) == len(told["named"]) == len(told["base"]) == 20


def test_fireworks_trains_saves_and_loads(fireworks: dict[str, Session]) -> None:
    told, requests = fireworks["training"].told, fireworks["training"].front.engine.requests
    (step, *_) = [request for request in requests if request.op == "optim_step"]
    assert step.fields["grad_accumulation_normalization"] == "num_loss_tokens"
    assert told["losses"] == [16.0, 8.0, pytest.approx(16 / 3)]
    assert told["forward"] == [[-1.0] * 2, [-1.0] * 3]
    assert told["path"] == "step-3"
    assert told["sampler"].startswith("step-3-")
    assert told["checkpoints"] == ["step-3"]
    assert told["after"] == 3
    assert told["adapter"] == "accounts/a/models/x"
    assert told["unloaded"] is True


def test_fireworks_chunks_are_done_in_order_and_put_together(fireworks: dict[str, Session]) -> None:
    told = fireworks["chunks"].told
    assert fireworks["chunks"].numbers() == [1, 2, 3, 4, 5, 6, 7]
    expected = [-(number % 7 + 1) for number in range(2500)]
    assert told["logprobs"] == [expected, expected]
    assert told["step"] == {"steps": 1, "gradients": 6}


def test_fireworks_hears_errors_and_goes_on(fireworks: dict[str, Session]) -> None:
    told = fireworks["errors"].told
    assert "nothing was saved as 'none'" in told["load"]
    assert told["after"]["steps"] == 1


def test_fireworks_loses_answers_and_changes_nothing(fireworks: dict[str, Session]) -> None:
    assert_nothing_changed(fireworks["lost"], models=1)


def test_fireworks_asks_again_in_silence_for_what_takes_longer_than_a_poll_is_held(
    fireworks: dict[str, Session],
) -> None:
    assert_asked_in_silence(fireworks["slow"])
