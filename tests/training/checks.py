"""What needs torch to be looked at; called in forked processes, and fails by raising."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def merged_like_adapter(base: str, adapter: str, merged: str) -> None:
    """The merged model says what the base model with the adapter says."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(merged)("the cat sat on a mat", return_tensors="pt").input_ids
    plain = _logits(AutoModelForCausalLM.from_pretrained(base), tokens)
    beside = _logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter), tokens)
    whole = _logits(AutoModelForCausalLM.from_pretrained(merged), tokens)
    torch.testing.assert_close(whole, beside, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(whole, plain, atol=1e-2), "the adapter does nothing"


def exported_like_checkpoint(exported: str, checkpoint: str) -> None:
    """The weights of an exported model are those of a checkpoint."""
    import torch
    from safetensors.torch import load_file

    ours = load_file(Path(exported) / "model.safetensors")
    theirs = _saved(Path(checkpoint))
    assert ours
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def nearly_same_weights(ours: str, theirs: str) -> None:
    """Two exported models differ by roundings."""
    import torch
    from safetensors.torch import load_file

    first, second = (load_file(Path(each) / "model.safetensors") for each in (ours, theirs))
    assert first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=1e-3, atol=2e-4, msg=name)


def same_names(exported: str, base: str) -> None:
    """Two models consist of the same weights, each once."""
    from safetensors import safe_open

    ours, theirs = (set(safe_open(Path(each) / "model.safetensors", "np").keys()) for each in (exported, base))
    assert ours == theirs


def checkpoint_holds(checkpoint: str, part: str) -> None:
    """All weights in a checkpoint have this in their names, and there are some."""
    names = _saved(Path(checkpoint))
    assert names
    assert all(part in name for name in names), names.keys()


def generates(model: str) -> None:
    """An exported model can be used by others."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer("the cat", return_tensors="pt").input_ids
    made = AutoModelForCausalLM.from_pretrained(model).generate(tokens, max_new_tokens=3)
    assert made.shape[1] > tokens.shape[1]
    assert tokenizer.chat_template


def rows_are_apart(tiny: str, scratch: str) -> None:
    """The loss of all rows is the same however they are put together: none sees another, or padding."""
    import pytest
    import tiny_model
    import torch

    from trainmaster.training.document import Document, Prepared
    from trainmaster.training.trl_trainer import build

    place = Path(scratch)
    (place / "prepared.json").write_text(json.dumps(tiny_model.prepared(Path(tiny))))
    losses = []
    for preprocess in ({}, {"padding": "max_length"}, {"padding": "none"}, {"packing": True}):
        document = tiny_model.document("SFT", data={"preprocess": preprocess})
        (place / "training.json").write_text(json.dumps(document))
        trainer = build(
            Document.read(place / "training.json"), Prepared.read(place / "prepared.json"), scratch=place, world_size=1
        )
        total = 0.0
        for batch in trainer.get_eval_dataloader(trainer.train_dataset):
            labels = batch.pop("labels")[:, 1:]
            with torch.no_grad():
                logits = trainer.model.eval()(**batch).logits[:, :-1]
            total += float(torch.nn.functional.cross_entropy(logits.mT, labels, reduction="sum"))
        losses.append(total)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5), losses


def tracked_once(project: str, steps: int) -> None:
    """The tracker has one run, with the loss of every step once."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs(project)
    found = [row["step"] for row in SQLiteStorage.get_logs(project, run) if "loss" in row]
    assert found == list(range(1, steps + 1)), found


def options_are_known() -> None:
    """What jobs may set are arguments of TRL and of accelerate."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from trl import SFTConfig

    from trainmaster.server.core.training.options import DDP_OPTIONS, FSDP_OPTIONS, TRL_OPTIONS

    assert SFTConfig.__dataclass_fields__.keys() >= TRL_OPTIONS | DDP_OPTIONS
    known = set(FullyShardedDataParallelPlugin.__dataclass_fields__)
    renamed = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
    assert {renamed.get(name, name) for name in FSDP_OPTIONS} <= known, known


def _saved(checkpoint: Path) -> dict[str, Any]:
    from trainmaster.jobs import trees

    assert json.loads((checkpoint / "manifest.json").read_text())["kind"] == "trainer"
    return trees.read(checkpoint)["model"]


def _logits(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(tokens).logits


def train_preferences_by_trl(tiny: str, options: str, target: str) -> None:
    """What TRL's DPO trainer logs of the tiny pairs; tokens stay as they are."""
    from datasets import load_from_disk
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

    def answers(row: dict[str, Any]) -> dict[str, Any]:
        split = row["seq_lengths"][0]
        chosen, rejected = row["input_ids"][:split], row["input_ids"][split:]
        return {"prompt_ids": chosen[:1], "chosen_ids": chosen[1:], "rejected_ids": rejected[1:]}

    given = json.loads(Path(options).read_text())
    rows = load_from_disk(str(Path(tiny) / "train-pairs"))
    names = ("learning_rate", "max_steps", "max_grad_norm", "loss_type", "beta", "label_smoothing")
    arguments = DPOConfig(
        output_dir=target,
        per_device_train_batch_size=4,
        seed=7,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        lr_scheduler_type=given["lr_scheduler_type"],
        warmup_steps=0,
        max_length=None,
        remove_unused_columns=False,
        **{name: given[name] for name in names},
    )
    model = AutoModelForCausalLM.from_pretrained(str(Path(tiny) / "model"))
    lora = None
    if given["adapter"] == "lora":
        lora = LoraConfig(r=given["lora_r"], lora_alpha=int(given["lora_alpha"]), target_modules="all-linear")
    set_seed(7)
    trainer = Tokenized(
        model,
        args=arguments,
        train_dataset=rows.map(answers, remove_columns=rows.column_names),
        processing_class=AutoTokenizer.from_pretrained(str(Path(tiny) / "model")),
        peft_config=lora,
    )
    trainer.train()
    Path(target).mkdir(exist_ok=True)
    (Path(target) / "logs.json").write_text(json.dumps(trainer.state.log_history))
