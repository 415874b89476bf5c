"""What a process that works on a table may take: asked of processes that take more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_S

TAKES = """
import sys
from trainmaster.training.tables.table_reader import limit

limit(None, sys.argv[1] or None)
import pyarrow as pa

if sys.argv[3] == "arrow":
    held = pa.allocate_buffer(int(sys.argv[2]) << 20)
else:
    held = bytearray(int(sys.argv[2]) << 20)
limit(None, None)
more = bytearray(1 << 30)
print("held")
"""

COUNTS = """
import os, sys
from trainmaster.training.tables.table_reader import limit

limit(sys.argv[1], None)
import pyarrow as pa
import pyarrow.parquet as pq

before = len(os.listdir("/proc/self/task"))
columns = {f"column {n}": list(range(50_000)) for n in range(8)}
pq.write_table(pa.table(columns), sys.argv[2], row_group_size=5_000)
assert pq.read_table(sys.argv[2]).num_rows == 50_000
print(pa.cpu_count(), pa.io_thread_count(), len(os.listdir("/proc/self/task")) - before)
"""


def said(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize("whose", ["arrow", "python"])
def test_memory_is_held(whose: str) -> None:
    exceeding = said(TAKES, "384Mi", "512", whose)
    assert exceeding.returncode == 1
    assert "MemoryError" in exceeding.stderr.splitlines()[-1]


@pytest.mark.long
def test_memory_below_the_limit_is_given() -> None:
    # And what one process was held to is not what the next one is.
    fitting = said(TAKES, "768Mi", "512", "arrow")
    assert fitting.stdout == "held\n", fitting.stderr


def test_threads_are_held(tmp_path: Path) -> None:
    for cpu, most in (("250m", 1), ("2500m", 3)):
        told = said(COUNTS, cpu, f"{tmp_path}/{cpu}.parquet")
        assert told.returncode == 0, told.stderr
        cores, readers, started = map(int, told.stdout.split())
        assert (cores, readers) == (most, most)
        assert 1 <= started <= 2 * most
