"""What users of tinker-cookbook do: run a recipe and run it again, and download weights to their own disk."""

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import tinker
from batches import batch
from scenarios import main
from tinker_client import custom_loss
from tinker_cookbook import weights
from tinker_session import ADAM, new_trainer

BASE, OUTPUT = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))


def sl_loop() -> Any:
    """The rows that the recipe logs for its steps, and those of a second run, as if the first had died after three."""
    settings = {"batch_size": 8, "max_steps": 6, "save_every": 3, "learning_rate": 0.01, "lora_rank": 8}
    logs = OUTPUT / "sl"
    rows = _recipe("sl_loop", logs, **settings)
    checkpoints = logs / "checkpoints.jsonl"
    kept = [line for line in checkpoints.read_text().splitlines() if json.loads(line)["name"] != "final"]
    checkpoints.write_text("\n".join(kept) + "\n")
    (logs / "metrics.jsonl").unlink()
    return {"rows": rows, "resumed": _recipe("sl_loop", logs, **settings)}


def _recipe(name: str, logs: Path, **settings: object) -> list[Any]:
    """Run a recipe as `python -m` does."""
    words = [f"{key}={value}" for key, value in {"log_path": logs, **settings}.items()]
    before, sys.argv = sys.argv, [name, *words]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            runpy.run_module(f"tinker_cookbook.recipes.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def downloads() -> Any:
    service = tinker.ServiceClient()
    trainer = new_trainer(service)
    trainer.forward_backward(batch(tinker), "cross_entropy").result()
    trainer.optim_step(ADAM).result()
    paths = {
        "training": trainer.save_state("kept").result().path,
        "external": trainer.save_weights_external("out").result().path,
    }
    for kind, path in paths.items():
        weights.download(tinker_path=path, output_dir=str(OUTPUT / kind))
    weights.build_hf_model(
        base_model=str(BASE), adapter_path=str(OUTPUT / "external"), output_path=str(OUTPUT / "merged"), dtype="float32"
    )
    listed = tinker.RestClient().list_user_checkpoints().result().checkpoints
    return {
        "paths": paths,
        "left": [each.tinker_path for each in listed],
        "config": _config("training"),
        "tokenizers": [
            each.get_tokenizer().decode([4, 5]) for each in (trainer, trainer.save_weights_and_get_sampling_client())
        ],
    }


def _config(kind: str) -> Any:
    return json.loads((OUTPUT / kind / "adapter_config.json").read_text())


main(sl_loop, custom_loss, downloads)
