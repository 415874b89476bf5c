"""`python -P -m trainmaster.trainer_service.front --channel FD --port PORT`: a child of the engine process."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import uvicorn

from trainmaster.protocol import environment
from trainmaster.protocol.trainer_requests import Trainer
from trainmaster.trainer_service.front.request_bodies import FrontSettings
from trainmaster.trainer_service.front.routes import make_app
from trainmaster.trainer_service.front.state import Front
from trainmaster.trainer_service.messages import allow_many_descriptors

_KEEP_ALIVE_S = 120
"""Longer than the server and the public clients keep a connection that nobody uses."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="trainmaster.trainer_service.front")
    parser.add_argument("--channel", type=int, required=True, help="the descriptor of the socket to the engine")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default=os.environ.get(environment.SERVICE_HOST, "127.0.0.1"))
    limits = [field for field in fields(FrontSettings) if field.name != "trainer"]
    for limit in limits:
        parser.add_argument(f"--{limit.name.replace('_', '-')}", type=type(limit.default), default=limit.default)
    options = parser.parse_args()
    trainer = Trainer(os.environ[environment.JOB_ID], int(os.environ[environment.ATTEMPT]))
    settings = FrontSettings(trainer=trainer, **{limit.name: getattr(options, limit.name) for limit in limits})
    token_file = os.environ.get(environment.TOKEN_FILE)
    token = Path(token_file).read_text().strip() if token_file else ""
    return serve(settings, socket.socket(fileno=options.channel), host=options.host, port=options.port, token=token)


def serve(settings: FrontSettings, end: socket.socket, *, host: str, port: int, token: str = "") -> int:
    """Serve until the engine is gone; 0 when it ended in order."""
    # Half of them for bodies; every sample that waits is a connection.
    descriptors = allow_many_descriptors()
    # With thousands of connections a full collection takes a tenth of a second, and finds little.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    front = Front(replace(settings, max_held=min(settings.max_held, descriptors // 2)))

    def stop() -> None:
        server.should_exit = True

    server = _FrontServer(
        uvicorn.Config(
            make_app(front, end, stop=stop, token=token),
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="on",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.last_answers_s)),
        )
    )
    server.run()
    return 0 if front.link.in_order else 1


class _FrontServer(uvicorn.Server):
    """Ends with the engine, and not by a signal: signals that the whole job gets are for the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        yield


if __name__ == "__main__":
    sys.exit(main())
