"""Saving below a root, and damaging what lies there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from served_attempt import ServedAttempt
from trainmaster.jobs import objects
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.roots import Root

FILES = {"weights/0.bin": b"w" * 70_000, "weights/1.bin": b"v" * 10, "empty": b"", "state.json": b'{"step": 1}'}
SERVED: dict[str, ServedAttempt] = {}
"""By the address of a root at a server: the attempt whose files they are."""
_clock = itertools.count(1_800_000_000)


def manifest(step: int = 1, *, job_id: str = "job-1", attempt: int = 1) -> Manifest:
    return Manifest(
        checkpoint_id=f"{job_id}-{attempt}-{step}",
        job_id=job_id,
        attempt=attempt,
        step=step,
        epoch=0.5,
        metrics={"loss": 1.5},
        world_size=2,
        created_at=float(next(_clock)),
        kind="test",
        framework="numpy",
    )


def fill(directory: Path, files: Mapping[str, bytes] = FILES) -> None:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def save(
    root: Root,
    rel_path: str,
    files: Mapping[str, bytes] = FILES,
    *,
    step: int = 1,
    job_id: str = "job-1",
    attempt: int = 1,
    check_owner: Callable[[], None] = lambda: None,
    **options: object,
) -> Manifest:
    with root.draft(rel_path, job_id=job_id, attempt=attempt) as draft:
        fill(draft, files)
        made = manifest(step, job_id=job_id, attempt=attempt)
        return root.commit(draft, rel_path, made, check_owner=check_owner, **options)  # type: ignore[arg-type]


def everything(root: Root) -> list[str]:
    """All files that lie below a root, whatever they are."""
    if root.uri.startswith("s3://"):
        place = objects.open_place(root.uri)
        return sorted(meta["path"].removeprefix(f"{place.key}/") for meta in objects.listing(place, place.key))
    served = SERVED.get(root.uri)
    homes = [served.home, served.uploads] if served is not None else [Path(root.uri)]
    found = ((path, home) for home in homes for path in home.rglob("*"))
    return sorted(path.relative_to(home).as_posix() for path, home in found if path.is_file())


def overwrite(root: Root, path: str, data: bytes | None) -> None:
    """Damage a file below a root behind everybody's back; None removes it."""
    if root.uri.startswith("s3://"):
        place = objects.open_place(root.uri)
        if data is None:
            objects.delete(place, [place.below(path)])
        else:
            objects.put(place, place.below(path), data)
        return
    place = (SERVED[root.uri].home if root.uri in SERVED else Path(root.uri)) / path
    if data is None:
        place.unlink()
    else:
        place.write_bytes(data)
