from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.server.settings import telemetry as logs
from trainmaster.server.settings.settings import LogFormat, LogLevel, Settings

logger = logging.getLogger("trainmaster.test.logs")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def configured(monkeypatch: pytest.MonkeyPatch, log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    lines = io.StringIO()
    monkeypatch.setattr("sys.stderr", lines)
    logs.configure(Settings(data_dir=Path("/nowhere"), log_format=log_format, log_level=level))
    return lines


def said(lines: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.getvalue().splitlines()]


def test_json_line_has_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = configured(monkeypatch, LogFormat.JSON)
    logger.warning("a %s\nwith a break", "word")
    (line,) = said(lines)
    assert line.pop("ts").endswith("+00:00")
    assert line == {"level": "warning", "logger": logger.name, "message": "a word\nwith a break"}


def test_text_line_is_one_line_whatever_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = configured(monkeypatch, LogFormat.TEXT)
    logger.warning("GET %s", "/v1/x\n2025-01-01 00:00:00 INFO trainmaster all is well\x1b[2J\x9b2J\u00e9")
    (line,) = lines.getvalue().splitlines()
    assert "x\\x0a2025" in line
    assert "\x1b" not in line
    assert "\x9b" not in line
    assert line.endswith("\u00e9")


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("job job-abcdefghij01 could not be observed", {"job_id": "job-abcdefghij01"}),
        ("job-abcdefghij01.3: an act failed", {"job_id": "job-abcdefghij01", "attempt": 3}),
        ("the job-less machine", {}),
    ],
)
def test_line_about_a_job_names_it(monkeypatch: pytest.MonkeyPatch, message: str, fields: dict[str, object]) -> None:
    lines = configured(monkeypatch, LogFormat.JSON)
    logger.error("%s", message)
    (line,) = said(lines)
    assert {name: line[name] for name in ("job_id", "attempt") if name in line} == fields


def test_exception_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = configured(monkeypatch, LogFormat.JSON)
    try:
        raise ZeroDivisionError("no")
    except ZeroDivisionError:
        logger.exception("it failed")
    (line,) = said(lines)
    assert "ZeroDivisionError: no" in line["exception"]


@pytest.mark.parametrize("log_format", LogFormat)
def test_requests_are_told_apart(monkeypatch: pytest.MonkeyPatch, log_format: LogFormat) -> None:
    lines = configured(monkeypatch, log_format)

    async def serve(request_id: str) -> None:
        logs.belong_to({"request_id": request_id})
        await asyncio.sleep(0)
        await asyncio.to_thread(logger.info, "of %s", request_id)

    async def both() -> None:
        await asyncio.gather(*(asyncio.create_task(serve(name)) for name in ("req-1", "req-2")))
        logger.info("of nobody")

    asyncio.run(both())
    *own, nobody = sorted(lines.getvalue().splitlines(), key=lambda line: "nobody" in line)
    for line in own:
        assert line.count("req-1") in (0, 2)
        assert line.count("req-2") in (0, 2)
    assert "req" not in nobody


def test_level_decides_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = configured(monkeypatch, LogFormat.TEXT, LogLevel.ERROR)
    logger.warning("quiet")
    logger.error("loud")
    assert "quiet" not in lines.getvalue()
    assert "loud" in lines.getvalue()


def test_requests_are_logged_for_programs_alone() -> None:
    levels = {kind: logs.access_level(Settings(data_dir=Path("/nowhere"), log_format=kind)) for kind in LogFormat}
    assert levels == {LogFormat.TEXT: logging.DEBUG, LogFormat.JSON: logging.INFO}
