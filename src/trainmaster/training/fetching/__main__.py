"""The preparing step of a CUSTOM script: `python -m trainmaster.training.fetching`."""

from __future__ import annotations

import os

from trainmaster.jobs import inputs
from trainmaster.training import steps
from trainmaster.training.document import TokenizationConfig, base_model_of
from trainmaster.training.fetching import fetch_named_model, fetch_named_tokenizer, fetch_sources
from trainmaster.training.fetching.access import Access
from trainmaster.training.fetching.cache import Cache
from trainmaster.training.fetching.models import left_to_the_script
from trainmaster.training.steps import PreparingProgress


def main() -> None:
    document = inputs.training()
    data, base_model = TokenizationConfig.from_document(document).data, base_model_of(document)
    access = Access.from_environ(os.environ)
    progress = PreparingProgress({"model": 0.6, "data": 0.4})
    progress.begin("model")
    model = None if left_to_the_script(base_model) else fetch_named_model(base_model, access, progress)
    tokenizer = fetch_named_tokenizer(data, base_model, access) or model
    progress.begin("data")
    sources = fetch_sources(data, access, progress)
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
