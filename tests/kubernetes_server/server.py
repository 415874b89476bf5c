"""The test server as a process: certificate, ports, kubeconfig, signals."""

from __future__ import annotations

import asyncio
import base64
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from starlette.applications import Starlette
from starlette.routing import Route

from kubernetes_server.api.app import Api
from kubernetes_server.cluster import Cluster
from kubernetes_server.faults.control import FaultControl
from kubernetes_server.listener import Listener
from kubernetes_server.settings import ClusterSettings
from tls_files import TlsFiles, self_signed

CONTROL_EXTENSION = "test-server-faults"
"""Where a kubeconfig says how faults are made."""


async def serve(settings: ClusterSettings, kubeconfig: Path, *, port: int = 0, with_parent: bool = False) -> None:
    """Run a cluster until SIGTERM or SIGINT, or until stdin ends if it is to end with its parent."""
    # Broken connections are what many tests are about.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    settings.directory.mkdir(parents=True, exist_ok=True)
    files = self_signed(settings.directory)
    cluster = Cluster(settings, files.cert.read_text())
    routes: list[Route] = []
    api = Api(cluster)
    app = Starlette(routes=routes)
    listener = Listener(app, files.cert, files.key)
    control = FaultControl(cluster, listener)
    app.router.routes.extend([*control.routes(), *api.routes()])
    faults = Listener(Starlette(routes=[*control.routes()]))
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if with_parent:
        loop.add_reader(sys.stdin.fileno(), _end_of(sys.stdin.buffer, ended))
    await listener.open(port)
    cluster.url = f"https://127.0.0.1:{listener.port}"
    await faults.open()
    await cluster.start()
    try:
        _write_kubeconfig(kubeconfig, cluster, files, f"http://127.0.0.1:{faults.port}")
        await ended.wait()
    finally:
        await listener.close()
        await faults.close()
        await cluster.stop()


def _end_of(stream: Any, ended: asyncio.Event) -> Callable[[], None]:
    def read() -> None:
        if not stream.read1(1024):
            asyncio.get_running_loop().remove_reader(stream.fileno())
            ended.set()

    return read


def _write_kubeconfig(path: Path, cluster: Cluster, files: TlsFiles, control: str) -> None:
    """At once and as a whole, since whoever waits for it takes it as the sign that the server is ready."""
    certificate = base64.b64encode(files.cert.read_bytes()).decode()
    extension = {"name": CONTROL_EXTENSION, "extension": {"url": control}}
    server = {"server": cluster.url, "certificate-authority-data": certificate, "extensions": [extension]}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": cluster.admin_token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }
    draft = path.with_name(f"{path.name}.draft")
    draft.touch(mode=0o600)
    draft.write_text(yaml.safe_dump(document))
    draft.replace(path)
