"""What the page for operators tells them to write works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_S
from trainmaster.server.settings.resolution import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "operations.md").read_text()


def block(language: str, containing: str) -> str:
    """The block of the page in a language that contains a text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (text for text in blocks if containing in text)
    return str(found)


def test_tables_of_the_page_are_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(block("toml", "[queues.research]"))
    declared = resolve({"data_dir": tmp_path}, environment={}, config=file).declared
    assert declared.queues["research"].quota_gpus == 8
    assert declared.nodes["gpu-box-1"].labels == ("rack-3",)
    assert declared.accounts["vision"].uid == 1500
    assert declared.webhooks["chat"].statuses == ("COMPLETED", "FAILED")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here to judge it")
def test_unit_of_the_page_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = tmp_path / "trainmaster.service"
    here = str(Path(sys.executable).with_name("trainmaster"))
    unit.write_text(block("ini", "[Service]").replace("/opt/trainmaster/.venv/bin/trainmaster", here))
    command = ["systemd-analyze", "verify", "--man=no", "--generators=no", str(unit)]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    about_us = [line for line in judged.stderr.splitlines() if "trainmaster" in line]
    assert about_us == []
    assert judged.returncode == 0, judged.stderr
