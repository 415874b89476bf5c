"""Trainer jobs by Fireworks' names, against a control plane in this process and a clock that moves when slept on."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import httpx
import pytest

import trainmaster
from trainmaster import TrainerJobConfig, TrainerJobManager, TrainerServiceEndpoint, TrainingShapeProfile
from trainmaster.client import ClientError, UnreachableError
from trainmaster.client.fireworks import (
    ResumeRefusedError,
    TrainerStoppedError,
    TrainerTimeoutError,
    TrainingAPIError,
    platform,
)

URL = "http://server.test"
JOBS = "/v1/accounts/mine/rlorTrainerJobs"
SHAPE = "accounts/fireworks/trainingShapes/cpu"
CONFIG = TrainerJobConfig(base_model="accounts/fireworks/models/qwen3-8b", requested_job_id="job-a")

Answer = httpx.Response | Exception


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    @property
    def passed(self) -> float:
        return self.now - 1000.0


@dataclass
class ControlPlane:
    """Answers as the reference says; a route answers with its list's items in turn, and goes on with the last."""

    routes: dict[str, list[Answer]] = field(default_factory=dict)
    requests: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answers = self.routes[f"{request.method} {request.url.path}"]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def on(self, route: str, *answers: Answer) -> ControlPlane:
        self.routes[route] = list(answers)
        return self

    def with_job(self, *states: str, healthz: tuple[int, ...] = (200,), **document: Any) -> ControlPlane:
        """A job `job-a` that is seen in these states, one after the other."""
        self.on(f"GET {JOBS}/job-a", *(job(state, **document) for state in states))
        path = "/training/v1/rlorTrainerJobs/mine/job-a/api/v1/healthz"
        return self.on(f"GET {path}", *(httpx.Response(status, json={}) for status in healthz))

    def sent(self, method: str) -> list[httpx.Request]:
        return [request for request in self.requests if request.method == method]


def job(state: str, **document: Any) -> httpx.Response:
    return httpx.Response(
        200, json={"name": "accounts/mine/rlorTrainerJobs/job-a", "state": f"JOB_STATE_{state}", **document}
    )


def ok(document: object) -> httpx.Response:
    return httpx.Response(200, json=document)


def refusal(status: int, message: str = "no", **fields: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, **fields}})


@pytest.fixture
def plane() -> ControlPlane:
    return ControlPlane().on("GET /v1/accounts", ok({"accounts": [{"name": "accounts/mine"}]}))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(plane: ControlPlane, clock: Clock) -> TrainerJobManager:
    return TrainerJobManager("a-key", URL, transport=httpx.MockTransport(plane), clock=clock)


# -- the surface --


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("create", "config"),
        ("wait_for_ready", "job_id, job_name=None, poll_interval_s=5.0, timeout_s=900.0"),
        ("create_and_wait", "config, poll_interval_s=5.0, timeout_s=900.0"),
        ("wait_for_existing", "job_id, poll_interval_s=5.0, timeout_s=900.0"),
        ("resume_and_wait", "job_id, poll_interval_s=5.0, timeout_s=900.0"),
        ("reconnect_and_wait", "job_id, poll_interval_s=5.0, timeout_s=600.0, max_wait_for_resumable_s=120.0"),
        ("get", "job_id"),
        ("delete", "job_id"),
        ("promote_checkpoint", "*, name, output_model_id, base_model"),
        ("resolve_training_profile", "shape_id"),
        ("list_checkpoints", "job_id, *, page_size=200"),
    ],
)
def test_methods_have_the_documented_arguments_and_defaults(method: str, parameters: str) -> None:
    found = inspect.signature(getattr(TrainerJobManager, method))
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for name, parameter in found.parameters.items()
        if name != "self"
    ]
    assert str(inspect.Signature(bare)) == f"({parameters})"


def test_config_has_the_documented_defaults() -> None:
    config = TrainerJobConfig(base_model="a-model")
    assert (config.lora_rank, config.learning_rate, config.max_context_length) == (0, 1e-5, None)
    assert (config.forward_only, config.disable_inactivity_cleanup, config.skip_validations) == (False, False, False)
    assert (config.training_shape_ref, config.inactivity_timeout, config.extra_args) == (None, None, None)


