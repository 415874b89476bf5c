"""Functions: called on every rank, with what they return kept, and with the packages that they need."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from job_server import json_lines
from local_servers import LocalServer, over
from process_signals import kill_claimant
from real_server import wait_for
from wheel_index import ServedIndex

pytestmark = over("files")
NO_CACHE = {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1", "PIP_RETRIES": "0"}


@pytest.fixture
def index(tmp_path: Path) -> Iterator[ServedIndex]:
    """An index of the test's own; as its address is another one each time, nothing of it is installed yet."""
    made = ServedIndex(tmp_path / "index")
    yield made
    made.close()


def submit(server: LocalServer, source: str, name: str = "train", *, job: Any = None, **workload: Any) -> str:
    document = {"source": textwrap.dedent(source), "name": name, **workload}
    return server.submit_workload("function", document, **(job or {}))


def result(server: LocalServer, job_id: str) -> Any:
    answer = server.ask("GET", f"/v1/jobs/{job_id}/artifacts/output/result.json")
    assert answer.is_success, answer.text
    return answer.json()


def environment_log(server: LocalServer, job_id: str) -> list[str]:
    return server.lines(job_id, step="environment")


def test_functions_of_other_shapes_are_called_too(server: LocalServer) -> None:
    source = """
        import asyncio, multiprocessing

        class Unspeakable: pass
        def of_a_dict(config): return sorted(config)
        def of_nothing(): pass
        async def waiting(seconds):
            await asyncio.sleep(seconds)
            return "waited"
        def spawning(numbers):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                return pool.map(square, numbers)
        def square(number): return number ** 2
        def unspeakable(): return Unspeakable()
    """
    wanted: dict[str, tuple[Any, Any]] = {
        "of_a_dict": ({"b": 1, "a": 2}, ["a", "b"]),
        "of_nothing": ({}, None),
        "waiting": ({"seconds": 0}, "waited"),
        "spawning": ({"numbers": [2, 3]}, [4, 9]),
    }
    jobs = {name: submit(server, source, name, arguments=arguments) for name, (arguments, _) in wanted.items()}
    silent = submit(server, source, "unspeakable")
    for name, job_id in jobs.items():
        assert server.until(job_id)["status"] == "COMPLETED"
        assert result(server, job_id) == wanted[name][1]
    assert server.until(silent)["status"] == "COMPLETED"
    assert server.lines(silent) == [
        "what unspeakable returned is not kept, because JSON cannot hold it: Unspeakable is none of its types"
    ]
    assert server.ask("GET", f"/v1/jobs/{silent}/artifacts/output/result.json").status_code == 404


def test_function_that_cannot_take_its_arguments_says_so(server: LocalServer) -> None:
    failed = server.until(submit(server, "def train(a, b): pass", arguments={"a": 1, "c": 2}), "FAILED")
    said = "train(a, b) cannot be called with its arguments: missing a required argument: 'b'"
    assert said in failed["error_message"]


@pytest.mark.long  # test_backend_functions.py and the blackbox tests install, too
def test_packages_are_installed_once_and_layered_over_the_workers_own(server: LocalServer, index: ServedIndex) -> None:
    index.add("gamma", "1.0", requires=["delta>=2"])
    index.add("delta", "2.5")
    source = """
        import delta, gamma, httpx, os, shutil, sys, trainmaster

        def train():
            return [gamma.VERSION, delta.VERSION, sys.prefix, os.environ["VIRTUAL_ENV"], shutil.which("python")]
    """
    wanted: dict[str, Any] = {"packages": ["Gamma >= 1.0"], "index_urls": [index.url], "environment": NO_CACHE}
    index.open.clear()  # both find nothing installed
    first, second = (submit(server, source, **wanted) for _ in range(2))
    wait_for(index.asked.is_set, "an install")
    wait_for(
        lambda: any("waiting for it" in line for job in (first, second) for line in environment_log(server, job)),
        "the other one to wait",
    )
    index.open.set()
    assert {server.until(job)["status"] for job in (first, second)} == {"COMPLETED"}
    logs = [environment_log(server, job) for job in (first, second)]
    assert [sum("installed gamma 1.0" in log for log in logs), sum("installed delta 2.5" in log for log in logs)] == [
        1,
        1,
    ]
    assert not any("httpx" in line for log in logs for line in log)
    version, dependency, prefix, variable, python = result(server, first)
    assert (version, dependency, prefix, python) == ("1.0", "2.5", variable, f"{prefix}/bin/python")
    assert Path(prefix).is_relative_to(server.directory / "cache")
    assert result(server, second) == result(server, first)

    script = {"path": "main.py", "files": [{"path": "main.py", "sha256": server.upload_files(b"import gamma")}]}
    again = server.submit_workload("script", {**script, **wanted, "packages": ["gamma>=1.0"]})
    command = server.submit_workload("command", {"argv": ["python", "-c", "import gamma"], **wanted})
    for job_id in (again, command):
        assert server.until(job_id)["status"] == "COMPLETED"
        assert environment_log(server, job_id) == []
    without = server.until(server.submit("python3", "-c", "import gamma"), "FAILED")
    assert "No module named 'gamma'" in without["error_message"]


