"""The engine's side of a service in this process, for a front whose settings a test chooses."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from running_service import BASE_MODEL

from patience import PATIENCE_S
from trainmaster.engine.engine import Engine
from trainmaster.engine.sampler import Sampler
from trainmaster.jobs.report import Reporter
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import StopCause
from trainmaster.trainer_service.channel import EngineChannel
from trainmaster.trainer_service.configuration import Configuration
from trainmaster.trainer_service.process import ServiceControl, TrainerService


class RealEngine:
    """A service on a tiny model, in a thread; stands where a `RunningFront` has its stub."""

    def __init__(self, channel: EngineChannel, tiny: Path, directory: Path) -> None:
        self.checkpoints = directory / "checkpoints"
        self._control = directory / "control.json"
        self._events = directory / "events"
        reporter = Reporter(
            {
                environment.CHECKPOINT_DIR: str(self.checkpoints),
                environment.CONTROL_FILE: str(self._control),
                environment.EVENTS_FILE: str(self._events),
            }
        )
        self.engine = Engine(tiny)
        self._channel = channel
        self._service = TrainerService(
            Configuration(base_model=BASE_MODEL, model_path=tiny, lora_rank=8),
            engine=self.engine,
            sampler=Sampler(self.engine.base, tiny),
            channel=channel,
            reporter=reporter,
            control=ServiceControl(reporter),
        )
        self._thread = threading.Thread(target=self._service.run, name="real-engine")

    def start(self, **_: Any) -> None:
        """Serve."""
        self._thread.start()

    def die(self) -> None:
        """Stop in order, and hang up."""
        self._control.write_text(
            json.dumps({"version": 1, "seq": 1, "stop": StopCause.CANCEL, "save": False, "grace_s": 5.0})
        )
        self._thread.join(PATIENCE_S)
        self._channel.close()

    def notes(self) -> list[str]:
        """What it remarked among the job's events."""
        events = map(json.loads, self._events.read_text().splitlines()) if self._events.exists() else ()
        return [event["message"] for event in events if event["type"] == "note"]

    def attributes(self, place: str) -> list[dict[str, Any]]:
        """What the checkpoints of a directory say of themselves, those that were committed."""
        manifests = sorted((self.checkpoints / place).glob("*/manifest.json"))
        return [json.loads(manifest.read_text())["attributes"] for manifest in manifests]