def test_importing_the_package_brings_no_http_library() -> None:
    program = "import sys, trainmaster; assert 'httpx' not in sys.modules; trainmaster.TrainerJobManager"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'TrainerJobManagers'"):
        _ = trainmaster.TrainerJobManagers


def test_server_and_key_default_to_the_configured_ones(monkeypatch: pytest.MonkeyPatch, plane: ControlPlane) -> None:
    monkeypatch.setenv("TRAINMASTER_URL", "http://configured.test/")
    monkeypatch.setenv("TRAINMASTER_API_KEY", "configured-key")
    with TrainerJobManager(additional_headers={"X-Team": "a"}, transport=httpx.MockTransport(plane)) as manager:
        assert (manager.base_url, manager.api_key) == ("http://configured.test", "configured-key")
        assert manager.account_id == "mine"
    [request] = plane.requests
    assert str(request.url) == "http://configured.test/v1/accounts?pageSize=2"
    assert request.headers["Authorization"] == "Bearer configured-key"
    assert request.headers["X-Team"] == "a"


@pytest.mark.parametrize("names", [[], ["accounts/a", "accounts/b"]])
def test_account_of_a_key_must_be_one(plane: ControlPlane, manager: TrainerJobManager, names: list[str]) -> None:
    plane.on("GET /v1/accounts", ok({"accounts": [{"name": name} for name in names]}))
    with pytest.raises(ValueError, match="must belong to one account"):
        _ = manager.account_id


# -- creating --


def test_create_sends_every_field_and_returns_at_once(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}", job("CREATING"))
    created = manager.create(
        TrainerJobConfig(
            base_model="a-model",
            lora_rank=8,
            max_context_length=4096,
            learning_rate=2e-5,
            gradient_accumulation_steps=2,
            node_count=2,
            display_name="mine",
            hot_load_deployment_id="dep-1",
            region="here",
            custom_image_tag="tag",
            extra_args=["--forward-only"],
            accelerator_type="H200",
            accelerator_count=4,
            forward_only=True,
            inactivity_timeout=timedelta(minutes=30),
            disable_inactivity_cleanup=True,
            requested_job_id="job-a",
        )
    )
    assert (created.job_id, created.job_name) == ("job-a", "accounts/mine/rlorTrainerJobs/job-a")
    [request] = plane.sent("POST")
    assert dict(request.url.params) == {
        "rlorTrainerJobId": "job-a",
        "deploymentId": "dep-1",
        "skipValidations": "true",
    }
    assert json.loads(request.content) == {
        "serviceMode": True,
        "nodeCount": 2,
        "displayName": "mine",
        "hotLoadDeploymentId": "dep-1",
        "forwardOnly": True,
        "inactivityTimeout": "1800s",
        "disableInactivityCleanup": True,
        "trainingConfig": {
            "baseModel": "a-model",
            "loraRank": 8,
            "learningRate": 2e-5,
            "maxContextLength": 4096,
            "gradientAccumulationSteps": 2,
            "customImageTag": "tag",
            "acceleratorType": "H200",
            "acceleratorCount": 4,
            "region": "here",
            "extraArgs": ["--forward-only"],
        },
    }


