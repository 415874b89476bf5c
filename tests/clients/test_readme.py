"""README.md and the tutorials work as they stand: their blocks run in order, in a fresh clone and a fresh home."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from client_programs import ROOT
from patience import PATIENCE_S

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = [
    ROOT / "README.md",
    *(TUTORIALS / f"{name}.md" for name in ("fine-tune", "own-code", "notebook", "share-a-machine")),
]
BLOCKS = [
    (page.stem, language, text)
    for page in PAGES
    for language, text in BLOCK.findall(page.read_text())
    if language != "console"  # shows what a terminal printed
]
LOOPS = ROOT / "examples" / "loops"
OTHER_LOOPS = "".join(
    f"echo '== {name}'\npython examples/loops/{name}_loop.py --steps 12\n" for name in ("grpo", "dpo")
)
"""What a comment of README.md names beside the loop that it runs."""
BRIEFLY = ("README", "notebook")
EVERYTHING = ("README", "loops", "fine-tune", "own-code", "notebook", "share-a-machine")
"""The tutorials come after the README, of whose jobs they tell more with commands that tests/cli runs, too."""
TIMEOUT_S = 900.0


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What git has, and the environment that `make setup` would make of it.

    Only the installation itself is not repeated, as it takes minutes and the network: the packages are those of this
    environment, and tinker's of its own one.
    """
    directory = tmp_path / "trainmaster"
    directory.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    venv.create(directory / ".venv", symlinks=True)
    packages = Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    places = [directory / "src", Path(sysconfig.get_path("purelib")), ROOT / ".venvs" / "tinker" / packages]
    (directory / ".venv" / packages / "installed.pth").write_text("".join(f"{place}\n" for place in places))
    for name, entry in {
        "trainmaster": "trainmaster.cli",
        "tm": "trainmaster.cli",
        "pip": "pip._internal.cli.main",
    }.items():
        script = directory / ".venv" / "bin" / name
        script.write_text(f"#!{directory}/.venv/bin/python\nimport sys\nfrom {entry} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    (directory / ".venv" / ".trainmaster-train").touch()
    return directory


@pytest.fixture
def environment(tmp_path: Path, clone: Path) -> Iterator[dict[str, str]]:
    """That of a new user: a home of their own, and nothing of Trainmaster's or of a hub's."""
    ours = ("TRAINMASTER_", "TINKER_", "HF_", "PYTEST_", "VIRTUAL_ENV", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    home = tmp_path / "home"
    home.mkdir()
    yield {
        **kept,
        "HOME": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "TRAINMASTER_HOME": str(home / "state"),
        "HF_HUB_OFFLINE": "1",
        # Whatever a block installs has to be there already, with all that it needs.
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
    }
    command = [clone / ".venv" / "bin" / "trainmaster", "down"]
    subprocess.run(command, env={**kept, "TRAINMASTER_HOME": str(home / "state")}, check=False)
    end_processes(home / "state")


def end_processes(directory: Path) -> None:
    """End what outlives a server on purpose."""
    import contextlib
    import json

    from process_signals import kill_claimant
    from trainmaster.backends.local.fork_client import ForkServer, ForkServerError

    with contextlib.suppress(OSError, ForkServerError, KeyError):
        ForkServer(directory / "forkserver")._exchange({"op": "retire"})
    for claim in directory.glob("runs/*/*/claims/*.json"):
        with contextlib.suppress(ProcessLookupError):
            kill_claimant(json.loads(claim.read_text()))


def as_shell(language: str, text: str) -> str:
    """A block as a reader would run it: pasted into a shell or, if it is Python, saved and run."""
    return f"cat > block.py <<'END-OF-BLOCK'\n{text}END-OF-BLOCK\npython block.py\n" if language == "python" else text


def numbers_of(said: str, word: str) -> list[float]:
    """What a loop prints after `word` in every step."""
    return [float(number) for number in re.findall(rf"^step \d+ {word} (\S+)", said, re.MULTILINE)]


@pytest.mark.parametrize("path", sorted(LOOPS.glob("*.py")), ids=lambda path: path.stem)
def test_loops_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


def test_every_block_is_one_that_a_reader_can_run() -> None:
    assert set(PAGES[1:]) == set(TUTORIALS.glob("*.md"))
    assert {language for _, language, _ in BLOCKS} == {"sh", "python"}
    assert "JOB" not in "".join(text for *_, text in BLOCKS), "a placeholder cannot be run"


@pytest.mark.parametrize("pages", [BRIEFLY, pytest.param(EVERYTHING, marks=pytest.mark.long)], ids="-".join)
def test_blocks_run_in_order_in_a_fresh_home(clone: Path, environment: dict[str, str], pages: tuple[str, ...]) -> None:
    # One shell for all of them, as a reader has it: what a block exports is there in the next.
    steps = []
    for page, language, text in BLOCKS:
        if page in pages:
            steps.append(f"echo '== {page}'\n{as_shell(language, text)}")
        if "sft_loop.py" in text and "loops" in pages:
            steps.append(OTHER_LOOPS)
    script = clone.parent / "readme.sh"
    script.write_text("set -eu\n" + "\n".join(steps))

    ran = subprocess.run(
        ["bash", script],
        cwd=clone,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout[-8000:]
    said: dict[str, str] = defaultdict(str)
    for part in re.split(r"^== ", ran.stdout, flags=re.MULTILINE)[1:]:
        page, _, text = part.partition("\n")
        said[page] += text
    right = re.search(r"right answers to 4 such questions: (\d) before, (\d) after", said["README"])
    assert right is not None, said["README"]
    assert int(right[1]) < int(right[2])
    assert (clone / "answers" / "model" / "config.json").exists()
    losses = numbers_of(said["README"], "loss")
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    assert "{'loss': 0.01}" in said["notebook"]
    assert "Traceback" not in ran.stdout
    if pages == BRIEFLY:
        return
    rewards = numbers_of(said["grpo"], "reward")
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.6, rewards
    preferences = numbers_of(said["dpo"], "loss")
    assert preferences[0] == pytest.approx(0.6931, abs=1e-3)
    assert preferences[-1] < 0.5
    assert "Nothing is wrong with what was read." in said["fine-tune"]
    assert re.search(r"^loss +0\.025 +0\.05$", said["own-code"], re.MULTILINE), said["own-code"]
    assert "research" in said["share-a-machine"]


@pytest.mark.long
def test_demo_teaches_a_model(clone: Path, environment: dict[str, str]) -> None:
    ran = subprocess.run(
        ["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    right = re.search(r"right answers to 26 such questions: (\d+) before, (\d+) after", ran.stdout)
    assert right is not None
    assert int(right[2]) > int(right[1]) + 10


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_setup_shows_what_it_installs(clone: Path, environment: dict[str, str], installer: str) -> None:
    """An installation takes minutes: it says what it is doing. Where uv fails, pip installs."""
    (clone / ".venv" / ".trainmaster-train").unlink()
    for name in ("uv", "pip"):
        program = clone / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\n[ {name} = {installer} ] && echo "{name} $*"\n')
        program.chmod(0o755)

    ran = subprocess.run(
        ["make", "setup"], cwd=clone, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    (line,) = [line for line in ran.stderr.splitlines() if line.startswith(("uv ", "pip ")) and " install " in line]
    assert line.startswith(f"{installer} ")
    assert line.endswith("-e .[train]")
    assert "-q" not in line
