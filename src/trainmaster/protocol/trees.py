"""Removing a directory that others may still write to, however it looks inside."""

from __future__ import annotations

import contextlib
import os
import shutil


def remove_tree(path: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Remove a directory with all that is in it; links are removed, not followed. Nothing there is fine.

    `shutil.rmtree` gives up on directories that lie deeper in one another than Python can count: whoever may make
    directories could have them kept for ever, and whatever else is to be removed wait behind them.
    """
    while True:
        try:
            shutil.rmtree(path, ignore_errors=ignore_errors)
            return
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        except RecursionError:
            _flatten(path)


def _flatten(path: str | os.PathLike[str]) -> None:
    """Move what lies deep inside to the top, by descriptors: nobody can put another directory in the way."""
    with _opened(path) as top:
        deep = os.dup(top)
        depth = 0
        try:
            while (name := _directory_in(deep)) is not None:
                depth += 1
                if depth % _DEPTH == 0:
                    os.rename(name, f".deep-{os.urandom(8).hex()}", src_dir_fd=deep, dst_dir_fd=top)
                    return
                with contextlib.ExitStack() as stack:
                    inner = os.open(name, _OPEN, dir_fd=deep)
                    stack.callback(os.close, deep)
                deep = inner
        finally:
            os.close(deep)
