"""`make demo`: a server, a job that trains, its end, and what to try next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("trainmaster")
HERE = Path(__file__).parent

NEXT = """
Now try, with `alias tm={tm}`:
  tm ps -a                      every job so far
  tm show JOB                   all about one: attempts, checkpoints, needs
  tm submit examples/names.yaml --set workload.args='["--steps","3000"]'
  tm logs -f JOB                follow it; Ctrl-C leaves it running
  tm pause JOB; tm resume JOB   it goes on from its checkpoint
  kill -9 {pid}{pad}that is the server; then `tm ps`: nothing is lost
  tm down                       stop the server; running jobs run on
"""


def main() -> int:
    """Run the demonstration."""
    for arguments in (["up"], ["submit", str(HERE / "names.yaml"), "--follow"], ["ps", "-a"]):
        print(f"\n$ trainmaster {' '.join(arguments)}", flush=True)
        code = subprocess.run([COMMAND, *arguments], check=False).returncode
        if code != 0:
            return code
    try:
        shown = COMMAND.relative_to(Path.cwd())
    except ValueError:
        shown = COMMAND
    home = Path(os.environ.get("TRAINMASTER_HOME") or Path.home() / ".trainmaster")
    pid = str(json.loads((home / "server.json").read_text())["pid"])
    print(NEXT.format(tm=shown, pid=pid, pad=" " * (22 - len(pid))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
