"""Checks before a launch: what the engine or the image cannot do, and what of the machine a job must not have."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trainmaster.backends import ContainerDefaults
from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.container_spec import ImageFacts
from trainmaster.backends.worker_package import OLDEST_PYTHON
from trainmaster.protocol.launch import Lifetime, VolumeMount
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def checked(
    request: AttemptRequest, image: str, facts: ImageFacts, defaults: ContainerDefaults, *, engine: str
) -> AttemptRequest:
    """The request with the real directories of its volumes; raises LaunchError if it cannot run here, or must not."""
    wanted, steps = request.launch.container.runtime, request.launch.steps
    if wanted and wanted != engine:
        raise _refused(f"the job wants {wanted}, and this server's engine is {engine}")
    if not (steps[-1].argv or steps[-1].args or facts.entrypoint or facts.command):
        raise _refused("the image has no command of its own: say what to run")
    if facts.python is None:
        _check_without_python(request, image, facts)
    volumes = tuple(checked_volume(volume, request, defaults) for volume in request.launch.volumes)
    return replace(request, launch=replace(request.launch, volumes=volumes))


def _check_without_python(request: AttemptRequest, image: str, facts: ImageFacts) -> None:
    """Refuse what a worker on the machine cannot do for a container, or must not."""
    launch = request.launch
    if launch.steps[-1].python or any(step.name == "environment" for step in launch.steps):
        needed = ".".join(map(str, OLDEST_PYTHON))
        raise _refused(f"image {image} has no usable Python: {facts.lacks}, and Python {needed} or newer is needed")
    if launch.lifetime is Lifetime.SERVICE and request.world_size > 1:
        raise _refused(f"image {image} has no Python, without which a service has one rank")
    if launch.blobs and launch.working_directory is not None:
        raise _refused(
            f"image {image} has no Python that would put files into {launch.working_directory} there: leave "
            "working_directory out, or mount them"
        )
    if request.confined and launch.blobs and len(request.nodes) > 1:
        # A rank that already runs could put a link where the worker of another node is about to write.
        raise _refused(f"image {image} has no Python that would put files into place on several nodes: mount them")
    if request.confined and any(step.image is None for step in launch.steps[:-1]):
        raise _refused(
            f"image {image} has no Python, so that its initializers would run on the machine itself, where jobs of "
            "this account must not: name images for them"
        )


def checked_volume(volume: VolumeMount, request: AttemptRequest, defaults: ContainerDefaults) -> VolumeMount:
    """A volume with its real directory, which is the one to mount: links may change.

    No job that must stay in containers may write to a directory of the machine: it could put a link in place of a
    directory below it that the next job names, after the check and before the engine mounts it.
    """
    if not os.path.isabs(volume.source):
        return volume
    path, said = Path(os.path.realpath(volume.source)), f"volume {volume.source}"
    if not _lies_below(path, defaults.data_roots):
        raise _refused(f"{said} lies outside the server's data roots")
    for private in (private.resolve() for private in defaults.private):
        if path.is_relative_to(private) or private.is_relative_to(path):
            raise _refused(f"{said}: the server keeps its own state there")
    if not os.path.isdir(path):
        raise _refused(f"{said}: there is no such directory on the server")
    is_set = _lies_below(path, defaults.set_data_roots)
    if request.confined and not is_set:
        raise _refused(f"{said} lies in no data root that the operator has set, and others are not for this account")
    if request.confined and (unsafe := _changeable_above(path)) is not None:
        raise _refused(
            f"{said}: users of the machine can write to {unsafe}, and could put another directory in its place; "
            f"mount {unsafe} itself, or have it closed to them"
        )
    if request.confined and not volume.read_only:
        raise _refused(
            f"{said} can only be read by jobs of this account: mount it read_only, and write to a volume with a name, "
            "or to the job's results"
        )
    if not volume.read_only and not is_set:
        raise _refused(
            f"{said} can only be read, as the operator has set no data root that holds it: mount it read_only, or "
            "start the server with --data-root"
        )
    return replace(volume, source=str(path))


def _changeable_above(path: Path) -> Path | None:
    """The first directory above a path in which somebody else than root or us could replace the next one, or None.

    The engine resolves the path again, as root.
    """
    for directory, inner in itertools.pairwise([*reversed(path.parents), path]):
        status = directory.stat()
        writable = bool(status.st_mode & _OTHERS_WRITE)
        if writable and status.st_mode & stat.S_ISVTX:  # where everybody can exchange what is their own
            writable = not _is_ours(inner.stat())
        if writable or not _is_ours(status):
            return directory
    return None


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _lies_below(path: Path, roots: Iterable[Path]) -> bool:
    return any(path.is_relative_to(root.resolve()) for root in roots)


def _refused(why: str) -> LaunchError:
    return LaunchError(why, Reason.LAUNCH_REFUSED)
