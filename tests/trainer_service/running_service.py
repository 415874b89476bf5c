"""A trainer service as a worker starts it, on a tiny model, and a client that speaks to it as the public ones do."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from forked_services import ForkedRank
from patience import PATIENCE_S
from process_signals import kill_all_marked
from trainmaster.protocol import environment

MODULE = "trainmaster.trainer_service"
BASE_MODEL = "tiny/model"
FEW_DESCRIPTORS = 512
"""What a service may have open when it starts; it may allow itself more."""


class RunningService:
    """The ranks of one attempt at a service job. `directory` is what attempts of one job have in common."""

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        attempt: int = 1,
        ranks: int = 1,
        job_id: str = "job-1",
        executed: bool = False,
        **settings: Any,
    ) -> None:
        """Its ranks are forked from a process that has imported torch, or, as a worker does it, `executed`."""
        self.directory = directory
        self.attempt_dir = directory / f"attempt-{attempt}"
        self.checkpoints = directory / "checkpoints"
        inputs = self.attempt_dir / "inputs"
        inputs.mkdir(parents=True)
        document = {"base_model": BASE_MODEL, "model_path": str(model), "mode": "lora", "lora_rank": 8, **settings}
        (inputs / "service.json").write_text(json.dumps(document))
        self.port, rendezvous = _free_port(), _free_port()
        self.ranks: list[subprocess.Popen[bytes] | ForkedRank] = []
        for rank in range(ranks):
            env = {
                **{name: value for name, value in os.environ.items() if not name.startswith("TRAINMASTER_")},
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(rendezvous),
                "PORT": str(self.port),
                environment.JOB_ID: job_id,
                environment.ATTEMPT: str(attempt),
                environment.INPUTS_DIR: str(inputs),
                environment.CHECKPOINT_DIR: str(self.checkpoints),
                environment.EVENTS_FILE: str(self.attempt_dir / f"events-{rank}"),
                environment.METRICS_FILE: str(self.attempt_dir / f"metrics-{rank}"),
                environment.CONTROL_FILE: str(self.attempt_dir / "control.json"),
                "CUDA_VISIBLE_DEVICES": "",
            }
            log = self.attempt_dir / f"log-{rank}"
            if not executed:
                self.ranks.append(ForkedRank(MODULE, env=env, log=log, descriptors=FEW_DESCRIPTORS))
                continue
            argv = [
                "sh",
                "-c",
                f'ulimit -S -n {FEW_DESCRIPTORS} && exec "$@"',
                "sh",
                sys.executable,
                "-P",
                "-m",
                MODULE,
            ]
            with open(log, "wb") as file:
                self.ranks.append(subprocess.Popen(argv, env=env, stdout=file, stderr=file, start_new_session=True))
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}/api/v1", verify=False, timeout=PATIENCE_S, trust_env=False
        )

    def wait_ready(self) -> RunningService:
        """Until health answers 200."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/healthz").status_code == 200:
                    return self
            assert all(rank.poll() is None for rank in self.ranks), self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def ask_to_stop(self, cause: str = "pause", *, save: bool = True, grace_s: float = 30.0) -> None:
        """As the worker does."""
        document = {"version": 1, "seq": 1, "stop": cause, "save": save, "grace_s": grace_s}
        new = self.attempt_dir / "control.new"
        new.write_text(json.dumps(document))
        new.rename(self.attempt_dir / "control.json")

    def wait(self) -> list[int]:
        """The exit codes of all ranks, when they have ended."""
        return [rank.wait(PATIENCE_S) for rank in self.ranks]

    def kill(self) -> None:
        """At once, with the front."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        kill_all_marked(f"{environment.CONTROL_FILE}={self.attempt_dir / 'control.json'}")

    def log(self) -> str:
        """What all ranks and the front said."""
        return "\n".join(path.read_text() for path in sorted(self.attempt_dir.glob("log-*")))

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What rank 0 reported of a type."""
        lines = (self.attempt_dir / "events-0").read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["type"] == kind]

    def metrics(self) -> list[dict[str, Any]]:
        """What rank 0 reported in numbers."""
        path = self.attempt_dir / "metrics-0"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def __enter__(self) -> RunningService:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave nothing running."""
        self.http.close()
        self.kill()


class FailedError(Exception):
    """A future ended with an error."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        super().__init__(outcome["error"])
        self.category = outcome["category"]


