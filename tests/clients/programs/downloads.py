"""Weights that a client saves and downloads, by tinker-cookbook: what it finds on its own disk."""

import json
import sys
from pathlib import Path
from typing import Any

import tinker
from batches import batch
from scenarios import main
from tinker_cookbook import weights
from tinker_session import ADAM, new_trainer

BASE, OUTPUT = Path(sys.argv.pop(1)), Path(sys.argv.pop(1))


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
    return {"paths": paths, "left": [each.tinker_path for each in listed], "config": _config("training")}


def _config(kind: str) -> Any:
    return json.loads((OUTPUT / kind / "adapter_config.json").read_text())


main(downloads)