def test_create_on_a_shape_leaves_hardware_to_it(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}", job("CREATING"))
    manager.create(TrainerJobConfig(base_model="a-model", training_shape_ref=f"{SHAPE}/versions/1"))
    [request] = plane.sent("POST")
    assert request.url.params["trainingShape"] == f"{SHAPE}/versions/1"
    assert "skipValidations" not in request.url.params
    assert "nodeCount" not in json.loads(request.content)
    assert request.url.params["rlorTrainerJobId"].startswith("trainer-")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"base_model": ""}, "base_model is required"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"display_name": "x" * 64}, "at most 63 characters"),
        ({"inactivity_timeout": "30m"}, "such as '1800s', not '30m'"),
        ({"inactivity_timeout": timedelta(seconds=-1)}, "not '-1s'"),
        ({"training_shape_ref": "cpu"}, "resolve_training_profile tells it"),
        ({"training_shape_ref": SHAPE, "accelerator_type": "H100"}, "accelerator_type is the training shape's to say"),
        ({"training_shape_ref": SHAPE, "accelerator_count": 1}, "accelerator_count is the training shape's to say"),
        ({"training_shape_ref": SHAPE, "node_count": 1}, "node_count is the training shape's to say"),
        ({"training_shape_ref": SHAPE, "custom_image_tag": "t"}, "custom_image_tag is the training shape's to say"),
    ],
)
def test_create_refuses_what_makes_no_sense_before_it_asks(
    plane: ControlPlane, manager: TrainerJobManager, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        manager.create(TrainerJobConfig(**{"base_model": "a-model", **fields}))
    assert plane.requests == []


@pytest.mark.parametrize(
    ("duration", "sent"),
    [(timedelta(0), "0s"), (timedelta(milliseconds=1500), "1.5s"), (timedelta(hours=2), "7200s"), ("90.25s", "90.25s")],
)
def test_inactivity_timeouts_are_sent_as_seconds(duration: timedelta | str, sent: str) -> None:
    assert TrainerJobConfig(base_model="m", inactivity_timeout=duration).body()["inactivityTimeout"] == sent


def test_create_again_returns_the_job_that_is_there(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}", refusal(409)).with_job("RUNNING")
    assert manager.create(CONFIG).job_id == "job-a"


@pytest.mark.parametrize("state", ["DELETED", "ARCHIVED"])
def test_create_with_the_id_of_a_deleted_job_fails(plane: ControlPlane, manager: TrainerJobManager, state: str) -> None:
    plane.on(f"POST {JOBS}", refusal(409)).with_job(state)
    with pytest.raises(RuntimeError, match="was deleted"):
        manager.create(CONFIG)


def test_create_that_conflicts_with_something_else_fails(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}", refusal(409, "the queue is closed")).on(f"GET {JOBS}/job-a", refusal(404))
    with pytest.raises(TrainingAPIError, match="the queue is closed"):
        manager.create(CONFIG)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "too large"}}, "too large"),
        ({"code": 3, "message": "too large", "details": []}, "too large"),
        ({"error": "too large"}, "too large"),
        ("<html>too large</html>", "too large"),
    ],
)
def test_refusals_are_read_in_every_form(
    plane: ControlPlane, manager: TrainerJobManager, body: object, message: str
) -> None:
    answer = httpx.Response(400, text=body) if isinstance(body, str) else httpx.Response(400, json=body)
    plane.on(f"POST {JOBS}", answer)
    with pytest.raises(TrainingAPIError, match=message) as caught:
        manager.create(CONFIG)
    assert caught.value.status_code == 400
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ClientError)


def test_refusals_name_their_reason(plane: ControlPlane, manager: TrainerJobManager) -> None:
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "QUOTA",
        "metadata": {"quota_required": "8"},
    }
    plane.on(f"POST {JOBS}", httpx.Response(429, json={"code": 8, "message": "no room", "details": [info]}))
    with pytest.raises(TrainingAPIError) as caught:
        manager.create(CONFIG)
    assert (caught.value.reason, caught.value.metadata) == ("QUOTA", {"quota_required": "8"})


def test_warnings_of_the_server_are_logged(
    plane: ControlPlane, manager: TrainerJobManager, caplog: pytest.LogCaptureFixture
) -> None:
    plane.on(f"POST {JOBS}", job("CREATING", status={"message": "Warning: no node has that label"}))
    manager.create(CONFIG)
    assert "no node has that label" in caplog.text


@pytest.mark.parametrize("passing", [refusal(503), refusal(429), refusal(500), httpx.ConnectError("refused")])
def test_requests_are_sent_again_with_the_same_id(
    plane: ControlPlane, manager: TrainerJobManager, passing: Answer
) -> None:
    plane.on(f"POST {JOBS}", passing, passing, job("CREATING"))
    manager.create(TrainerJobConfig(base_model="a-model"))
    assert len({str(request.url) for request in plane.sent("POST")}) == 1
    assert len(plane.sent("POST")) == 3


