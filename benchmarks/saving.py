"""Checkpoints of a model with its optimizer: how long training stalls for one, and how fast it is back.

Training really goes on meanwhile. `python -m benchmarks.saving --device cuda` measures at the size that counts, and
needs nothing but PyTorch, NumPy and safetensors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Figure, Peer, Progress, WrongResultError, machine, table
from trainmaster.jobs.checkpoint_saver import Saver
from trainmaster.jobs.roots import open_root

SMALL = 10_000_000
LARGE = 1_700_000_000
"""Parameters, of four bytes each, beside twice as much for the moments of AdamW."""
READERS = 16
"""As many threads read the files plainly as restore them at most."""
RESTORED = "restored"
TARGET_STALL = 10.0
TARGET_RESTORE = 1.3
"""On a GPU only: where training itself needs the cores that copy, hash and write, a save cannot cost it nothing."""


def measure(directory: Path, progress: Progress) -> Sequence[Figure]:
    """At a size for any machine."""
    return run(directory, progress, device="cpu", parameters=SMALL, rounds=3)


def run(directory: Path, progress: Progress, *, device: str, parameters: int, rounds: int) -> list[Figure]:
    """Every figure, for one size on one device."""
    training = Training.of_size(parameters, device)
    root = directory / "saving"
    with Saver(open_root(root)) as saver:
        size, step_s = training.nbytes, training.step_time()
        progress(f"{size / 1e9:.2f} GB, a step takes {step_s * 1000:.1f} ms")
        prepared_s = _prepared(training, saver, step_s)
        progress(f"memory for copies: training lost {prepared_s:.2f} s, once")
        plain_s = _plainly(training, root / "plain", progress)
        synchronous = [_synchronously(training, saver, root, number) for number in range(rounds)]
        progress("synchronous: " + _told(synchronous))
        outcomes = [_while_training(training, saver, root, number, step_s) for number in range(rounds)]
        stalls, blocked, steps = zip(*outcomes, strict=True)
        progress(f"stalls: {_told(stalls)}; blocked: {_told(blocked)}; steps meanwhile: {steps}")
        saver.save(training.tree(), rel_path=RESTORED, step=0)
    figures = [
        _stall(size, device == "cuda", stalls, blocked, steps, synchronous, plain_s, prepared_s),
        *_restore(training, root, progress, rounds),
    ]
    shutil.rmtree(root)
    return figures


@dataclass
class Training:
    """A stack of layers, its optimizer and its input."""

    torch: Any
    model: Any
    optimizer: Any
    inputs: Any
    device: str

    @staticmethod
    def of_size(parameters: int, device: str) -> Training:
        import torch

        if device == "cpu":
            # A core for everything else: the threads of a step wait for the slowest of them.
            torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
        width = 2048 if parameters > 100_000_000 else 512
        layers = round(parameters / (width * (width + 1)))
        torch.manual_seed(0)
        with torch.device(device):
            model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
            inputs = torch.randn(4096 if device == "cuda" else 64, width)
        torch.backends.cuda.matmul.allow_tf32 = True
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        training = Training(torch, model, optimizer, inputs, device)
        training.step()
        return training

    @property
    def nbytes(self) -> int:
        return 3 * sum(int(parameter.nbytes) for parameter in self.model.parameters())

    def step(self) -> None:
        """One, to its end."""
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.settle()

    def settle(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def step_time(self) -> float:
        """The median of as many steps as two seconds have, at least five."""
        times: list[float] = []
        while len(times) < 5 or sum(times) < 2.0:
            times.append(_timed(self.step))
        return statistics.median(times)

    def tree(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _prepared(training: Training, saver: Saver, step_s: float) -> float:
    """What training loses, once, while the memory for copies is got in the background."""
    began = time.perf_counter()
    saver.prepare(training.tree())
    steps = 0
    while saver.busy:
        training.step()
        steps += 1
    return time.perf_counter() - began - steps * step_s


def _plainly(training: Training, directory: Path, progress: Progress) -> float:
    """What one would do by hand: one file by the package of the format, flushed."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    path = directory / "model.safetensors"

    def save() -> None:
        save_file({str(index): tensor for index, tensor in enumerate(_tensors(training.tree()))}, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    took_s = _timed(save)
    progress(f"save_file and a flush: {took_s:.2f} s, without a digest")
    shutil.rmtree(directory)
    return took_s


def _synchronously(training: Training, saver: Saver, root: Path, number: int) -> float:
    def save() -> None:
        saver.save(training.tree(), rel_path=f"synchronous-{number}", step=number)
        saver.wait()

    took_s = _timed(save)
    shutil.rmtree(root / f"synchronous-{number}")
    return took_s


def _while_training(
    training: Training, saver: Saver, root: Path, number: int, step_s: float
) -> tuple[float, float, int]:
    """What a save costs training until it is committed, what of it `save` itself takes, and the steps meanwhile."""
    began = time.perf_counter()
    saver.save(training.tree(), rel_path=f"asynchronous-{number}", step=number)
    blocked_s = time.perf_counter() - began
    steps = 0
    while saver.busy:
        training.step()
        steps += 1
    stalled_s = time.perf_counter() - began - steps * step_s
    saver.wait()
    shutil.rmtree(root / f"asynchronous-{number}")
    return stalled_s, blocked_s, steps


def _restore(training: Training, root: Path, progress: Progress, rounds: int) -> list[Figure]:
    """Against reading the very files into memory, when they are in the page cache and when they are not."""
    files = [path for path in sorted((root / RESTORED).rglob("*")) if path.is_file()]
    figures = []
    for cached in (True, False):
        read, scanned, restored = [], [], []
        for _ in range(rounds):
            _cache(files, keep=cached)
            read.append(_timed(lambda: _read(files)))
            _cache(files, keep=cached)
            scanned.append(_timed(lambda: _scan(files)))
            _cache(files, keep=cached)
            restored.append(_restored(training, root))
        ours, plain = statistics.median(restored), statistics.median(read)
        state = "cached" if cached else "not cached"
        progress(f"restored, {state}: {_told(restored)}; files read: {_told(read)}; scanned: {_told(scanned)}")
        figures.append(
            Figure(
                name=f"restore over reading the files, {state}",
                measured=ours / plain,
                unit="x",
                target=TARGET_RESTORE if training.device == "cuda" else None,
                note=f"{ours:.2f} s, digests compared; {plain:.2f} s into memory in {READERS} threads, "
                f"{statistics.median(scanned):.2f} s when nothing of it is kept",
            )
        )
    return figures


def _restored(training: Training, root: Path) -> float:
    """The time it takes, with a saver that has no memory yet, as after a restart."""
    with Saver(open_root(root)) as saver:
        template = training.tree()
        began = time.perf_counter()
        tree = saver.load(RESTORED, template).tree
        training.settle()
        took_s = time.perf_counter() - began
    pairs = zip(_tensors(tree), _tensors(template), strict=True)
    if not all(left.device == right.device and bool((left == right).all()) for left, right in pairs):
        raise WrongResultError("what was restored is not what was saved")
    return took_s


def _stall(
    size: int,
    on_gpu: bool,
    stalls: Sequence[float],
    blocked: Sequence[float],
    steps: Sequence[int],
    synchronous: Sequence[float],
    plain_s: float,
    prepared_s: float,
) -> Figure:
    whole_s, stall_s = statistics.median(synchronous), statistics.median(stalls)
    return Figure(
        name=f"stall of a save, {size / 1e9:.1f} GB",
        measured=100 * stall_s / whole_s,
        unit="%",
        target=TARGET_STALL if on_gpu else None,
        peer=Peer(name="safetensors' save_file", value=100 * plain_s / whole_s, ours=100 * stall_s / whole_s),
        note=(
            f"of {whole_s:.2f} s, synchronous; {stall_s:.2f} s lost over {statistics.median(steps):.0f} steps, "
            f"{statistics.median(blocked):.2f} s of it in save(); before the first, {prepared_s:.2f} s once"
        ),
    )


def _tensors(tree: Any) -> list[Any]:
    state = tree["optimizer"]["state"]
    return [*tree["model"].values(), *(value for index in state for value in state[index].values())]


def _read(files: Sequence[Path]) -> None:
    """Every file into memory, all at the same time."""
    with ThreadPoolExecutor(max_workers=READERS) as executor:
        list(executor.map(Path.read_bytes, files))


def _scan(files: Sequence[Path]) -> None:
    """Every file, into the same few megabytes: what no restore can do, and the least that reading takes."""

    def scan(path: Path) -> None:
        piece = bytearray(4 << 20)
        with open(path, "rb", buffering=0) as file:
            while file.readinto(piece):
                pass

    with ThreadPoolExecutor(max_workers=READERS) as executor:
        list(executor.map(scan, files))


def _cache(files: Sequence[Path], *, keep: bool) -> None:
    if keep:
        return _read(files)
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return None


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _told(times: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f} s" for each in times)


def main() -> None:
    """By itself, at any size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parameters", type=float, help="by default 1.7 billion on a GPU, 10 million on the CPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that counts")
    options = parser.parse_args()
    parameters = int(options.parameters or (LARGE if options.device == "cuda" else SMALL))
    print(", ".join(f"{name} {value}" for name, value in machine(options.directory).items()), flush=True)
    began = time.monotonic()

    def progress(message: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {message}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(dir=options.directory, prefix="bench-") as directory:
        device, rounds = options.device, options.rounds
        print(table(run(Path(directory), progress, device=device, parameters=parameters, rounds=rounds)))


if __name__ == "__main__":
    main()