@pytest.mark.long
def test_install_outlives_the_server_and_is_made_anew_after_its_workers_death(
    server: LocalServer, index: ServedIndex
) -> None:
    index.add("zeta", "1.0")
    index.open.clear()
    job_id = submit(
        server,
        "import zeta\ndef train(): return zeta.VERSION",
        packages=["zeta"],
        index_urls=[index.url],
        environment=NO_CACHE,
        job={"scheduling_config": {"max_retries": 1}},
    )
    wait_for(index.asked.is_set, "the install")
    server.kill()
    server.start()
    kill_claimant(server.run_directory(job_id).claimant(0))
    index.open.set()
    job = server.until(job_id)
    assert (job["status"], job["attempt"]) == ("COMPLETED", 2)
    assert [attempt["reason"] for attempt in job["attempts"]] == ["WORKER_LOST", "SUCCEEDED"]
    assert "installed zeta 1.0" in environment_log(server, job_id)
    assert result(server, job_id) == "1.0"


@pytest.mark.long
def test_two_nodes_reduce_from_one_function(server: LocalServer) -> None:
    source = """
        import json, os

        def train(offset):
            import torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            total = torch.tensor([float(dist.get_rank() + offset)])
            dist.all_reduce(total)
            print(json.dumps({"node": os.environ["NODE_RANK"], "total": total.item()}))
            dist.destroy_process_group()
            return {"total": total, "world": int(os.environ["WORLD_SIZE"])}
    """
    gang = {"resource_config": {"gpu_count": 0, "node_count": 2}}
    job_id = submit(server, source, arguments={"offset": 1}, environment={"OMP_NUM_THREADS": "1"}, job=gang)
    assert server.until(job_id)["status"] == "COMPLETED"
    assert result(server, job_id) == {"total": [3.0], "world": 2}
    told = sorted(json_lines(server.lines(job_id)), key=lambda line: str(line["node"]))
    assert told == [{"node": "0", "total": 3.0}, {"node": "1", "total": 3.0}]


def test_what_only_containers_have_is_refused_where_none_run(server: LocalServer) -> None:
    function = {"kind": "function", "source": "def train(): pass", "name": "train"}
    for workload, field, remedy in (
        ({**function, "image": "example/image:1"}, "image", ", or leave image out"),
        ({**function, "volumes": [{"source": "data", "target": "/data"}]}, "volumes", ", or leave volumes out"),
        ({**function, "container": {"shm_mb": 64}}, "container", ", or leave container out"),
        ({"kind": "container", "image": "example/image:1"}, "image", ""),
    ):
        answer = server.ask("POST", "/v1/jobs", {"name": "n", "workload": workload, "backend": "local"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["details"][0]["field"] == f"workload.{field}"
        assert error["message"] == (
            f"workload.{field}: the backend local runs no containers; this server has none that does{remedy}"
        )


def test_crash_of_python_itself_is_told_with_the_line_that_did_it(server: LocalServer) -> None:
    source = """
        def train():
            import ctypes
            ctypes.string_at(0)
    """
    error = server.until(submit(server, source))["error"]
    assert error["signal"] == "SIGSEGV"
    assert "Fatal Python error: Segmentation fault" in error["error_message"]
    assert "string_at" in error["frame"]
    assert any('trainmaster_function.py", line 4 in train' in line for line in error["last_lines"])
