"""Container images: pulled according to the pull policy, and probed once for their Python."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from trainmaster.backends.base import LaunchError, NotYetError
from trainmaster.backends.container.container_spec import PROBE_PREFIX, PROBED_AT, RUNS, ImageFacts
from trainmaster.backends.container.engine import (
    ContainerEngine,
    ContainerEngineError,
    NoSuchCommandError,
    NoSuchImageError,
    TookTooLongError,
)
from trainmaster.backends.worker_package import OLDEST_PYTHON
from trainmaster.protocol.launch import PullPolicy
from trainmaster.protocol.reasons import Reason

_PROBE_MEMORY = 512 << 20
_PROBE_PIDS = 64
_PROBE_TIMEOUT_S = 60.0
_PROBE = "import json, sys; print(json.dumps([sys.executable, sys.version_info[:2]]))"
_PYTHON = "python3"
_NO_PYTHON = f"it has no {_PYTHON}"
_OLD_PYTHON = "it has Python"


class Images:
    """The images of an engine. Thread-safe."""

    def __init__(self, engine: ContainerEngine, runs: Path) -> None:
        """`runs`: where run directories lie; labels the containers of this server."""
        self._engine = engine
        self._runs = str(runs)
        self._pulls = Pulls(engine)
        self._lock = threading.Lock()
        self._probes: dict[str, Future[ImageFacts]] = {}
        """By image id, as a name may change its meaning. Uncertain results are not kept."""

    def facts(self, image: str, *, policy: str, attempt_id: str) -> ImageFacts:
        """The facts of an image, once it is here.

        Raises NotYetError while it is being pulled or probed, LaunchError if it is not available, and
        ContainerEngineError if the engine does not answer.
        """
        if policy == PullPolicy.ALWAYS:
            self._pulls.fetch(image, policy=policy, attempt_id=attempt_id)
        try:
            return self._probed(image, self._engine.find_image(image))
        except NoSuchImageError:
            if policy == PullPolicy.NEVER:
                raise LaunchError(
                    f"there is no image {image} on this machine, and the pull policy is Never. "
                    f"{remedy(image, self._engine.name)}, or use the pull policy IfNotPresent",
                    Reason.LAUNCH_REFUSED,
                ) from None
        self._pulls.fetch(image, policy=policy, attempt_id=attempt_id)
        try:
            return self._probed(image, self._engine.find_image(image))
        except NoSuchImageError:
            raise ContainerEngineError(f"image {image} was fetched, and somebody has removed it since") from None

    def _probed(self, image: str, document: Mapping[str, Any]) -> ImageFacts:
        image_id = str(document["Id"])
        with self._lock:
            probe = self._probes.get(image_id)
            if probe is None:
                probe = self._probes[image_id] = Future()
                name = f"probe {image_id[:19]}"
                threading.Thread(target=self._probe, args=(probe, document), name=name, daemon=True).start()
        if not probe.done():
            raise NotYetError(f"looking into {image}", probe)
        facts = None if probe.exception() is not None else probe.result()
        certain = facts is not None and (facts.python is not None or facts.lacks.startswith((_NO_PYTHON, _OLD_PYTHON)))
        if not certain:
            with self._lock:
                self._probes.pop(image_id, None)  # a Python that fails may work the next time
        return probe.result()

    def _probe(self, probe: Future[ImageFacts], document: Mapping[str, Any]) -> None:
        try:
            facts = self._looked_into(document)
        except Exception as error:  # whoever waits for it shall know
            probe.set_exception(error)
        else:
            probe.set_result(facts)

    def _looked_into(self, document: Mapping[str, Any]) -> ImageFacts:
        """Run the image's Python once, to see its version."""
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex[:12]}"
        probe = {
            "Image": document["Id"],
            "Entrypoint": [_PYTHON],
            "Cmd": ["-c", _PROBE],
            "User": "0:0",
            "Labels": {RUNS: self._runs, PROBED_AT: str(time.time())},
            "HostConfig": {
                "NetworkMode": "none",
                "Memory": _PROBE_MEMORY,
                "PidsLimit": _PROBE_PIDS,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
            },
        }
        python, lacks = None, ""
        try:
            self._engine.create(name, probe)
            self._engine.start(name)
            code, said = self._engine.wait(name, _PROBE_TIMEOUT_S), self._engine.output(name)
        except NoSuchCommandError as error:
            lacks = _NO_PYTHON if "not found" in str(error) else f"its {_PYTHON} does not start: {error}"
        except TookTooLongError:
            lacks = f"its {_PYTHON} did not answer in {_PROBE_TIMEOUT_S:.0f} s"
        else:
            python, lacks = _python_of(said) if code == 0 else (None, f"its {_PYTHON} fails: {said}")
        finally:
            self._engine.remove(name)
        config = document.get("Config") or {}
        variables = dict(line.partition("=")[::2] for line in config.get("Env") or ())
        return ImageFacts(
            id=str(document["Id"]),
            environment=variables,
            entrypoint=tuple(config.get("Entrypoint") or ()),
            command=tuple(config.get("Cmd") or ()),
            working_directory=config.get("WorkingDir") or "/",
            python=python,
            lacks=lacks,
        )