def test_server_that_stays_away_is_unreachable(plane: ControlPlane, manager: TrainerJobManager, clock: Clock) -> None:
    plane.on(f"GET {JOBS}/job-a", httpx.ConnectError("refused"))
    with pytest.raises(UnreachableError):
        manager.get("job-a")
    assert clock.passed == sum(platform.RETRY_DELAYS_S)


def test_server_that_stays_unavailable_says_so_in_the_end(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"GET {JOBS}/job-a", refusal(503, "restarting"))
    with pytest.raises(TrainingAPIError, match="restarting"):
        manager.get("job-a")


def test_something_else_than_a_server_is_named(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"GET {JOBS}/job-a", httpx.Response(200, text="hello"))
    with pytest.raises(TrainingAPIError, match="not a Trainmaster server"):
        manager.get("job-a")


# -- waiting --


def test_create_and_wait_returns_once_the_trainer_answers(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock
) -> None:
    plane.on(f"POST {JOBS}", job("CREATING")).with_job(
        "PENDING", "CREATING", "RUNNING", healthz=(503, 503, 200), trainingConfig={"maxContextLength": 4096}
    )
    endpoint = manager.create_and_wait(CONFIG, poll_interval_s=2.0)
    assert endpoint == TrainerServiceEndpoint(
        job_name="accounts/mine/rlorTrainerJobs/job-a",
        job_id="job-a",
        base_url=f"{URL}/training/v1/rlorTrainerJobs/mine/job-a",
        max_context_length=4096,
    )
    assert clock.passed == 8.0


@pytest.mark.parametrize("trouble", [refusal(503), httpx.ReadTimeout("slow"), httpx.ConnectError("refused")])
def test_waiting_outlasts_a_server_that_restarts(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock, trouble: Answer
) -> None:
    plane.with_job("RUNNING").on(f"GET {JOBS}/job-a", *[trouble] * 10, job("RUNNING"))
    assert manager.wait_for_existing("job-a").job_id == "job-a"
    assert clock.passed == 50.0


def test_waiting_ends_at_once_when_the_job_failed(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock
) -> None:
    plane.with_job("CREATING", "FAILED", status={"code": "INTERNAL", "message": "out of memory"})
    with pytest.raises(RuntimeError, match="JOB_STATE_FAILED: out of memory") as caught:
        manager.wait_for_ready("job-a")
    assert isinstance(caught.value, TrainerStoppedError)
    assert caught.value.state == "JOB_STATE_FAILED"
    assert clock.passed == 5.0


@pytest.mark.parametrize("state", ["DELETED", "ARCHIVED"])
def test_waiting_ends_at_once_when_the_job_was_deleted(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock, state: str
) -> None:
    plane.with_job(state)
    with pytest.raises(TrainerStoppedError, match=state):
        manager.wait_for_ready("job-a")
    assert clock.passed == 0.0


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED", "COMPLETED", "EARLY_STOPPED", "DELETING", "PAUSED"])
def test_waiting_gives_a_stopped_job_half_a_minute(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock, state: str
) -> None:
    plane.with_job(state)
    with pytest.raises(TrainerStoppedError, match=state):
        manager.wait_for_ready("job-a")
    assert clock.passed == 30.0
    plane.with_job(state, state, "RUNNING")
    assert manager.wait_for_ready("job-a").job_id == "job-a"


@pytest.mark.parametrize("states", [("PENDING",), ("CREATING",), ("RUNNING",), ("PENDING", "CREATING", "RUNNING")])
def test_waiting_times_out_over_everything(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock, states: tuple[str, ...]
) -> None:
    plane.with_job(*states, healthz=(503,))
    with pytest.raises(TimeoutError, match="not ready after 12 s: JOB_STATE_") as caught:
        manager.wait_for_ready("job-a", timeout_s=12)
    assert isinstance(caught.value, TrainerTimeoutError)
    assert clock.passed == 12.0


def test_waiting_for_a_job_that_is_not_there_fails_at_once(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"GET {JOBS}/job-a", refusal(404, "no such job"))
    for wait in (manager.wait_for_existing, manager.reconnect_and_wait):
        with pytest.raises(TrainingAPIError, match="no such job"):
            wait("job-a")