class Client:
    """One session."""

    def __init__(self, service: RunningService, *, door: str = "fireworks") -> None:
        self.http = service.http
        self.headers = {"x-trainmaster-door": door}
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session"}
        self.session_id = self.post("create_session", body)["session_id"]
        self._models = 0
        self._samplers = 0

    def post(self, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        """A POST that is answered well."""
        response = self.http.post(f"/{path}", json=body, headers={**self.headers, **headers})
        assert response.status_code == 200, (path, response.status_code, response.text)
        found: dict[str, Any] = response.json()
        return found

    def result(self, ack: dict[str, Any]) -> dict[str, Any]:
        """What came of it, by asking as long as it takes."""
        while True:
            response = self.http.post(
                "/retrieve_future", json={"request_id": ack["request_id"]}, headers=dict(self.headers)
            )
            outcome: dict[str, Any] = response.json()
            if (response.status_code, outcome.get("type")) == (408, "try_again"):
                continue
            assert response.status_code == 200, (response.status_code, response.text)
            if "error" in outcome:
                raise FailedError(outcome)
            return outcome

    def create_model(self, *, rank: int | None = 4, seed: int = 0, **more: Any) -> TestModel:
        """A model, made."""
        number, self._models = self._models, self._models + 1
        body = {"session_id": self.session_id, "model_seq_id": number, "base_model": BASE_MODEL, **more}
        if rank is not None:
            body["lora_config"] = {"rank": rank, "seed": seed, **more.get("lora_config", {})}
        return TestModel(self, self.result(self.post("create_model", body))["model_id"])

    def sampler(self, *, source: str = "", **weights: Any) -> str:
        """The id of a sampling session on a model_path or the base_model."""
        number, self._samplers = self._samplers, self._samplers + 1
        body = {"session_id": self.session_id, "sampling_session_seq_id": number, **weights}
        headers = {"x-trainmaster-source": source} if source else {}
        found: str = self.post("create_sampling_session", body, **headers)["sampling_session_id"]
        return found

    def sample(self, sampling_session_id: str, seq_id: int, tokens: Sequence[int], **params: Any) -> dict[str, Any]:
        """The acknowledgement of a sample."""
        more = {name: params.pop(name) for name in ("num_samples", "prompt_logprobs") if name in params}
        body = {
            "sampling_session_id": sampling_session_id,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]},
            "sampling_params": {"max_tokens": 8, "seed": 1, "temperature": 1.0, **params},
            **more,
        }
        return self.post("asample", body)


class TestModel:
    """One model of a session, with its sequence of operations."""

    __test__ = False

    def __init__(self, client: Client, model_id: str) -> None:
        self.client = client
        self.model_id = model_id
        self._seq_id = 0

    def ask(self, op: str, fields: dict[str, Any], **headers: str) -> dict[str, Any]:
        """The acknowledgement of the next operation."""
        self._seq_id += 1
        return self.client.post(op, {"model_id": self.model_id, "seq_id": self._seq_id, **fields}, **headers)

    def do(self, op: str, fields: dict[str, Any], **headers: str) -> dict[str, Any]:
        """The result of the next operation."""
        return self.client.result(self.ask(op, fields, **headers))

    def ask_forward_backward(self, seed: int = 0, *, loss: str = "cross_entropy", **shape: int) -> dict[str, Any]:
        """The acknowledgement of a pass over made-up sequences."""
        return self.ask("forward_backward", {"forward_backward_input": {"data": data(seed, **shape), "loss_fn": loss}})

    def loss(self, seed: int = 0, **shape: int) -> float:
        """Of a forward_backward."""
        found: float = self.client.result(self.ask_forward_backward(seed, **shape))["metrics"]["loss:sum"]
        return found

    def logprobs(self, seed: int = 0) -> list[list[float]]:
        """Of a forward."""
        given = {"forward_input": {"data": data(seed), "loss_fn": "cross_entropy"}}
        return [output["logprobs"]["data"] for output in self.do("forward", given)["loss_fn_outputs"]]

    def step(self, rate: float = 0.01, **more: Any) -> dict[str, Any]:
        """The metrics of an optim_step."""
        found: dict[str, Any] = self.do("optim_step", {"adam_params": {"learning_rate": rate}, **more})["metrics"]
        return found

    def train(self, steps: Sequence[int]) -> list[float]:
        """The losses of some steps, each on data of its own."""
        losses = []
        for seed in steps:
            losses.append(self.loss(seed))
            self.step()
        return losses

    def save(self, name: str, **more: Any) -> str:
        """The path of a training checkpoint."""
        found: str = self.do("save_weights", {"path": name, **more})["path"]
        return found

    def save_for_sampler(self, name: str, **more: Any) -> str:
        """The path of a sampler checkpoint."""
        found: str = self.do("save_weights_for_sampler", {"path": name, **more})["path"]
        return found

    def load(self, path: str, *, optimizer: bool = True, source: str = "") -> None:
        """Load a training checkpoint."""
        headers = {"x-trainmaster-source": source} if source else {}
        self.do("load_weights", {"path": path, "optimizer": optimizer}, **headers)


def data(seed: int = 0, *, sequences: int = 2, length: int = 12) -> list[dict[str, Any]]:
    """Some sequences, each token to be told from those before it."""
    made = []
    for number in range(sequences):
        tokens = [(17 * seed + 5 * number + 3 * place * place + place) % 250 for place in range(length + 1)]
        inputs = {
            "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [length]},
            "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
        }
        made.append(
            {"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]}, "loss_fn_inputs": inputs}
        )
    return made


@contextlib.contextmanager
def running(directory: Path, model: Path, **settings: Any) -> Iterator[RunningService]:
    """A service that is ready, and gone after the block."""
    with RunningService(directory, model, **settings) as service:
        yield service


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
