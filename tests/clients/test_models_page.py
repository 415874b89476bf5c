"""docs/reference/models.md has every model of the cookbook, and what it names as held is."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from trainmaster.engine.architectures import FAMILIES, NESTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
ROW = re.compile(r"^\| (\S+/\S+) \| `(\w+)`( \\\*)? \| (yes|no) \| (.*?) ?\|$", re.MULTILINE)
LISTED = """
import json
from tinker_cookbook import model_info

owners = {
    "llama": "meta-llama", "qwen": "Qwen", "deepseek": "deepseek-ai", "gpt_oss": "openai", "moonshot": "moonshotai",
    "zai": "zai-org", "nvidia": "nvidia", "thinkingmachines": "thinkingmachines",
}
known = {name for name in dir(model_info) if name.startswith("get_") and name.endswith("_info")}
assert known == {f"get_{name}_info" for name in owners}, known
print(json.dumps([f"{owners[key]}/{model}" for key in owners for model in getattr(model_info, f"get_{key}_info")()]))
"""


@pytest.fixture(scope="module")
def listed() -> list[str]:
    """The models that the cookbook knows."""
    python = ROOT / ".venvs" / "cookbook" / "bin" / "python"
    return list(json.loads(subprocess.run([python, "-c", LISTED], capture_output=True, check=True, text=True).stdout))


def test_every_model_of_the_cookbook_is_on_the_page(listed: list[str]) -> None:
    assert [row[0] for row in ROW.findall(PAGE.read_text())] == listed


def test_defaults_of_all_recipes_are_among_them(listed: list[str]) -> None:
    (recipes,) = (ROOT / ".venvs" / "cookbook" / "lib").glob("python*/site-packages/tinker_cookbook/recipes")
    text = "".join(path.read_text() for path in recipes.rglob("*.py"))
    named = set(re.findall(r"\b(?:model_name|base_model): str = \"([\w.-]+/[\w.-]+)", text))
    assert len(named) > 5
    assert named <= set(listed)


def test_models_that_are_named_as_held_are_held_and_notes_say_what_others_lack() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert sum(held == "yes" for *_, held, _ in rows) >= 34
    for name, model_type, _, held, note in rows:
        assert (held == "yes") == (model_type in {*FAMILIES, *NESTED}), name
        assert held == "yes" or note, name
