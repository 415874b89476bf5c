"""A job that writes as much as it can into every stream of its run directory, then waits for a gate.

python flooding_job.py KIND FLOODED GATE
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

kind, flooded, gate = sys.argv[1:]
events = Path(os.environ["TRAINMASTER_EVENTS_FILE"])
metrics = Path(os.environ["TRAINMASTER_METRICS_FILE"])
worker = events.with_name("worker.jsonl")
MEGABYTE = 1 << 20


def append(path: Path, *pieces: bytes) -> None:
    with open(path, "ab") as file:
        for piece in pieces:
            file.write(piece)


def checkpoints(count: int) -> Iterator[bytes]:
    home = os.environ["TRAINMASTER_CHECKPOINT_DIR"]
    for number in range(count):
        record = {"type": "checkpoint", "checkpoint_id": f"{number}", "step": number, "path": f"{home}/{number}"}
        yield json.dumps(record).encode() + b"\n"


match kind:
    case "notes":
        append(events, b'{"type":"note"}\n' * 1_000_000)
    case "checkpoints":
        append(events, *checkpoints(70_000))
    case "everything":
        phases = b'{"type":"phase","phase":"evaluating"}\n{"type":"phase","phase":"training"}\n'
        nonsense = b'\n{}\nnonsense\n[1]\n\xff\n{"type":"capable","save":1}\n{"type":"checkpoint"}\n{"type":"failed"}\n'
        append(events, phases * 50_000, nonsense * 50_000, b"x" * (8 * MEGABYTE) + b"\n", b"\n" * MEGABYTE)
    case "worker":
        append(worker, b'{"type":"note","message":"forged"}\n{"type":"stacks","stacks":{"0":"s"}}\n' * 100_000)
    case "metrics":
        append(metrics, b"{}\n" * MEGABYTE, b'{"step":1}\n' * MEGABYTE, b"x" * (2 * MEGABYTE) + b"\n", b'{"step":7}\n')
    case "logs":
        for _ in range(64):
            sys.stdout.write("x\n" * (MEGABYTE // 4))
        sys.stdout.flush()
Path(flooded).touch()
while not Path(gate).exists():
    time.sleep(0.05)
