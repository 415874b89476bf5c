"""Functions: called with their arguments, with what they return kept, and with the packages that they need."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from backends_under_test import BackendUnderTest, long_on

from job_server import JobServer
from wheel_index import WheelIndex


def submit(server: JobServer, source: str, **workload: Any) -> str:
    return server.submit_workload("function", {"source": textwrap.dedent(source), "name": "train", **workload})


@long_on("local-files", "local-http")
def test_function_has_its_packages_and_its_result_is_kept(backend: BackendUnderTest, server: JobServer) -> None:
    index = WheelIndex(server.directory.parent / "index")
    index.add("gamma", "1.0", requires=["delta>=2"])
    index.add("delta", "2.5")
    source = """
        import delta, gamma, helper, os, pathlib, sys, trainmaster

        def train(lr, epochs=1, **rest):
            print("training", lr, file=sys.stderr)
            return {"lr": lr, "epochs": epochs, "rest": rest, "cwd": pathlib.Path.cwd().name, "helper": helper.VALUE,
                    "colour": os.environ["COLOUR"], "packages": [gamma.VERSION, delta.VERSION], "prefix": sys.prefix}
    """
    wanted = {
        "files": [{"path": "helper.py", "sha256": server.upload_files(b"VALUE = 7\n")}],
        "environment": {"COLOUR": "blue", "PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"},
        "packages": ["Gamma >= 1.0"],
        **backend.with_packages(index),
    }
    first = submit(server, source, arguments={"lr": 0.1, "tags": ["a", None, True]}, **wanted)
    assert server.until(first)["status"] == "COMPLETED", server.lines(first)
    result = json.loads(server.artifact(first, "output/result.json"))
    assert Path(result.pop("prefix")).is_relative_to(backend.caches())
    assert result == {
        "lr": 0.1,
        "epochs": 1,
        "rest": {"tags": ["a", None, True]},
        "cwd": "work",
        "helper": 7,
        "colour": "blue",
        "packages": ["1.0", "2.5"],
    }
    assert server.lines(first, step="node") == ["training 0.1"]
    assert "installed gamma 1.0" in server.lines(first, step="environment")
    # What was installed once is there for the next job.
    second = submit(server, source, arguments={"lr": 1}, **wanted)
    assert server.until(second)["status"] == "COMPLETED"
    assert server.lines(second, step="environment") == []


@long_on("local-files", "container")
def test_failing_function_fails_its_job_at_its_own_line(backend: BackendUnderTest, server: JobServer) -> None:
    source = """
        def train(lr):
            deeper(lr)

        def deeper(lr):
            raise ValueError(f"no such rate: {lr}")  # the very line
    """
    index = WheelIndex(server.directory.parent / "empty")
    raising = submit(server, source, arguments={"lr": 3})
    lacking = submit(server, source, packages=["epsilon>=9"], **backend.with_packages(index))
    failed = server.until(raising, "FAILED")
    assert failed["error_type"] == "EXITED_NONZERO"
    assert failed["error_message"] == "rank 0 exited with code 1: ValueError: no such rate: 3"
    assert 'trainmaster_function.py", line 6, in deeper: ValueError: no such rate: 3' in failed["error"]["frame"]
    assert any("# the very line" in line for line in server.lines(raising))
    failed = server.until(lacking, "FAILED")
    assert (failed["error_type"], failed["error"]["fault"]) == ("BAD_INPUT", "user")
    assert "epsilon>=9" in failed["error_message"]
    assert server.lines(lacking, step="node") == []