def test_healthz_that_breaks_is_not_ready_yet(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.with_job("RUNNING")
    path = "GET /training/v1/rlorTrainerJobs/mine/job-a/api/v1/healthz"
    plane.on(path, httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("cut"), ok({"status": "ok"}))
    assert manager.wait_for_existing("job-a").job_id == "job-a"
    assert len([request for request in plane.requests if request.url.path.endswith("healthz")]) == 3


def test_resume_and_wait_resumes_once_and_waits(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}/job-a:resume", ok({})).with_job("PENDING", "RUNNING")
    assert manager.resume_and_wait("job-a").job_id == "job-a"
    [request] = plane.sent("POST")
    assert request.content == b""


def test_resume_that_is_refused_is_an_http_error_too(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}/job-a:resume", refusal(400, "it was deleted"))
    with pytest.raises(httpx.HTTPStatusError, match="it was deleted") as caught:
        manager.resume_and_wait("job-a")
    assert isinstance(caught.value, ResumeRefusedError)
    assert caught.value.response.status_code == caught.value.status_code == 400


# -- reconnecting --


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "PAUSED", "COMPLETED"])
def test_reconnect_resumes_what_has_stopped(plane: ControlPlane, manager: TrainerJobManager, state: str) -> None:
    plane.on(f"POST {JOBS}/job-a:resume", ok({})).with_job(state, "PENDING", "RUNNING")
    assert manager.reconnect_and_wait("job-a").job_id == "job-a"
    assert len(plane.sent("POST")) == 1


def test_reconnect_to_a_trainer_that_answers_resumes_nothing(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock
) -> None:
    plane.with_job("RUNNING")
    assert manager.reconnect_and_wait("job-a").job_id == "job-a"
    assert plane.sent("POST") == []
    assert clock.passed == 0.0


def test_reconnect_outlasts_states_in_between(plane: ControlPlane, manager: TrainerJobManager) -> None:
    """The trainer was killed: its death is noticed, its end worked on, and only then can it be resumed."""
    plane.with_job("RUNNING", "CREATING", "DELETING", "FAILED", "FAILED", "PENDING", "RUNNING", healthz=(502, 200))
    plane.on(f"POST {JOBS}/job-a:resume", refusal(409, "it is still being stopped"), ok({}))
    assert manager.reconnect_and_wait("job-a").job_id == "job-a"
    assert len(plane.sent("POST")) == 2


@pytest.mark.parametrize("state", ["CREATING", "DELETING", "PENDING"])
def test_reconnect_gives_up_on_what_cannot_be_resumed(
    plane: ControlPlane, manager: TrainerJobManager, clock: Clock, state: str
) -> None:
    plane.with_job(state)
    with pytest.raises(RuntimeError, match=f"JOB_STATE_{state}, and cannot be resumed") as caught:
        manager.reconnect_and_wait("job-a", max_wait_for_resumable_s=60)
    assert isinstance(caught.value, TrainerStoppedError)
    assert clock.passed == 60.0


def test_reconnect_gives_up_on_a_server_that_stays_away(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"GET {JOBS}/job-a", httpx.ConnectError("refused"))
    with pytest.raises(TrainerStoppedError, match="out of reach"):
        manager.reconnect_and_wait("job-a")


