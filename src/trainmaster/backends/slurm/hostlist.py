"""Slurm's lists of hosts: `gpu[01-03,7],login` is short for gpu01, gpu02, gpu03, gpu7 and login."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_PART = re.compile(r"\[([^\]]*)\]|([^\[\],]+)")


def expanded(hosts: str) -> tuple[str, ...]:
    """The hosts of a list, in its order.

    >>> expanded("n[1-2],gpu[08-10,3]-ib,login")
    ('n1', 'n2', 'gpu08-ib', 'gpu09-ib', 'gpu10-ib', 'gpu3-ib', 'login')
    >>> expanded("r[0-1]n[1-2]")
    ('r0n1', 'r0n2', 'r1n1', 'r1n2')
    """
    return tuple(itertools.chain.from_iterable(_hosts(word) for word in split_outside(hosts, "[]")))


def split_outside(text: str, brackets: str) -> Iterator[str]:
    """The parts of a list with commas, without those inside of brackets.

    >>> list(split_outside("gpu:h100:4(S:0,2),shard:8", "()"))
    ['gpu:h100:4(S:0,2)', 'shard:8']
    """
    opening, closing = brackets[0], brackets[1]
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += (character == opening) - (character == closing)
        if character == "," and depth == 0:
            yield from filter(None, (text[start:place].strip(),))
            start = place + 1
    yield from filter(None, (text[start:].strip(),))


def _hosts(word: str) -> Iterator[str]:
    choices = [tuple(_numbers(part[1])) if part[1] is not None else (part[2],) for part in _PART.finditer(word)]
    return map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for each in ranges.split(","):
        first, _, last = each.partition("-")
        if last:
            yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        else:
            yield first
