"""The test server for a test: a process that ends with the test, whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from patience import PATIENCE_S

_EXTENSION = "test-server-faults"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Faults:
    """Faults on demand; each method takes the arguments of the one of the same name in `faults/control.py`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(**arguments: Any) -> Any:
            body = json.dumps(arguments).encode()
            request = urllib.request.Request(f"{self.url}/faults/{name}", body, method="POST")
            try:
                with _DIRECT.open(request, timeout=PATIENCE_S) as answer:
                    return json.loads(answer.read())["result"]
            except urllib.error.HTTPError as error:
                with error:
                    raise AssertionError(f"{name}: {error.code} {error.read().decode()}") from None

        return call


@dataclass
class KubernetesServer:
    directory: Path
    arguments: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def faults(self) -> Faults:
        return faults_of(self.kubeconfig)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> KubernetesServer:
        self.directory.mkdir(parents=True, exist_ok=True)
        tests = Path(__file__).parents[1]
        command = [sys.executable, "-m", "kubernetes_server", "--kubeconfig", str(self.kubeconfig)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--directory", str(self.directory / "cluster"), "--with-parent", *self.arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(tests)},
                start_new_session=True,
            )

        deadline = time.monotonic() + PATIENCE_S
        while not self.kubeconfig.exists():
            assert self.process.poll() is None, f"the server did not start: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"the server is not ready: {self.log.read_text()}"
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """End it, with all that it started."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)  # It may have been killed, but not reaped.
            self.process.wait(PATIENCE_S)
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process = None

    @property
    def log(self) -> Path:
        return self.directory / "server.log"


def faults_of(kubeconfig: Path) -> Faults:
    """The faults of the test server that a kubeconfig leads to.

    Raises:
        LookupError: it leads to another cluster.
    """
    document = yaml.safe_load(kubeconfig.read_text())
    for cluster in document["clusters"]:
        for extension in cluster["cluster"].get("extensions") or ():
            if extension["name"] == _EXTENSION:
                return Faults(extension["extension"]["url"])
    raise LookupError(f"{kubeconfig} is not of a test server")


@contextlib.contextmanager
def running(directory: Path, *arguments: str) -> Iterator[KubernetesServer]:
    """A test server that runs for the length of a block; the arguments are those of `python -m kubernetes_server`."""
    server = KubernetesServer(directory, arguments)
    try:
        yield server.start()
    finally:
        server.stop()
