"""Job classes by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.jobs import basic_job
from trainmaster.jobs.basic_job import BasicJob, UnknownJobClassError, job, job_class, known_class, name_of


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basic_job, "_CLASSES", {})


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a job class, which is on the path."""
    name = f"jobs_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "from trainmaster.jobs import BasicJob, job\n"
        "@job('test/walk')\n"
        "class Walk(BasicJob):\n"
        "    def run(self): ...\n"
        "class Plain: ...\n"
    )
    (tmp_path / f"{name}_broken.py").write_text("import something_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


class Here(BasicJob):  # type: ignore[type-arg]
    def run(self) -> None: ...


def test_class_is_found_by_module_and_name(module: str) -> None:
    assert job_class(f"{module}:Walk").__name__ == "Walk"


def test_registered_name_is_known_once_its_module_is_imported(module: str) -> None:
    with pytest.raises(UnknownJobClassError, match="no job class is registered as 'test/walk'"):
        job_class("test/walk")
    found = job_class("test/walk", module=module)
    assert name_of(found) == "test/walk"
    assert known_class("test/walk") is found


@pytest.mark.parametrize("target", ["{}:Wolk", "{}:Plain", "{}:Walk.run", "{}:"])
def test_class_that_is_not_there_is_an_error_with_the_nearest(module: str, target: str) -> None:
    with pytest.raises(UnknownJobClassError, match="Walk"):
        job_class(target.format(module))


def test_registered_name_that_is_nearly_right_is_told(module: str) -> None:
    with pytest.raises(UnknownJobClassError, match="did you mean 'test/walk'"):
        job_class("test/wlak", module=module)


def test_module_that_is_not_there_is_told(module: str) -> None:
    with pytest.raises(UnknownJobClassError, match=r"there is no module 'no_such_module.deeper'"):
        job_class("no_such_module.deeper:Walk")


def test_module_that_misses_something_shows_its_own_error(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="something_that_is_not_there"):
        job_class(f"{module}_broken:Walk")


def test_name_of_a_class_without_one_is_where_it_is_defined() -> None:
    assert name_of(Here) == f"{__name__}:Here"
    assert known_class(name_of(Here)) is Here


def test_unknown_names_are_looked_up_without_importing_anything(module: str) -> None:
    assert known_class(f"{module}:Walk") is None
    assert known_class("") is None


def test_two_classes_cannot_have_one_name() -> None:
    job("test/one")(Here)
    job("test/one")(Here)

    class Other(BasicJob):  # type: ignore[type-arg]
        def run(self) -> None: ...

    with pytest.raises(ValueError, match="already"):
        job("test/one")(Other)
    with pytest.raises(ValueError, match="colon"):
        job("a:b")
