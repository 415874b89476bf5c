"""The logprobs of answers by the model that a training begins with: computed once, and kept in the account's cache."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch

from trainmaster.training.fetching.cache import Cache
from trainmaster.training.loop.batches import ANY_ROW, Rows, evaluation_batches
from trainmaster.training.loop.engine_model import EngineModel
from trainmaster.training.loop.peers import Peers
from trainmaster.training.steps import say

KIND = "references"
_FILE = "logprobs.npy"


def reference_logprobs(
    model: EngineModel, rows: Rows, *, batch_size: int, peers: Peers, cache: Cache, key: str
) -> np.ndarray:
    """Float32 [rows, 2]. Every rank has all of them, and computes its share where a node's cache lacks them."""
    place = cache.root / KIND / key
    if peers.total(int(not place.exists())):
        if peers.index == 0:
            say(f"computing what the base model says of the answers in {len(rows):,} rows")
        found = _computed(model, rows, batch_size=batch_size, peers=peers)
        peers.first_on_node(lambda: cache.entry(KIND, key, lambda directory: np.save(directory / _FILE, found)))
    else:
        with contextlib.suppress(OSError):
            os.utime(place)  # what is not used for long is removed
    logprobs: np.ndarray = np.load(place / _FILE)
    return logprobs


def _computed(model: EngineModel, rows: Rows, *, batch_size: int, peers: Peers) -> np.ndarray:
    own = evaluation_batches(len(rows), batch_size, ranks=peers.count, rank=peers.index)
    rounds = -(-len(rows) // (batch_size * peers.count))
    found = torch.zeros(len(rows), 2, dtype=torch.float64, device=peers.device)
    for number in range(rounds):
        if number < len(own) or model.sharded:
            indices = own[number] if number < len(own) else ANY_ROW
            logprobs = model.reference_logprobs(rows.batch(indices).to(peers.device))
            if number < len(own):
                found[torch.from_numpy(indices).to(peers.device)] = logprobs.double()
    return peers.sum(found).float().cpu().numpy()
