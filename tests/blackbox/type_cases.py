"""What happens without a job: values that are checked when they are made, runtimes, and the progress that is sent."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Callable
from typing import Any

from blackbox_world import RUNTIME, World, outcome_of


def _all(*calls: Callable[[], Any]) -> str:
    return ", ".join(sorted({outcome_of(call) for call in calls}))


def client_of_something_else(world: World) -> str:
    return outcome_of(lambda: world.api.TrainerClient(backend_config=object()))


def config_of_wrong_values(world: World) -> str:
    return _all(
        lambda: world.api.LocalProcessBackendConfig(cleanup_venv="perhaps"),
        lambda: world.api.ContainerBackendConfig(container_runtime="lxc"),
        lambda: world.api.ContainerBackendConfig(initializer_timeout="long"),
    )


def s3_uri_of_another_kind(world: World) -> str:
    return _all(
        lambda: world.api.S3DatasetInitializer(storage_uri="hf://a/b"),
        lambda: world.api.S3ModelInitializer(storage_uri="a/b"),
    )


def hub_uri_of_another_kind(world: World) -> str:
    return _all(
        lambda: world.api.HuggingFaceDatasetInitializer(storage_uri="s3://a/b"),
        lambda: world.api.HuggingFaceModelInitializer(storage_uri="a"),
    )


def cache_of_wrong_values(world: World) -> str:
    def make(uri: str, nodes: int) -> Any:
        return world.api.DataCacheInitializer(storage_uri=uri, metadata_loc="s3://a/b", num_data_nodes=nodes)

    return _all(lambda: make("cache://schema/table", 1), lambda: make("cache://schema", 2), lambda: make("x", 2))


def deadline_of_wrong_values(world: World) -> str:
    wrong: tuple[Any, ...] = (0, -1, True, 1.5, "60")
    return _all(*(lambda seconds=seconds: world.options.ActiveDeadlineSeconds(seconds) for seconds in wrong))


def patch_of_wrong_values(world: World) -> str:
    patch = world.options.ContainerPatch
    return _all(
        lambda: patch(name=" "),
        lambda: patch(name="node", env=[{"name": "A"}]),
        lambda: patch(name="node", env=[{"name": "A", "valueFrom": {}}]),
        lambda: patch(name="node", volume_mounts=[{"name": "data", "mountPath": "relative"}]),
    )


def model_initializer_ignores(world: World) -> str:
    return " ".join(world.api.HuggingFaceModelInitializer(storage_uri="hf://a/b").ignore_patterns)


def template_expands_into_train(world: World) -> str:
    template = world.api.TrainJobTemplate(trainer=world.api.CustomTrainer(func=print))
    return ", ".join(sorted({**template}))


def listed_runtimes(world: World) -> str:
    return ", ".join(sorted(runtime.name for runtime in world.client.list_runtimes()))


def runtime_shape(world: World) -> str:
    runtime = world.client.get_runtime(RUNTIME)
    trainer = runtime.trainer
    return f"{runtime.name}, {trainer.framework}, {trainer.trainer_type.value}, {trainer.num_nodes} node"


def runtime_command(world: World) -> str:
    runtime = world.client.get_runtime(RUNTIME)
    return outcome_of(lambda: runtime.trainer.command, lambda command: "a command" if command else "nothing")


def runtime_packages(world: World) -> str:
    found = world.client.get_runtime_packages(world.client.get_runtime(RUNTIME))
    return "a list" if isinstance(found, list) and found else "printed"


def packages_of_an_unknown_runtime(world: World) -> str:
    runtime = world.client.get_runtime(RUNTIME)
    runtime.name = "no-such-name"
    return outcome_of(lambda: world.client.get_runtime_packages(runtime))


def tpu_nodes(world: World) -> str:
    count = world.api.get_tpu_num_nodes
    sizes = [count(1, "2x4"), count(2, "2x2x4"), count(1, "4x4", chips_per_host=8)]
    return f"{sizes}, else {_all(lambda: count(0, '2x2'), lambda: count(1, ''), lambda: count(1, '3x3'))}"


def progress_outside_of_a_job(world: World) -> str:
    return str(world.api.update_trainjob_status(progress_percent=1))


def progress_sent(world: World) -> str:
    """Refused once, then taken, then held back because one was sent just now."""
    with _StatusServer() as server:
        token = world.directory / "token"
        token.write_text("a-token\n")
        os.environ["KUBEFLOW_TRAINER_SERVER_URL"] = server.url
        os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"] = str(token)
        os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"] = str(world.directory / "no-certificate")
        try:
            answers = [
                world.api.update_trainjob_status(120, -5, {"loss": 0.5, "step": 3, "note": "x"}),
                world.api.update_trainjob_status(120, -5, {"loss": 0.5, "step": 3, "note": "x"}),
                world.api.update_trainjob_status(50),
            ]
        finally:
            for name in ("URL", "TOKEN", "CA_CERT"):
                del os.environ[f"KUBEFLOW_TRAINER_SERVER_{name}"]
    status = server.bodies[-1]["trainerStatus"]
    status.pop("lastUpdatedTime")
    return f"{answers}, {len(server.bodies)} requests, {server.authorization}, {json.dumps(status, sort_keys=True)}"


class _StatusServer:
    """Takes what jobs report; the first report finds it out of order."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.authorization = ""
        seen = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seen.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                seen.authorization = self.headers["Authorization"]
                self.send_response(503 if len(seen.bodies) == 1 else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/status"

    def __enter__(self) -> _StatusServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


CASES: tuple[Callable[[World], str], ...] = (
    client_of_something_else,
    config_of_wrong_values,
    s3_uri_of_another_kind,
    hub_uri_of_another_kind,
    cache_of_wrong_values,
    deadline_of_wrong_values,
    patch_of_wrong_values,
    model_initializer_ignores,
    template_expands_into_train,
    listed_runtimes,
    runtime_shape,
    runtime_command,
    runtime_packages,
    packages_of_an_unknown_runtime,
    tpu_nodes,
    progress_outside_of_a_job,
    progress_sent,
)
