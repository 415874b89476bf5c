"""What `engine_tokens` measures, several cases to a process: `python -m benchmarks.engine_cases DOCUMENT OUTCOMES`.

The cases of a process share the loaded model, so that a run spends its time on measuring. An outcome is a line, written
as soon as it is known. After an unexpected error the process ends, as the device may be in any state: `engine_tokens`
starts another one for the rest.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks import engine_curves, engine_grpo_peers, engine_peers, engine_sampling, engine_training
from benchmarks.engine_work import NotAvailableError, Outcome, Setting

CASES: Mapping[str, Callable[..., Outcome]] = {
    each.__name__: each
    for each in (
        engine_training.make_checkpoint,
        engine_training.train_engine,
        engine_training.profile_training,
        engine_sampling.sample_engine,
        engine_sampling.first_tokens_engine,
        engine_sampling.first_token_after_step_engine,
        engine_sampling.agreement_engine,
        engine_sampling.grpo_engine,
        engine_sampling.profile_sampling,
        engine_curves.curve_engine,
        engine_curves.curve_peft,
        engine_peers.train_peft,
        engine_peers.sample_generate,
        engine_grpo_peers.grpo_generate,
        engine_grpo_peers.grpo_trl,
    )
}


def main(document: str, outcomes: Path) -> None:
    """Run cases in their order, and write what came of each."""
    asked = json.loads(document)
    setting = Setting(**asked["setting"])
    with outcomes.open("a", buffering=1) as file:
        for case in asked["cases"]:
            gc.collect()
            if setting.cuda:
                torch.cuda.empty_cache()
            try:
                found = CASES[case["program"]](setting, **case["options"])
            except NotAvailableError as error:
                file.write(json.dumps({"key": case["key"], "error": f"not available: {error}"}) + "\n")
                continue
            file.write(json.dumps({"key": case["key"], "outcome": dataclasses.asdict(found)}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
