"""Images: fetched when they are to be, and asked once what they have."""

from __future__ import annotations

import json
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
    Engine,
    EngineError,
    NoSuchCommandError,
    NoSuchImageError,
    TookTooLongError,
)
from trainmaster.backends.container.image_pull import Pulls, remedy
from trainmaster.backends.container.worker_archive import OLDEST_PYTHON
from trainmaster.protocol.launch import PullPolicy
from trainmaster.protocol.reasons import Reason

__all__ = ["Images"]

_PROBE_MEMORY = 512 << 20
_PROBE_PIDS = 64
_PROBE_TIMEOUT_S = 60.0
_PROBE = "import json, sys; print(json.dumps([sys.executable, sys.version_info[:2]]))"
_PYTHON = "python3"
_NO_PYTHON = f"it has no {_PYTHON}"
_OLD_PYTHON = "it has Python"


class Images:
    """The images of an engine. For several threads."""

    def __init__(self, engine: Engine, runs: Path) -> None:
        """Take the engine, and the place of run directories by which containers are a server's."""
        self._engine = engine
        self._runs = str(runs)
        self._pulls = Pulls(engine)
        self._lock = threading.Lock()
        self._probes: dict[str, Future[ImageFacts]] = {}
        """By the image's id: what a name stands for may change. What may be otherwise next time is not kept."""

    def facts(self, image: str, *, policy: str, attempt_id: str) -> ImageFacts:
        """What an image has, once it is here.

        Raises:
            NotYetError: it is being fetched, or looked into; ask again later.
            LaunchError: it cannot be had.
            EngineError: the engine does not answer.
        """
        if policy == PullPolicy.ALWAYS:
            self._pulls.fetch(image, policy=policy, attempt_id=attempt_id)
        try:
            document = self._engine.find_image(image)
        except NoSuchImageError:
            if policy == PullPolicy.NEVER:
                raise LaunchError(
                    f"there is no image {image} on this machine, and the pull policy is Never. "
                    f"{remedy(image, self._engine.name)}, or use the pull policy IfNotPresent",
                    Reason.LAUNCH_REFUSED,
                ) from None
            self._pulls.fetch(image, policy=policy, attempt_id=attempt_id)
            document = self._found(image)
        return self._probed(image, document)

    def _found(self, image: str) -> Mapping[str, Any]:
        try:
            return self._engine.find_image(image)
        except NoSuchImageError:
            raise EngineError(f"image {image} was fetched, and somebody has removed it since") from None

    def _probed(self, image: str, document: Mapping[str, Any]) -> ImageFacts:
        """What is known of an image that is here; each is looked into once, in a thread of its own."""
        image_id = str(document["Id"])
        with self._lock:
            probe = self._probes.get(image_id)
            if probe is None:
                probe = self._probes[image_id] = Future()
                name = f"probe {image_id[:19]}"
                threading.Thread(target=self._probe, args=(probe, document), name=name, daemon=True).start()
        if not probe.done():
            raise NotYetError(f"looking into {image}", probe)
        if probe.exception() is not None or not _is_sure(probe.result()):
            with self._lock:
                self._probes.pop(image_id, None)  # for the next one to try again
        return probe.result()

    def _probe(self, probe: Future[ImageFacts], document: Mapping[str, Any]) -> None:
        try:
            facts = self._looked_into(document)
        except Exception as error:  # whoever waits for it shall know
            probe.set_exception(error)
        else:
            probe.set_result(facts)

    def _looked_into(self, document: Mapping[str, Any]) -> ImageFacts:
        """Run the image's Python once, to see which one it is."""
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
    """The interpreter that a probe told of; or None, and what is wrong with it. The image may have said anything."""
    try:
        python, (major, minor) = json.loads(said.splitlines()[-1])
        if (int(major), int(minor)) >= OLDEST_PYTHON:
            return str(python), ""
    except (IndexError, TypeError, ValueError):
        return None, f"its {_PYTHON} does not answer as Python does"
    return None, f"{_OLD_PYTHON} {major}.{minor}"


def _is_sure(facts: ImageFacts) -> bool:
    """Whether an image will be found to be the same the next time; a Python that fails may have failed for once."""
    return facts.python is not None or facts.lacks.startswith((_NO_PYTHON, _OLD_PYTHON))
