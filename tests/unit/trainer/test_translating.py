"""What goes wrong between client and server, as the errors that `TrainerClient` promises."""

from __future__ import annotations

import socket

import pytest

from trainmaster.client import Client
from trainmaster.trainer.errors import translated


def test_a_server_that_does_not_answer_in_time_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", "a-key", timeout=0.2)
        with client, pytest.raises(TimeoutError), translated("a-job"):
            client.get("a-job")
