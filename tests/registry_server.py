"""A registry of images on a port of this machine, for engines to pull from: what is in it, and what goes wrong, is up
to the test.

It speaks as much of the distribution API as a pull needs. Every image is the one it was started with, and a layer with
a greeting that its own command shows; so another greeting makes another image.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from container_engine import Engine
from patience import PATIENCE_S

LABEL = "trainmaster.test-registry"
"""The label of every image from such a registry: which one it was."""
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(kw_only=True)
class Registry:
    """What a running registry holds, was asked for, and does wrong."""

    base: Path
    """An image as `podman push dir:` lays it out."""
    host: str = ""
    requests: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    layers: set[str] = field(default_factory=set)
    """Those of greetings, among the blobs."""
    manifests: dict[str, bytes] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By repository: the status and the code that its manifests are answered with."""
    cut: set[str] = field(default_factory=set)
    """Repositories whose layers break off half-way."""
    open: threading.Event = field(default_factory=threading.Event)
    """Half of each of those layers is held back while this is not set."""

    def put(self, repository: str, greeting: str) -> str:
        """Have `latest` of a repository be an image that says this; the image's name."""
        based_on = json.loads((self.base / "manifest.json").read_bytes())
        config = json.loads(self._of_base(based_on["config"]["digest"]))
        # No engine has seen these layers before.
        files = {"greeting": f"{greeting}\n{os.urandom(8).hex()}".encode(), "more": os.urandom(1 << 16)}
        layers = [_layer(name, data) for name, data in files.items()]
        digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
        self.layers |= set(digests)
        config["rootfs"]["diff_ids"] += digests
        config["history"] = [*config.get("history", ()), *({"created_by": name} for name in files)]
        config["config"]["Labels"] = {LABEL: self.host}
        config["config"]["Cmd"] = ["sh", "-c", "read line < /greeting; echo $line"]
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._stored(json.dumps(config).encode(), _CONFIG),
            "layers": [*based_on["layers"], *(self._stored(layer, _LAYER) for layer in layers)],
        }
        data = json.dumps(manifest).encode()
        self.manifests[f"{repository}:latest"] = data
        self.manifests[f"{repository}:sha256:{hashlib.sha256(data).hexdigest()}"] = data
        return f"{self.host}/{repository}:latest"

    def asked(self, repository: str) -> int:
        """How often somebody has begun to pull from a repository."""
        return sum(request.startswith(f"/v2/{repository}/manifests/") for request in self.requests)

    def blob(self, digest: str) -> bytes | None:
        """The bytes of a layer, or of a configuration."""
        return self.blobs.get(digest) or self._of_base(digest)

    def _of_base(self, digest: str) -> bytes | None:
        path = self.base / digest.removeprefix("sha256:")
        return path.read_bytes() if path.exists() else None

    def _stored(self, data: bytes, kind: str) -> dict[str, Any]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"mediaType": kind, "digest": digest, "size": len(data)}


@contextlib.contextmanager
def running_registry(engine: Engine, image: str) -> Iterator[Registry]:
    """A registry whose images are made from one that the engine has; for the length of a block."""
    with tempfile.TemporaryDirectory() as directory:
        engine.podman("push", "--quiet", image, f"dir:{directory}")
        registry = Registry(base=Path(directory))
        registry.open.set()

        class Handler(_Handler):
            held = registry

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            registry.host = f"127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield registry
            finally:
                registry.open.set()
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    held: Registry

    def do_GET(self) -> None:
        registry, parts = self.held, self.path.removeprefix("/v2/").split("/")
        registry.requests.append(self.path)
        repository = "/".join(parts[:-2])
        if self.path == "/v2/":
            self._answer(b"{}", "application/json")
        elif repository in registry.refusals and parts[-2] == "manifests":
            status, code = registry.refusals[repository]
            self._answer(json.dumps({"errors": [{"code": code, "message": code}]}).encode(), "application/json", status)
        elif parts[-2] == "manifests":
            found = registry.manifests.get(f"{repository}:{parts[-1]}")
            self._found(found, _MANIFEST, "MANIFEST_UNKNOWN")
        else:
            found = registry.blob(parts[-1])
            if found and parts[-1] in registry.layers:
                self._give(found, whole=repository not in registry.cut)
            else:
                self._found(found, "application/octet-stream", "BLOB_UNKNOWN")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _found(self, data: bytes | None, kind: str, code: str) -> None:
        if data is None:
            self._answer(json.dumps({"errors": [{"code": code, "message": code}]}).encode(), "application/json", 404)
        else:
            self._answer(data, kind)

    def _answer(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _give(self, layer: bytes, *, whole: bool) -> None:
        half = len(layer) // 2
        self.send_response(200)
        self.send_header("Content-Length", str(len(layer)))
        self.end_headers()
        self.wfile.write(layer[:half])
        self.held.open.wait(PATIENCE_S)
        if whole:
            self.wfile.write(layer[half:])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Tests look at `requests`."""


def _layer(name: str, data: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o644
        tar.addfile(member, io.BytesIO(data))
    return archive.getvalue()
