"""A job that counts: each number goes to its log, then to its metrics, then to a ledger that all jobs share.

The ledger is appended to line by line, so that the order of its lines is the order of what happened: whoever
started twice, or ran beside another attempt of the same job, can be seen there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from pathlib import Path

from trainmaster.jobs import report, verify


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ledger")
    parser.add_argument("numbers", type=int)
    parser.add_argument("--save-every", type=int, default=0, help="0: it cannot save at all")
    parser.add_argument("--gate", type=Path, help="a file that must exist before it goes on")
    parser.add_argument("--gate-at", type=int, default=1, help="the number after which it waits there")
    parser.add_argument("--stray", action="store_true", help="start something that wants to outlive it")
    wanted = parser.parse_args()
    ledger = os.open(wanted.ledger, os.O_WRONLY | os.O_APPEND)
    saves = wanted.save_every > 0

    def enter(what: str, number: int = 0) -> None:
        line = f"{what} {os.environ['TRAINMASTER_ATTEMPT_ID']} {report.rank()} {number} {os.getpid()}\n"
        os.write(ledger, line.encode())

    def save(number: int) -> None:
        with report.checkpoint(step=number) as directory:
            (directory / "number").write_text(str(number))

    if wanted.stray:
        subprocess.Popen(["sleep", "600"], start_new_session=True)
    resumed = report.resume_path()
    first = verify(resumed).step if resumed else 0
    enter("start", first)
    for number in range(first + 1, wanted.numbers + 1):
        print(f"line {number}", flush=True)
        report.metrics(step=number, number=number)
        enter("count", number)
        while wanted.gate and number >= wanted.gate_at and not wanted.gate.exists():
            if saves and report.stop_requested():
                break
            time.sleep(0.02)
        stop = report.stop_requested() if saves else None
        if saves and (number % wanted.save_every == 0 or (stop and stop.save)):
            save(number)
        if stop:
            enter("stop", number)
            report.exit_stopped()
    enter("end", wanted.numbers)


if __name__ == "__main__":
    main()
