"""The preparing step of a job whose script is the user's own: `python -m trainmaster.training.fetching`."""

from __future__ import annotations

import os

from trainmaster.jobs import inputs
from trainmaster.training import steps
from trainmaster.training.data.config import DataConfig
from trainmaster.training.fetching import (
    Access,
    fetch_model,
    fetch_sources,
    fetch_tokenizer,
    left_to_the_script,
    tell_model,
)
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.steps import Progress


def main() -> None:
    """Fetch what the job names."""
    document = inputs.training()
    config = DataConfig.from_document(document)
    base_model = document["training_config"]["base_model"]
    access = Access.from_environ(os.environ)
    progress = Progress({"model": 0.6, "data": 0.4})
    progress.begin("model")
    model = None
    if not left_to_the_script(base_model):
        model = fetch_model(base_model, access, lambda share: progress.at(share, "fetching the model"))
        tell_model(base_model["model_id"], model, access)
    named = config.preprocess.tokenizer_id or base_model.get("tokenizer_id")
    tokenizer = fetch_tokenizer(base_model, named, access) if named else model
    progress.begin("data")
    sources = fetch_sources(config, access, progress)
    steps.leave(
        {
            "model_path": None if model is None else str(model),
            "tokenizer_path": None if tokenizer is None else str(tokenizer),
            "train_path": None,
            "eval_path": None,
            "sources": [source.to_json() for source in sources],
        }
    )
    Cache(access.cache).forget_unused()
    progress.finish()


if __name__ == "__main__":
    steps.run(main)