def test_reconnect_does_not_resume_what_was_deleted(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.with_job("DELETED")
    with pytest.raises(TrainerStoppedError, match="JOB_STATE_DELETED"):
        manager.reconnect_and_wait("job-a")
    assert plane.sent("POST") == []


def test_reconnect_times_out_over_everything(plane: ControlPlane, manager: TrainerJobManager, clock: Clock) -> None:
    """The time until it could be resumed counts as well."""
    plane.with_job(*["DELETING"] * 4, "FAILED", "PENDING").on(f"POST {JOBS}/job-a:resume", ok({}))
    with pytest.raises(TrainerTimeoutError):
        manager.reconnect_and_wait("job-a", timeout_s=60)
    assert clock.passed == 60.0
    plane.with_job("RUNNING", healthz=(503,))
    with pytest.raises(TrainerTimeoutError):
        manager.reconnect_and_wait("job-a", timeout_s=60)
    assert clock.passed == 120.0


def test_reconnect_raises_when_it_fails_again(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"POST {JOBS}/job-a:resume", ok({})).with_job("FAILED", "CREATING", "FAILED")
    with pytest.raises(TrainerStoppedError, match="JOB_STATE_FAILED"):
        manager.reconnect_and_wait("job-a")


# -- looking, deleting --


def test_get_returns_the_job_as_it_is(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.with_job("IDLE", displayName="mine")
    assert manager.get("job-a")["displayName"] == "mine"
    plane.on(f"GET {JOBS}/job-a", refusal(404, "no such job"))
    with pytest.raises(RuntimeError, match="no such job"):
        manager.get("job-a")
    assert manager.try_get("job-a") is None


def test_delete_is_fine_twice_and_says_when_it_is_refused(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"DELETE {JOBS}/job-a", httpx.Response(200, json={}), refusal(404), refusal(403, "not yours"))
    manager.delete("job-a")
    manager.delete("job-a")
    with pytest.raises(TrainingAPIError, match="not yours"):
        manager.delete("job-a")


# -- shapes --

VERSION = {
    "name": f"{SHAPE}/versions/7",
    "snapshot": {
        "trainerImageTag": "t1",
        "maxSupportedContextLength": 8192,
        "nodeCount": 2,
        "deploymentShapeVersion": "accounts/fireworks/deploymentShapes/d/versions/1",
        "deploymentImageTag": "d1",
        "acceleratorType": "H200",
        "acceleratorCount": 8,
        "baseModelWeightPrecision": "BF16",
        "trainerShardingScheme": {"pipelineParallelism": 4},
        "trainerMode": "LORA_TRAINER",
    },
}


@pytest.mark.parametrize("name", [SHAPE, f"{SHAPE}/versions/7"])
def test_resolve_reads_every_field_of_a_shape(plane: ControlPlane, manager: TrainerJobManager, name: str) -> None:
    plane.on(f"GET /v1/{SHAPE}/versions", ok({"trainingShapeVersions": [VERSION]}))
    plane.on(f"GET /v1/{SHAPE}/versions/7", ok(VERSION))
    profile = manager.resolve_training_profile(name)
    assert profile == TrainingShapeProfile(
        training_shape_version=f"{SHAPE}/versions/7",
        trainer_image_tag="t1",
        max_supported_context_length=8192,
        node_count=2,
        deployment_shape_version="accounts/fireworks/deploymentShapes/d/versions/1",
        deployment_image_tag="d1",
        accelerator_type="H200",
        accelerator_count=8,
        base_model_weight_precision="BF16",
        pipeline_parallelism=4,
        trainer_mode="LORA_TRAINER",
    )
    assert (profile.training_shape, profile.supports_lora) == (SHAPE, True)
    assert profile.deployment_shape == "accounts/fireworks/deploymentShapes/d/versions/1"


def test_resolve_asks_for_the_latest_valid_version(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on("GET /v1/accounts/mine/trainingShapes/small/versions", ok({"trainingShapeVersions": [{"name": "v"}]}))
    profile = manager.resolve_training_profile("small")
    assert dict(plane.requests[-1].url.params) == {"filter": "latest_validated=true", "pageSize": "1"}
    assert (profile.node_count, profile.pipeline_parallelism, profile.deployment_shape) == (1, 1, None)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_resolve_of_a_shape_that_is_not_to_be_had_fails(
    plane: ControlPlane, manager: TrainerJobManager, status: int
) -> None:
    plane.on(f"GET /v1/{SHAPE}/versions", refusal(status, "not to be had"))
    with pytest.raises(RuntimeError, match="not to be had"):
        manager.resolve_training_profile(SHAPE)


def test_resolve_of_a_shape_without_a_valid_version_fails(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(f"GET /v1/{SHAPE}/versions", ok({"trainingShapeVersions": []}))
    with pytest.raises(RuntimeError, match="no valid version"):
        manager.resolve_training_profile(SHAPE)
    with pytest.raises(ValueError, match="is not accounts/"):
        manager.resolve_training_profile("accounts/mine/models/a")


# -- checkpoints --

CHECKPOINT = "accounts/mine/rlorTrainerJobs/job-a/checkpoints/step-4"
PROMOTE = "POST /v1/accounts/mine/checkpoints/step-4:promote"
OPERATION = "GET /v1/accounts/mine/operations/o"


def promoted(manager: TrainerJobManager) -> dict[str, Any]:
    return manager.promote_checkpoint(name=CHECKPOINT, output_model_id="my-model", base_model="a-model")


def test_list_checkpoints_follows_every_page(plane: ControlPlane, manager: TrainerJobManager) -> None:
    pages = ok({"checkpoints": [{"name": "a"}], "nextPageToken": "2"}), ok({"checkpoints": [{"name": "b"}]})
    plane.on(f"GET {JOBS}/job-a/checkpoints", *pages)
    assert manager.list_checkpoints("job-a") == [{"name": "a"}, {"name": "b"}]
    assert [dict(request.url.params) for request in plane.requests[1:]] == [
        {"pageSize": "200"},
        {"pageSize": "200", "pageToken": "2"},
    ]


def test_promotion_is_followed_until_it_is_done(plane: ControlPlane, manager: TrainerJobManager, clock: Clock) -> None:
    name = "accounts/mine/operations/o"
    model = {"@type": "a-type", "name": "accounts/mine/models/my-model", "state": "READY"}
    plane.on(PROMOTE, ok({"operation": {"name": name}}))
    plane.on(OPERATION, ok({"name": name}), refusal(503), ok({"name": name, "done": True, "response": model}))
    assert promoted(manager) == {"name": "accounts/mine/models/my-model", "state": "READY"}
    assert json.loads(plane.sent("POST")[0].content) == {
        "output_model": "accounts/mine/models/my-model",
        "trainer_job_id": "accounts/mine/rlorTrainerJobs/job-a",
        "base_model": "a-model",
        "async_promotion": True,
    }
    assert clock.passed > 4.0


def test_promotion_may_be_done_at_once(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(PROMOTE, ok({"model": {"name": "m"}}))
    assert promoted(manager) == {"name": "m"}
    plane.on(PROMOTE, ok({}))
    with pytest.raises(ClientError, match="names no model"):
        promoted(manager)


def test_promotion_that_fails_says_why(plane: ControlPlane, manager: TrainerJobManager) -> None:
    plane.on(PROMOTE, refusal(404, "no such checkpoint"))
    with pytest.raises(RuntimeError, match="no such checkpoint"):
        promoted(manager)
    plane.on(PROMOTE, ok({"operation": {"name": "accounts/mine/operations/o"}}))
    plane.on(OPERATION, ok({"name": "o", "done": True, "error": {"code": 9, "message": "disk full"}}))
    with pytest.raises(RuntimeError, match="disk full"):
        promoted(manager)
    failed = {"name": "accounts/mine/operations/o", "done": True, "error": {"code": 9, "message": "disk full"}}
    plane.on(PROMOTE, ok({"operation": failed}))
    with pytest.raises(RuntimeError, match="disk full"):
        promoted(manager)


def test_promotion_times_out(plane: ControlPlane, manager: TrainerJobManager, clock: Clock) -> None:
    running = ok({"name": "accounts/mine/operations/o"})
    plane.on(PROMOTE, ok({"operation": {"name": "accounts/mine/operations/o"}})).on(OPERATION, running)
    with pytest.raises(TimeoutError, match="goes on after 7200 s"):
        promoted(manager)
    assert clock.passed == 7200.0


@pytest.mark.parametrize(
    "wrong", [{"name": "step-4"}, {"output_model_id": "My_Model"}, {"output_model_id": "x" * 64}, {"base_model": ""}]
)
def test_promotion_checks_names_before_it_asks(
    plane: ControlPlane, manager: TrainerJobManager, wrong: dict[str, str]
) -> None:
    arguments = {"name": CHECKPOINT, "output_model_id": "my-model", "base_model": "a-model", **wrong}
    with pytest.raises(ValueError, match=next(iter(wrong.values())) or "required"):
        manager.promote_checkpoint(**arguments)
    assert plane.requests == []


def test_promotion_takes_keywords_only(manager: TrainerJobManager) -> None:
    promote: Callable[..., Any] = manager.promote_checkpoint
    with pytest.raises(TypeError):
        promote(CHECKPOINT, "my-model", "a-model")