def _python_of(said: str) -> tuple[str | None, str]:
    """The interpreter according to a probe's output; or None, and why. The image may have printed anything."""
    try:
        python, (major, minor) = json.loads(said.splitlines()[-1])
        if (int(major), int(minor)) >= OLDEST_PYTHON:
            return str(python), ""
    except (IndexError, TypeError, ValueError):
        return None, f"its {_PYTHON} does not answer as Python does"
    return None, f"{_OLD_PYTHON} {major}.{minor}"


_log = logging.getLogger(__name__)
_BACKOFF_S = 5.0
_BACKOFF_MAX_S = 120.0
_REMEMBERED = 256
_FETCHED = ("Already exists", "Download complete", "Pull complete")
"""The engines' words for a layer that is complete."""
_FINAL = (
    *("manifest unknown", "name unknown", "not found", "no matching manifest", "no image found in"),
    *("denied", "unauthorized", "authentication required", "no basic auth credentials", "forbidden"),
    *("invalid reference", "short-name", "unsupported"),
)
"""Signs of an error that a registry or an engine will repeat. All others may be transient."""
_BUILT_HERE = "localhost/"
"""Prefix of podman's names for images built on this machine: no registry has them."""


class Pulls:
    """The pulls of an engine: one thread pulls an image for all attempts that need it. Thread-safe.

    Callers do not block: while an image is being pulled they get the progress, and ask again. So a slow registry holds
    up no other job, and an attempt that gives up does not affect the others.
    """

    def __init__(self, engine: ContainerEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._under_way: dict[str, _Pull] = {}
        self._of_attempt: dict[tuple[str, str], _Pull] = {}
        """The pull that each attempt has waited for, so that it starts no second one."""
        self._failures: dict[str, int] = {}
        """Consecutive transient failures of an image."""

    def fetch(self, image: str, *, policy: str, attempt_id: str) -> None:
        """Make sure that an image was pulled once for an attempt; a pull under way counts, and is a NotYetError."""
        with self._lock:
            pull = self._of_attempt.get((attempt_id, image))
            if pull is None:
                pull = self._under_way.get(image) or self._begun(image)
                self._of_attempt[attempt_id, image] = pull
                done = [key for key, each in self._of_attempt.items() if each.done.done()]
                for key in done[: max(len(self._of_attempt) - _REMEMBERED, 0)]:
                    del self._of_attempt[key]
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
        # No pool: its threads would have to end before the server can.
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


class _Pull:
    def __init__(self, image: str) -> None:
        self.image = image
        self.error = ""
        """The engine's error message."""
        self.done: Future[None] = Future()
        self.refusal = ""
        """Why another try is useless."""
        self.problem = ""
        """Why it failed, if another try may help."""
        self._layers: dict[str, bool] = {}
        """Layer -> whether it is complete."""

    def take(self, line: Mapping[str, Any]) -> None:
        self.error = self.error or str(line.get("error") or "")
        # Docker sends the tag in the same field, with another status.
        layer, status = line.get("id"), str(line.get("status"))
        if layer and (layer in self._layers or status in (*_FETCHED, "Pulling fs layer")):
            self._layers = {**self._layers, layer: self._layers.get(layer, False) or status in _FETCHED}

    def progress(self) -> str:
        layers = self._layers.values()
        return f"pulling {self.image}" + (f": {sum(layers)} of {len(layers)} layers" if layers else "")


def remedy(image: str, engine: str) -> str:
    advice = f"Check its name, build it here (`{engine} build --tag {image} .`) or load it (`{engine} load`)"
    if image.startswith(_BUILT_HERE):
        return advice
    return f"{advice}; if its registry wants credentials, give them to the engine (`{engine} login`)"
