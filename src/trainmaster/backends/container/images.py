"""Images: fetched when they are to be, and asked once what they have."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.engine import Engine, EngineError, NoSuchCommandError, NoSuchImageError
from trainmaster.backends.container.packing import OLDEST_PYTHON
from trainmaster.backends.container.rendering import PROBE_PREFIX, PROBED_AT, RUNS, ImageFacts
from trainmaster.protocol.reasons import Reason

__all__ = ["Images", "StillPullingError"]

_log = logging.getLogger(__name__)
_PULL_PATIENCE_S = 0.5
"""How long a launch waits for an image; it is asked for again until it is there."""
_PROBE_MEMORY = 512 << 20
_PROBE_PIDS = 64
_PROBE_TIMEOUT_S = 60.0
_PROBE = "import json, sys; print(json.dumps([sys.executable, sys.version_info[:2]]))"
_PYTHON = "python3"


class StillPullingError(Exception):
    """An image is being fetched."""


class Images:
    """The images of an engine. For several threads."""

    def __init__(self, engine: Engine, runs: Path) -> None:
        """Take the engine, and the place of run directories by which containers are a server's."""
        self._engine = engine
        self._runs = str(runs)
        self._pulling = threading.Lock()
        self._pulls: dict[tuple[str, str], Future[None]] = {}
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="pull")
        self._probing = threading.Lock()
        self._facts: dict[str, ImageFacts] = {}

    def facts(self, image: str, *, policy: str, attempt_id: str) -> ImageFacts:
        """What an image has, once it is here.

        Raises:
            StillPullingError: it is being fetched; ask again later.
            LaunchError: there is none.
            EngineError: the engine does not answer.
        """
        if policy == "Always":
            self._pull(image, attempt_id)
        try:
            document = self._engine.find_image(image)
        except NoSuchImageError:
            if policy == "Never":
                raise LaunchError(
                    f"there is no image {image} on this machine, and the pull policy is Never", Reason.LAUNCH_REFUSED
                ) from None
            self._pull(image, attempt_id)
            document = self._engine.find_image(image)
        with self._probing:
            image_id = str(document["Id"])
            if image_id not in self._facts:
                self._facts[image_id] = self._looked_into(document)
            return self._facts[image_id]

    def close(self) -> None:
        """Wait for nothing any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _pull(self, image: str, attempt_id: str) -> None:
        """Fetch an image once for an attempt."""
        with self._pulling:
            pull = self._pulls.get((image, attempt_id))
            if pull is None:
                _log.info("%s: fetching %s", attempt_id, image)
                pull = self._pulls[image, attempt_id] = self._pool.submit(self._engine.pull, image)
                # Those that were waited for are remembered only to be done once.
                for key in [key for key, other in self._pulls.items() if other.done()][:-64]:
                    del self._pulls[key]
        try:
            pull.result(_PULL_PATIENCE_S)
        except TimeoutError:
            raise StillPullingError(image) from None
        except NoSuchImageError as error:
            raise LaunchError(f"image {image} cannot be fetched: {error}", Reason.LAUNCH_REFUSED) from error
        except EngineError as error:
            raise LaunchError(f"image {image} could not be fetched: {error}") from error

    def _looked_into(self, document: Mapping[str, Any]) -> ImageFacts:
        """Run the image's Python once, to see which one it is."""
        name = f"{PROBE_PREFIX}{uuid.uuid4().hex[:12]}"
        probe = {
            "Image": document["Id"],
            "Entrypoint": [_PYTHON],
            "Cmd": ["-c", _PROBE],
            "User": "0:0",
            "Labels": {RUNS: self._runs, PROBED_AT: str(time.time())},
            "HostConfig": {"NetworkMode": "none", "Memory": _PROBE_MEMORY, "PidsLimit": _PROBE_PIDS},
        }
        python, lacks = None, ""
        try:
            self._engine.create(name, probe)
            self._engine.start(name)
            code, said = self._engine.wait(name, _PROBE_TIMEOUT_S), self._engine.output(name)
        except NoSuchCommandError:
            lacks = f"it has no {_PYTHON}"
        else:
            python, lacks = _python_of(said) if code == 0 else (None, f"its {_PYTHON} fails: {said}")
        finally:
            self._engine.remove(name)
        config = document.get("Config") or {}
        variables = dict(line.partition("=")[::2] for line in config.get("Env") or ())
        command = (*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ()))
        return ImageFacts(
            id=str(document["Id"]),
            environment=variables,
            command=command,
            working_directory=config.get("WorkingDir") or "/",
            python=python,
            lacks=lacks,
        )


def _python_of(said: str) -> tuple[str | None, str]:
    """The interpreter that a probe told of; or None, and what is wrong with it. The image may have said anything."""
    try:
        python, (major, minor) = json.loads(said.splitlines()[-1])
        if (int(major), int(minor)) >= OLDEST_PYTHON:
            return str(python), ""
    except (IndexError, TypeError, ValueError):
        return None, f"its {_PYTHON} does not answer as Python does"
    return None, f"it has Python {major}.{minor}"
