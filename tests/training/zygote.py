"""A warm process from which ranks of trainers are forked: importing torch and TRL takes seconds, a fork none.

Reads one JSON object a line from stdin: `{"start": {variables}, "stdout": path}` answers with a pid, `{"wait": pid}`
with its exit status. It stays single-threaded, so that a fork is a clean copy.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from trainmaster.jobs.attempt import LOOK_EVERY_S

WARM = (
    "trl",
    "peft.utils.transformers_weight_conversion",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "trainmaster.jobs.trees.numpy_arrays",
    "trainmaster.jobs.trees.torch_tensors",
    "trainmaster.training.__main__",
    "trainmaster.training.run",
    "trainmaster.training.dpo",
    "trainmaster.training.sft",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What every training, or many, would import."""


def main() -> None:
    gc.disable()
    import datasets
    import transformers.conversion_mapping

    for name in WARM:
        importlib.import_module(name)
    transformers.conversion_mapping.get_checkpoint_conversion_mapping("qwen3")  # hundreds of patterns are compiled once
    gc.enable()
    gc.freeze()  # what a child's collector does not look at is not copied
    datasets.disable_progress_bars()
    assert threads() <= {"jemalloc_bg_thd"}, "such a thread would not survive the fork"
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
        else:
            print(json.dumps(start(request)), flush=True)


def threads() -> set[str]:
    """Names of all threads but the main one. That of jemalloc knows what a fork is."""
    others = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in others}


def start(request: dict) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["start"])
        code = run(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(request: dict) -> int:
    import torch

    torch.set_num_threads(1)
    from trainmaster.jobs import report

    # The reporter of this process was made from the zygote's environment.
    importlib.reload(report)
    if (hook := request.get("hook")) is not None:
        interrupt_at(**hook)
    module, _, function = request.get("call", "trainmaster.training.__main__:main").partition(":")
    getattr(importlib.import_module(module), function)(*request.get("arguments", []))
    return 0


def interrupt_at(step: int, control: dict | None, during: str) -> None:
    """Have the loop interrupted at a step: by a control file that is there from then on, or by a kill."""
    import transformers.trainer

    from trainmaster.training.loop.trainer import EngineTrainer

    class Interruption(transformers.TrainerCallback):
        done = False

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if during == "step" and state.global_step == step:
                self.interrupt()

        def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if during == "evaluation" and state.global_step >= step:
                self.interrupt()

        def interrupt(self) -> None:
            if control is None:
                while not list(Path(os.environ["TRAINMASTER_CHECKPOINT_DIR"]).glob("checkpoint-*/manifest.json")):
                    time.sleep(0.01)  # there shall be something to go on from
                os.kill(os.getpid(), signal.SIGKILL)
            elif not self.done:
                self.done = True
                path = Path(os.environ["TRAINMASTER_CONTROL_FILE"])
                draft = path.with_name(f"{path.name}.{os.getpid()}")
                draft.write_text(json.dumps(control))
                draft.rename(path)
                time.sleep(2 * LOOK_EVERY_S)  # so that the next look sees it

    transformers.trainer.DEFAULT_CALLBACKS.append(Interruption)
    interruption, end_step, evaluate = Interruption(), EngineTrainer._end_step, EngineTrainer._evaluate

    def ending_step(trainer: EngineTrainer, number: int) -> None:
        if during == "step" and number == step:
            interruption.interrupt()
        end_step(trainer, number)

    def evaluating(trainer: EngineTrainer, number: int) -> dict[str, float]:
        if during == "evaluation" and number >= step:
            interruption.interrupt()
        return evaluate(trainer, number)

    EngineTrainer._end_step, EngineTrainer._evaluate = ending_step, evaluating


if __name__ == "__main__":
    main()
