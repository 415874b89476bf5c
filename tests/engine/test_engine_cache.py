"""Room for keys and values: how layers share it, and that those with a window keep no more than it reaches over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import make_checkpoint, random_tokens

from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.cache import BLOCK, AttentionKind, KeyValueCache, Layout, PageTable, blocks_for, pages_of
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.logprobs import target_logprobs
from trainmaster.engine.model import Transformer
from trainmaster.engine.sampler import Sampler
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError, SampleRequest, SampleResult

WINDOWS: dict[str, tuple[list[int | None], int, tuple[int, int]]] = {
    "no windows": ([None] * 5, 5, (1, 0)),
    "windows alone": ([64] * 5, 5, (0, 1)),
    "every second": ([64, None] * 13, 13, (1, 1)),
    "every sixth sees all": ([None if layer % 6 == 5 else 64 for layer in range(34)], 5, (1, 6)),
    "few windows": ([None] * 7 + [64] * 3, 3, (3, 1)),
    "windows beyond the context": ([5000, None] * 2, 4, (1, 0)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_layers_of_one_sight_share_strata_and_no_two_a_place(name: str) -> None:
    windows, depth, strata = WINDOWS[name]
    layout = Layout.of(windows, longest=4096)
    assert (layout.depth, layout.strata) == (depth, strata)
    assert len(set(layout.places)) == len(windows)
    for window, place in zip(windows, layout.places, strict=True):
        assert (place.kind is AttentionKind.SLIDING) == (window == 64)
        assert place.stratum < strata[place.kind]
        assert place.depth < depth


@given(pages=st.integers(0, 300), windows=st.sampled_from(sorted(WINDOWS)), tokens=st.sampled_from([1, 256]))
@example(pages=148, windows="every sixth sees all", tokens=256)
def test_as_many_blocks_fit_as_their_pages_do(pages: int, windows: str, tokens: int) -> None:
    layout = Layout.of(WINDOWS[windows][0], longest=4096)
    ring = layout.ring(tokens)
    blocks = layout.blocks(pages, ring)
    assert layout.pages(blocks, ring) <= pages
    if layout.strata[AttentionKind.FULL]:
        assert layout.pages(blocks + 1, ring) > pages


@pytest.mark.parametrize("window", [1, 16, 17, 40, 300])
@pytest.mark.parametrize("length", [1, 16, 300, 700])
def test_no_block_that_is_seen_is_written_over(window: int, length: int) -> None:
    layout = Layout.of([None, window], longest=1000)
    cache = KeyValueCache(layout, heads=1, width=2, pages=500, device=torch.device("cpu"), dtype=torch.float32)
    prompt = cache.take(0, blocks_for(length), layout.ring(256))
    samples = [cache.take(length // BLOCK, 10, layout.ring(1)) for _ in range(2)]
    written: dict[int, tuple[int, int]] = {}
    """By page, whose block it has: the prompt's, or a sample's, and which."""

    def advance(rooms: tuple[PageTable, ...], whose: int, start: int, end: int) -> None:
        for kind in AttentionKind:
            first = 0 if kind is AttentionKind.FULL else max(0, start - window + 1) // BLOCK
            for block in range(start // BLOCK, blocks_for(end)):
                for page in pages_of(rooms, kind, block, block + 1).ravel().tolist():
                    written[page] = (whose, block)
            for block in range(first, blocks_for(end)):
                for page in pages_of(rooms, kind, block, block + 1).ravel().tolist():
                    assert written[page] == (whose if block >= rooms[-1].first else 0, block)

    for start in range(0, length, 256):
        advance((prompt,), 0, start, min(start + 256, length))
    for position in range(length, (length // BLOCK + 10) * BLOCK):
        for whose, room in enumerate(samples, start=1):
            advance((prompt, room), whose, position, position + 1)
    for room in (prompt, *samples):
        cache.give_back(room)
    assert cache.free == 500
    with pytest.raises(ValueError, match="501 blocks was asked for, and 500 pages are free"):
        cache.take(0, 501, layout.ring(1))


def test_long_sequences_need_no_more_than_the_window_and_give_what_training_computes(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "gemma3_text", sliding_window=40, max_position_embeddings=2048)
    model = Transformer(ModelConfig.read(directory)).load(directory)
    prompt = tuple(random_tokens(1000).tolist())
    page_bytes = 2 * BLOCK * 2 * 16 * 4
    # The layer that sees all keeps 63 blocks of the prompt and 9 more of each sample; the two others keep 20 and 4.
    pages = 63 + 2 * 20 + 2 * (9 + 2 * 4)
    wanted = SampleRequest(request_id="it", prompt=prompt, num_samples=2, max_tokens=130, seed=1, stop_tokens=())
    sampler = Sampler(model, directory, cache_bytes=pages * page_bytes)
    for _ in range(2):  # the second time in the same pages
        sampler.submit(wanted, WeightsSnapshot(transformer=model))
        # Four pieces of the prompt, after which the first token is chosen: both samples at once.
        assert [sampler.step() for _ in range(132)] == [[]] * 132
        ((_, result),) = sampler.step()
        assert isinstance(result, SampleResult)
        for sequence in result.sequences:
            tokens = torch.tensor([*prompt, *sequence.tokens.tolist()])
            with torch.no_grad():
                hidden = model.hidden(tokens[:-1], torch.arange(1129), PackedAttention([1129]))
                truth = target_logprobs(hidden, tokens[1:], model.unembedding).numpy()[999:]
            assert np.abs(truth - sequence.logprobs).mean() < 1e-7
    longer = SampleRequest(request_id="longer", prompt=prompt, max_tokens=800)
    with pytest.raises(EngineError, match="needs room for 1800 tokens, and the sampler's memory holds 1552"):
        sampler.submit(longer, WeightsSnapshot(transformer=model))
