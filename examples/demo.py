"""`make demo`: makes a small model, trains it on text, fine-tunes it with LoRA, and asks it before and after.

Everything is run by the command that you would use; the tiny model knows nothing at first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

COMMAND = Path(sys.executable).with_name("trainmaster")
HERE = Path(__file__).parent
QUESTIONS = HERE / "data" / "questions_held_out.jsonl"

NEXT = """
Now try, with `alias tm={tm}`:
  tm ps -a                      every job so far
  tm show {job}      all about one: attempts, checkpoints, results
  tm metrics {job}   its curves
  tm init                       a job file of your own: your model, your data
  tm submit examples/names.yaml a training script of your own, with checkpoints
  tm pause JOB; tm resume JOB   a running job goes on from its checkpoint
  kill -9 {pid}{pad}that is the server; then `tm ps`: nothing is lost
  tm down                       stop the server; running jobs run on
"""


def main() -> int:
    """Run the demonstration."""
    began = time.monotonic()
    _say("make a model of half a million random parameters")
    _run(sys.executable, str(HERE / "make_tiny_model.py"))
    _trainmaster("up")
    _say("continued pretraining: it learns who lives where, has which pet, and works as what")
    pretrained = _train("pretrain.yaml")
    _say("fine-tuning with LoRA: it learns to answer questions; the adapter is merged into the model at the end")
    # Named from the job file's place, as what lies there is sent along, wherever the server's state is.
    base = os.path.relpath(_model(pretrained), HERE)
    tuned = _train("lora.yaml", "--set", f"training_config.base_model.model_id={base}")
    _say("what it answers before and after the fine-tuning, asked in words that it was not trained on")
    _run(sys.executable, str(HERE / "ask.py"), str(QUESTIONS), str(_model(pretrained)), str(_model(tuned)))
    _trainmaster("ps", "-a")
    print(f"\nAll of it took {time.monotonic() - began:.0f} s.")
    pid = str(json.loads((_home() / "server.json").read_text())["pid"])
    print(NEXT.format(tm=_shown(), job=tuned, pid=pid, pad=" " * (22 - len(pid))))
    return 0


def _train(file: str, *options: str) -> str:
    """Submit a job, follow it to its end, and return its id."""
    _trainmaster("submit", str(HERE / file), *options, "--follow")
    found = subprocess.run([COMMAND, "ps", "-a", "--json"], check=True, stdout=subprocess.PIPE).stdout
    newest: str = json.loads(found)[0]["job_id"]
    return newest


def _model(job: str) -> Path:
    """Where the model of a job that was completed lies."""
    return _home() / "artifacts" / job / "output" / "model"


def _trainmaster(*arguments: str) -> None:
    print(f"\n$ trainmaster {' '.join(arguments)}", flush=True)
    _run(str(COMMAND), *arguments)


def _run(*argv: str) -> None:
    code = subprocess.run(argv, check=False).returncode
    if code != 0:
        sys.exit(code)


def _say(message: str) -> None:
    print(f"\n# {message}", flush=True)


def _home() -> Path:
    return Path(os.environ.get("TRAINMASTER_HOME") or Path.home() / ".trainmaster")


def _shown() -> Path:
    try:
        return COMMAND.relative_to(Path.cwd())
    except ValueError:
        return COMMAND


if __name__ == "__main__":
    sys.exit(main())
