"""Environments of packages: how they are found, made, layered over the base, and made again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainmaster.protocol.reasons import Reason
from trainmaster.worker.environments import (
    KEEP_S,
    READY,
    Base,
    InstallError,
    Wanted,
    _error_of,
    canonical,
    environment_for,
    key_of,
)
from wheel_index import WheelIndex

UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
QUIET = {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "PIP_RETRIES": "0"}


def variables(*, uv: bool = False) -> dict[str, str]:
    assert UV is not None, "uv is missing: run `make setup-dev`"
    path = str(Path(UV).parent) if uv else "/nonexistent"
    return {**os.environ, **QUIET, "PATH": path}


@pytest.fixture
def index(tmp_path: Path) -> WheelIndex:
    return WheelIndex(tmp_path / "index")


def run_in(place: Path, code: str) -> str:
    return subprocess.run(
        [place / "bin" / "python", "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def wanted(index: WheelIndex, *packages: str) -> Wanted:
    return Wanted.of(packages, [index.url], {})


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ("Foo_Bar", "foo-bar"),
        (" foo  >= 1.0 , <2 ", "foo>=1.0,<2"),
        ("foo [extra] @ https://x/Foo.whl", "foo[extra] @ https://x/Foo.whl"),
        ('foo>=1 ;  python_version < "3.12"', 'foo>=1 ; python_version < "3.12"'),
        ("https://x/Foo_Bar.whl", "https://x/Foo_Bar.whl"),
        ("git+https://host/Repo@main#egg=Foo", "git+https://host/Repo@main#egg=Foo"),
    ],
)
def test_requirement_has_one_spelling(written: str, same: str) -> None:
    assert canonical(written) == same


def test_key_is_another_when_anything_is_that_decides_the_content() -> None:
    base = Base(directories=("/base",), versions={"torch": "2.0"})

    def key(
        packages: tuple[str, ...] = ("b", "a"),
        urls: tuple[str, ...] = (),
        over: Base = base,
        given: Mapping[str, str] | None = None,
    ) -> str:
        return key_of(Wanted.of(packages, urls, given or {}), over, given or {})

    assert key() == key(("A", "b", "a")) == key(given={"HOME": "/elsewhere"})
    others = {
        key(("a",)),
        key(urls=("https://index",)),
        key(urls=("https://index", "https://more")),
        key(over=Base(directories=("/base",), versions={"torch": "2.1"})),
        key(given={"PIP_INDEX_URL": "https://index"}),
        key(given={"UV_INDEX_STRATEGY": "first-index"}),
    }
    assert len(others - {key()}) == 6


def test_what_the_base_has_needs_no_installer(tmp_path: Path) -> None:
    place = environment_for(Wanted.of(["HTTPX", "trainmaster"], [], {}), tmp_path, {"PATH": "/nonexistent"})
    assert run_in(place, "import httpx, trainmaster, sys; print(sys.prefix)") == str(place)


def test_environment_holds_what_the_base_lacks_and_wins_over_it(tmp_path: Path, index: WheelIndex) -> None:
    index.add("alpha", "1.0", requires=["numpy", "beta>=1"])
    index.add("beta", "1.5")
    index.add("httpx", "99.0", "VERSION = 'ours'")
    place = environment_for(wanted(index, "alpha", "httpx>=99"), tmp_path, variables())
    assert set(json.loads((place / READY).read_text())["installed"]) == {"alpha", "beta", "httpx"}
    assert run_in(place, "import alpha, beta, httpx, numpy; print(beta.VERSION, httpx.VERSION)") == "1.5 ours"

    before = (place / READY).stat()
    os.utime(place, (0, 0))
    assert environment_for(wanted(index, "httpx >= 99", "Alpha"), tmp_path, {**variables(), "SHELL": "x"}) == place
    assert (place / READY).stat() == before
    assert time.time() - place.stat().st_mtime < 3600, "an environment that is used must not be forgotten"


def test_uv_installs_only_what_the_base_lacks(
    tmp_path: Path, index: WheelIndex, capfd: pytest.CaptureFixture[str]
) -> None:
    own = Base.own().versions["httpx"]
    index.add("httpx", own)
    index.add("httpx", "99.0")
    index.add("alpha", "1.0", requires=["httpx"])
    place = environment_for(wanted(index, "alpha"), tmp_path, variables(uv=True))
    assert json.loads((place / READY).read_text())["installed"] == {"alpha": "1.0"}
    assert capfd.readouterr().out.splitlines() == ["installing alpha with uv", "installed alpha 1.0"]
    conflicting = environment_for(wanted(index, "httpx>=99"), tmp_path, variables(uv=True))
    assert json.loads((conflicting / READY).read_text())["installed"] == {"httpx": "99.0"}
    assert "trying pip" in capfd.readouterr().out


def test_unfinished_environment_is_made_again(tmp_path: Path, index: WheelIndex) -> None:
    index.add("alpha", "1.0")
    place = environment_for(wanted(index, "alpha"), tmp_path, variables(uv=True))
    (place / READY).unlink()
    (place / "lib" / "left over").touch()
    assert environment_for(wanted(index, "alpha"), tmp_path, variables(uv=True)) == place
    assert not (place / "lib" / "left over").exists()
    assert run_in(place, "import alpha; print(alpha.VERSION)") == "1.0"


def test_making_one_forgets_those_that_nobody_used_for_long(tmp_path: Path) -> None:
    old = tmp_path / "environments" / "old"
    recent = tmp_path / "environments" / "recent"
    for place, age_s in ((old, KEEP_S + 60), (recent, KEEP_S - 3600)):
        place.mkdir(parents=True)
        os.utime(place, (time.time() - age_s,) * 2)
    made = environment_for(Wanted.of(["httpx"], [], {}), tmp_path, {})
    assert set((tmp_path / "environments").iterdir()) == {recent, made}


def test_failed_install_leaves_nothing_and_says_why(tmp_path: Path, index: WheelIndex) -> None:
    index.add("alpha", "1.0")
    with pytest.raises(InstallError) as caught:
        environment_for(wanted(index, "alpha>=2"), tmp_path, variables())
    assert caught.value.reason is Reason.BAD_INPUT
    assert "alpha>=2 (from versions: 1.0)" in str(caught.value)
    assert "ERROR:" in caught.value.output
    assert list((tmp_path / "environments").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", None),
        ("WARNING: 401 Error, Credentials not correct for https://index/alpha/", Reason.CREDENTIALS_REFUSED),
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'", Reason.STORAGE_UNAVAILABLE),
        ("  cause: error sending request for url (https://index/alpha/)", Reason.STORAGE_UNAVAILABLE),
        ("ERROR: No matching distribution found for alpha", Reason.BAD_INPUT),
        ("", Reason.BAD_INPUT),
    ],
)
def test_output_of_the_installer_tells_whose_fault_it_is(line: str, reason: Reason | None) -> None:
    error = _error_of(f"Looking in indexes\n{line}\nERROR: No matching distribution found for alpha\n")
    assert error.reason is reason
    assert reason is not None or "No space left on device" in str(error)


def test_credentials_of_an_index_are_not_repeated() -> None:
    error = _error_of("ERROR: Could not find a version at https://me:hidden@index/alpha\n")
    assert "hidden" not in str(error) + error.output
    assert "https://***@index/alpha" in str(error)
