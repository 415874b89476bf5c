"""What `trainmaster backends` shows."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trainmaster.cli.commands.backends import _parts
from trainmaster.cli.output import draw
from trainmaster.client.types import Backend


def test_options_of_every_type_are_shown_and_those_that_say_nothing_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {
        "image": "a",
        "poll_s": 1.0,
        "shm_mb": 0,
        "classes": {"0": "low"},
        "token": None,
        "on": [],
    }
    draw(
        *_parts(
            cast(Backend, {"name": "k8s", "kind": "kubernetes", "default": False, "engine": None, "options": options})
        )
    )
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["kind", "kubernetes"],
        ["default", "no"],
        ["image", "a"],
        ["poll_s", "1.0"],
        ["shm_mb", "0"],
        ["classes", '{"0":', '"low"}'],
    ]
