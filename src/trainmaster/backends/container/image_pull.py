"""Fetching images: each by one thread at a time, for every attempt that waits for it.

Nobody waits here. Who asks for an image that is on its way is told how far it is, and asks again; so a registry that is
slow holds up no other job, and whoever gives up takes nothing from the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.backends.container.engine import Engine
from trainmaster.protocol.reasons import Reason

__all__ = ["Pulls"]

_log = logging.getLogger(__name__)
_BACKOFF_S = 5.0
_BACKOFF_MAX_S = 120.0
_REMEMBERED = 256
_FETCHED = ("Already exists", "Download complete", "Pull complete")
"""What engines say of a layer that need not be waited for any more."""
_FINAL = (
    *("manifest unknown", "name unknown", "not found", "no matching manifest", "no image found in"),
    *("denied", "unauthorized", "authentication required", "no basic auth credentials", "forbidden"),
    *("invalid reference", "short-name", "unsupported"),
)
"""Signs of an answer that a registry, or the engine, will give again. All else may be better next time."""
_BUILT_HERE = "localhost/"
"""Begins the names that podman gives to what was built on this machine: no registry has them."""


class Pulls:
    """The pulls of an engine. For several threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._under_way: dict[str, _Pull] = {}
        self._of_attempt: dict[tuple[str, str], _Pull] = {}
        """Which pull of an image each attempt has waited for, so that it wants no second one."""
        self._failures: dict[str, int] = {}
        """Pulls of an image that failed in a row and may succeed yet."""

    def fetch(self, image: str, *, policy: str, attempt_id: str) -> None:
        """See that an image was fetched once for an attempt; one that is under way already will do.

        Raises:
            NotYetError: it is being fetched; ask again later.
            LaunchError: it cannot be had, or not now.
        """
        with self._lock:
            pull = self._of_attempt.get((attempt_id, image))
            if pull is None:
                pull = self._under_way.get(image) or self._begun(image)
                self._of_attempt[attempt_id, image] = pull
                self._forget()
            failures = self._failures.get(image, 0)
        if not pull.done.done():
            raise NotYetError(pull.progress(), pull.done)
        if pull.refusal:
            raise LaunchError(
                f"image {image} cannot be fetched (pull policy {policy}): {pull.refusal}. "
                f"{remedy(image, self._engine.name)}",
                Reason.LAUNCH_REFUSED,
            )
        if pull.problem:
            wait_s = min(_BACKOFF_S * 2 ** min(max(failures - 1, 0), 10), _BACKOFF_MAX_S)
            raise LaunchError(
                f"image {image} could not be fetched from its registry yet: {pull.problem}", again_in_s=wait_s
            )

    def _begun(self, image: str) -> _Pull:
        pull = self._under_way[image] = _Pull(image)
        _log.info("fetching %s", image)
        # Not of a pool, whose threads would have to end before the server can.
        threading.Thread(target=self._run, args=(pull,), name=f"pull {image}", daemon=True).start()
        return pull

    def _run(self, pull: _Pull) -> None:
        problem: Exception | None = None
        try:
            for line in self._engine.pull(pull.image):
                pull.take(line)
        except Exception as error:  # whatever it is, somebody waits for this to end
            problem = error
        with self._lock:
            self._end(pull, problem)
        pull.done.set_result(None)  # which calls whoever waits for it

    def _end(self, pull: _Pull, error: Exception | None) -> None:
        said = pull.error or (str(error) or repr(error) if error else "")
        if pull.error and (pull.image.startswith(_BUILT_HERE) or any(sign in said.lower() for sign in _FINAL)):
            pull.refusal = said
        elif said:
            pull.problem = said
            self._failures[pull.image] = self._failures.get(pull.image, 0) + 1
        if not pull.problem:
            self._failures.pop(pull.image, None)
        del self._under_way[pull.image]
        _log.info("%s: %s", pull.image, said or "fetched")

    def _forget(self) -> None:
        """Drop the oldest of the attempts that have nothing more to wait for."""
        done = [key for key, pull in self._of_attempt.items() if pull.done.done()]
        for key in done[: max(len(self._of_attempt) - _REMEMBERED, 0)]:
            del self._of_attempt[key]


class _Pull:
    """One pull, and what the engine has said of it."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.error = ""
        """What went wrong, in the engine's words."""
        self.done: Future[None] = Future()
        self.refusal = ""
        """Why nobody need try again."""
        self.problem = ""
        """Why it failed, if another try may help."""
        self._layers: dict[str, bool] = {}
        """Whether each was fetched."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in what the engine says."""
        self.error = self.error or str(line.get("error") or "")
        # Docker names the tag in the same place, with a status of its own.
        layer, status = line.get("id"), str(line.get("status"))
        if layer and (layer in self._layers or status in (*_FETCHED, "Pulling fs layer")):
            self._layers = {**self._layers, layer: self._layers.get(layer, False) or status in _FETCHED}

    def progress(self) -> str:
        """How far it is."""
        layers = self._layers.values()
        return f"pulling {self.image}" + (f": {sum(layers)} of {len(layers)} layers" if layers else "")


def remedy(image: str, engine: str) -> str:
    """What to do about an image that cannot be had."""
    advice = f"Check its name, build it here (`{engine} build --tag {image} .`) or load it (`{engine} load`)"
    if image.startswith(_BUILT_HERE):
        return advice
    return f"{advice}; if its registry wants credentials, give them to the engine (`{engine} login`)"
