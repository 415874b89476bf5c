"""What a user would write instead of a job: TRL's trainer in a script, as its documentation shows it.

    python by_hand.py '{"model": ..., "data": ..., "training_type": "LORA", "batch_size": 4, ...}' times.jsonl

Writes a line `{"step", "t"}` for each log.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer


class Times(TrainerCallback):
    """Notes when each log came."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", buffering=1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        if logs and "loss" in logs:
            self._file.write(json.dumps({"step": state.global_step, "t": time.time()}) + "\n")


def main(plan: dict[str, Any], times: Path) -> None:
    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(plan["model"], dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    arguments = SFTConfig(
        output_dir=str(times.with_suffix(".out")),
        per_device_train_batch_size=plan["batch_size"],
        max_length=plan["length"],
        packing=plan["packing"],
        max_steps=plan["steps"],
        learning_rate=1e-5,
        logging_steps=plan["logging_steps"],
        gradient_checkpointing=plan["gradient_checkpointing"],
        torch_compile=plan["compile"],
        bf16=cuda,
        use_cpu=not cuda,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=load_dataset("json", data_files=plan["data"], split="train"),
        processing_class=tokenizer,
        peft_config=lora if plan["training_type"] == "LORA" else None,
        callbacks=[Times(times)],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
