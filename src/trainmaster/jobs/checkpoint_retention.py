"""Which checkpoints may go, so that a run does not fill the disk. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def to_remove(
    checkpoints: Sequence[str],
    *,
    limit: int | None,
    best: str | None = None,
    pinned: Collection[str] = (),
    in_flight: Collection[str] = (),
) -> list[str]:
    """The oldest of those that are more than `limit`; never one that somebody may still need.

    Args:
        checkpoints: those that are committed, the oldest first.
        limit: how many to keep beside those below; None or 0 for all.
        best: never goes, and does not count unless it is the newest.
        pinned: likewise.
        in_flight: likewise; being written or read right now.

    Returns:
        What to remove, the oldest first. The newest always stays: it is what a resume goes on from. So does the one
        before it while a save is in flight, since that may fail and the newest may turn out to be corrupt.
    """
    if not limit or limit < 0:
        return []
    apart = {*pinned, *in_flight, *({best} - {*checkpoints[-1:]})}
    counted = [name for name in checkpoints if name not in apart]
    needed = {*checkpoints[-1:], *(checkpoints[-2:] if in_flight else ())}
    return [name for name in counted[: max(0, len(counted) - limit)] if name not in needed]
