"""From `TrainerClient.train` to the first instruction of the user's function, against `python script.py`.

The function's first act is to write a line to a FIFO that is open here. The clock starts before the client is asked,
or before `Popen` is called, and stops when the line arrives. The environment with the function's package is warm: made
by a job before. Kubeflow's client, from an environment of its own, makes one for every job; its torch is a stub.
"""

from __future__ import annotations

import base64
import hashlib
import os
import select
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.report import Figure, Peer, Progress, WrongResultError
from benchmarks.server import environment, running_server
from trainmaster.trainer import CustomTrainer, ServerBackendConfig, TrainerClient

STARTS = 20
KUBEFLOW_STARTS = 3
TARGET_MS = 500.0
_TIMEOUT_S = 120.0
_KUBEFLOW = Path(__file__).parents[1] / ".venvs" / "kubeflow" / "bin" / "python"
_KUBEFLOW_PROGRAM = """\
import sys

from kubeflow.trainer import CustomTrainer, LocalProcessBackendConfig, TrainerClient


def begin(arguments):
    with open(arguments["fifo"], "w") as fifo:
        fifo.write("\\n")


client = TrainerClient(LocalProcessBackendConfig())
for _ in sys.stdin:
    name = client.train(
        runtime=client.get_runtime("torch-distributed"),
        trainer=CustomTrainer(
            func=begin, func_args={"fifo": sys.argv[1]}, packages_to_install=["torch"], pip_index_urls=[sys.argv[2]]
        ),
    )
    print(client.wait_for_job_status(name, status={"Complete", "Failed"}, polling_interval=1).status, flush=True)
"""


def begin(fifo: str) -> None:
    """The function that is trained."""
    with open(fifo, "w") as line:
        line.write("\n")


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """Milliseconds above `python script.py`, and above nothing against Kubeflow's local backend."""
    index = _index(directory / "index")
    clock = _Clock(directory / "begun")
    script = directory / "script.py"
    script.write_text(f"with open({str(clock.fifo)!r}, 'w') as line:\n    line.write('\\n')\n")
    with running_server(directory) as server:
        client = TrainerClient(ServerBackendConfig(url=f"http://{server.host}:{server.port}", api_key=server.key))
        trainer = CustomTrainer(
            func=begin, func_args={"fifo": str(clock.fifo)}, packages_to_install=["torchless"], pip_index_urls=[index]
        )

        def train() -> None:
            clock.name = client.train(trainer=trainer)

        progress("the first function, which waits for its environment")
        cold = clock.time(train)
        client.wait_for_job_status(clock.name)
        ours, scripts = [], []
        progress(f"{STARTS} functions, each after a script")
        for _ in range(STARTS):
            process: list[subprocess.Popen[bytes]] = []
            scripts.append(clock.time(lambda: process.append(subprocess.Popen([sys.executable, script]))))  # noqa: B023
            process[0].wait()
            ours.append(clock.time(train))
            client.wait_for_job_status(clock.name)
        client.close()
    script_ms, ours_ms = statistics.median(scripts), statistics.median(ours)
    figures = [
        Figure(
            name="a function's start, above python script.py",
            measured=ours_ms - script_ms,
            unit="ms",
            target=TARGET_MS,
            peer=Peer(name="python script.py", value=script_ms, ours=ours_ms),
            note=f"median of {STARTS}: {ours_ms:.0f} ms, the script {script_ms:.0f} ms; {cold:.0f} ms where the "
            "environment had to be made",
        )
    ]
    if _KUBEFLOW.exists():
        progress(f"{KUBEFLOW_STARTS} functions through kubeflow's local backend")
        theirs = statistics.median(_kubeflow(directory / "through_kubeflow.py", clock, index))
        figures.append(
            Figure(
                name="a function's start",
                measured=ours_ms,
                unit="ms",
                peer=Peer(name="kubeflow's local backend", value=theirs, ours=ours_ms),
                note=f"a package each; kubeflow: median of {KUBEFLOW_STARTS}",
            )
        )
    return figures


class _Clock:
    """Says how many milliseconds it takes from an act to the line that it leads to."""

    def __init__(self, fifo: Path) -> None:
        self.fifo = fifo
        self.name = ""
        """Of the job that was started last."""
        os.mkfifo(fifo)
        self._reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    def time(self, act: Callable[[], None]) -> float:
        began = time.perf_counter()
        act()
        if not select.select([self._reader], [], [], _TIMEOUT_S)[0]:
            raise WrongResultError(f"nothing began within {_TIMEOUT_S:.0f} s")
        took_ms = (time.perf_counter() - began) * 1000
        if os.read(self._reader, 64) != b"\n":
            raise WrongResultError("it began more than once")
        return took_ms


def _kubeflow(program: Path, clock: _Clock, index: str) -> list[float]:
    program.write_text(_KUBEFLOW_PROGRAM)  # it reads the function's source from there
    process = subprocess.Popen(
        [_KUBEFLOW, program, clock.fifo, index],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    write, read = process.stdin, process.stdout

    def train() -> None:
        write.write("train\n")
        write.flush()

    times = []
    try:
        for _ in range(KUBEFLOW_STARTS):
            times.append(clock.time(train))
            if (status := read.readline().strip()) != "Complete":
                raise WrongResultError(f"kubeflow's job ended as {status or 'nothing'}")
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
    return times


def _index(directory: Path) -> str:
    """An index with two packages that install in no time: one that is nothing, and a torch that only runs scripts."""
    torchrun = "import runpy\nimport sys\n\n\ndef main():\n    runpy.run_path(sys.argv[1], run_name='__main__')\n"
    _package(directory, "torchless", {"torchless.py": ""})
    entry = "[console_scripts]\ntorchrun = torch:main\n"
    _package(directory, "torch", {"torch.py": torchrun, "torch-9.0.dist-info/entry_points.txt": entry})
    return directory.as_uri()


def _package(index: Path, name: str, files: Mapping[str, str]) -> None:
    about = f"{name}-9.0.dist-info"
    files = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: benchmarks\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{about}/RECORD,,\n"
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    wheel = index / name / f"{name}-9.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{about}/RECORD": record}.items():
            archive.writestr(path, text)
    (wheel.parent / "index.html").write_text(f'<!DOCTYPE html><a href="{wheel.name}">{wheel.name}</a>\n')
