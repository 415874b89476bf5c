"""The pages of prompts: requests whose prompts begin alike share those of the beginning, at once and one after another.

What has been computed stays until its pages are needed, the longest unused first. It is found by its tokens, and those
before them, within one snapshot of weights.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from trainmaster.engine.cache import BLOCK, AttentionKind, KeyValueCache, PageTable
from trainmaster.engine.continuations import PIECE, Generation
from trainmaster.engine.trained_model import WeightsSnapshot


@dataclass(slots=True, eq=False)
class _Part:
    """Consecutive tokens of prompts that begin alike."""

    key: bytes
    pages: np.ndarray
    """[blocks, strata]."""
    end: int
    writer: Generation | None
    """Whose prompt it is computed with; None: it has been computed."""
    users: int = 1

    @property
    def is_ready(self) -> bool:
        return self.writer is None or self.writer.seen >= self.end


class PromptPages:
    """Gives pages to prompts, and takes them back. Parts of `part` tokens are shared, a multiple of BLOCK.

    Layers with a window overwrite what they have, and so do those with a state: with such layers, nothing is shared.
    """

    def __init__(self, cache: KeyValueCache, part: int) -> None:
        self._cache = cache
        self._part = part
        self._shares = not cache.layout.strata[AttentionKind.SLIDING] and cache.states is None
        self._parts: dict[bytes, _Part] = {}
        self._unused: OrderedDict[bytes, _Part] = OrderedDict()
        """The longest unused first."""
        self._unused_pages = 0
        self._held: dict[Generation, list[_Part]] = {}
        self._snapshots: WeakKeyDictionary[WeightsSnapshot, int] = WeakKeyDictionary()
        self._numbers = itertools.count()

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return self._cache.free + self._unused_pages

    def most(self, generation: Generation) -> int:
        """The pages of a prompt that shares none."""
        layout = self._cache.layout
        return layout.pages(generation.prompt_blocks, layout.ring(PIECE))

    def needed(self, generation: Generation) -> int:
        """The pages of `free` that the prompt would take."""
        known = self._known(generation)
        return self.most(generation) - sum(part.pages.size for part in known if part.users)

    def free_up(self, pages: int) -> None:
        """Forget unused parts until the cache has so many pages."""
        while self._cache.free < pages and self._unused:
            _, part = self._unused.popitem(last=False)
            self._unused_pages -= part.pages.size
            del self._parts[part.key]
            self._cache.give_back_pages(part.pages)

    def take(self, generation: Generation) -> None:
        """Give a prompt its pages; another one's that are not computed yet are waited for."""
        held = self._known(generation)
        for part in held:
            part.users += 1
            if self._unused.pop(part.key, None):
                self._unused_pages -= part.pages.size
        shared = sum(len(part.pages) for part in held)
        blocks = generation.prompt_blocks - shared
        self.free_up(self._cache.layout.pages(blocks, self._cache.layout.ring(PIECE)))
        fresh = self._cache.take(shared, blocks, self._cache.layout.ring(PIECE))
        if held:
            full = np.concatenate([*(part.pages for part in held), fresh.tables[AttentionKind.FULL]])
            generation.room = PageTable(0, (full, fresh.tables[AttentionKind.SLIDING]))
        else:
            generation.room = fresh
        ready = next((index for index, part in enumerate(held) if not part.is_ready), len(held))
        generation.seen = ready * self._part
        generation.waits = ready < len(held)
        for key in self._keys(generation)[len(held) :]:
            end = (len(held) + 1) * self._part
            own = generation.room.pages(AttentionKind.FULL, (end - self._part) // BLOCK, end // BLOCK)
            self._parts[key] = _Part(key, own, end, generation)
            held.append(self._parts[key])
        self._held[generation] = held

    def settle(self, generation: Generation) -> None:
        """Let a prompt that waits go on, as far as others have computed what it shares, or left it."""
        if not generation.waits:
            return
        for part in self._held[generation]:
            if part.end <= generation.seen:
                continue
            if part.is_ready:
                generation.seen = part.end
            elif part.writer is not None and part.writer is not generation and part.writer.room is not None:
                return
            else:
                break
        generation.waits = False
        for part in self._held[generation]:
            if not part.is_ready and (part.writer is None or part.writer.room is None):
                part.writer = generation

    def give_back(self, generation: Generation) -> None:
        if generation.room is None:
            return
        held = self._held.pop(generation)
        shared = sum(len(part.pages) for part in held)
        # The last parts are of no use without those before: they are forgotten first.
        for part in reversed(held):
            part.users -= 1
            if part.is_ready:
                part.writer = None
            if part.users:
                continue  # whoever waits for one that is not computed goes on with it
            if part.is_ready:
                self._unused[part.key] = part
                self._unused_pages += part.pages.size
            else:
                del self._parts[part.key]
                self._cache.give_back_pages(part.pages)
        full, windowed = generation.room.tables
        self._cache.give_back_pages(full[shared:])
        self._cache.give_back_pages(windowed)
        self._cache.forget_state(generation.room)
        generation.room = None

    def _known(self, generation: Generation) -> list[_Part]:
        """The parts of a prompt that others have, from its beginning on."""
        parts = (self._parts.get(key) for key in self._keys(generation))
        return [part for part in itertools.takewhile(lambda part: part is not None, parts) if part is not None]

    def _keys(self, generation: Generation) -> list[bytes]:
        """What the parts of a prompt are found by. Its last token is in none: the logits after it are needed."""
        if generation.prefix_keys is None:
            generation.prefix_keys = []
            prompt, part = np.asarray(generation.request.prompt, dtype=np.int64), self._part
            whole = (len(prompt) - 1) // part if self._shares and not generation.scores_prompt else 0
            key = self._snapshots.setdefault(generation.snapshot, next(self._numbers)).to_bytes(8, "little")
            for index in range(whole):
                key = hashlib.sha256(key + prompt[index * part : (index + 1) * part].tobytes()).digest()
                generation.prefix_keys.append(key)
        return generation.prefix_keys
