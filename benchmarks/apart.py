"""Runs clients in processes of their own, so that they do not share an interpreter with what measures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], calls: Sequence[tuple[Any, ...]]) -> list[T]:
    """Call a function once for each tuple of arguments, each in a fresh process, all at the same time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=len(calls), mp_context=spawn) as pool:
        return list(pool.map(function, *zip(*calls, strict=True)))
