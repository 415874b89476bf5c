"""One container of a pod: what is known of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from kubernetes_server.objects import Object, timestamp
from kubernetes_server.runtime.client import Exit


@dataclass(kw_only=True)
class ContainerRun:
    spec: Object
    is_initial: bool
    state: Object
    last_state: Object = field(default_factory=dict)
    restarts: int = 0
    ready: bool = False
    identity: str = ""
    """The runtime's name of the current process."""
    pid: int = 0
    exit: asyncio.Future[Exit] | None = None
    """Of the current process, while it runs."""

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def is_running(self) -> bool:
        return "running" in self.state

    @property
    def exit_code(self) -> int | None:
        ended = self.state.get("terminated")
        return ended["exitCode"] if ended else None

    def wait(self, reason: str, message: str = "") -> None:
        """It does not run yet, or not again."""
        if "terminated" in self.state:
            self.last_state = self.state
        self.state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}

    def run(self) -> None:
        self.state = {"running": {"startedAt": timestamp()}}

    def end(self, code: int, reason: str, message: str = "") -> None:
        started = (self.state.get("running") or {}).get("startedAt") or timestamp()
        ended = {
            "exitCode": code,
            "reason": reason,
            **({"message": message} if message else {}),
            "startedAt": started,
            "finishedAt": timestamp(),
            "containerID": f"test://{self.identity}",
        }
        self.state = {"terminated": ended}
        # Of containers that have ended, only the last one is kept.
        self.last_state = {}
        self.ready = False

    def vanish(self) -> None:
        """Its pod ends, and nobody knows of it: it has never been started, for instance."""
        text = "The container could not be located when the pod was terminated"
        unknown = {"exitCode": 137, "reason": "ContainerStatusUnknown", "message": text}
        self.state = {"terminated": {**unknown, "startedAt": None, "finishedAt": None}}
        self.last_state, self.ready = {}, False

    def status(self) -> Object:
        image = self.spec["image"]
        started = self.is_running and not self.is_initial
        return {
            "name": self.name,
            "state": self.state,
            "lastState": self.last_state,
            "ready": self.exit_code == 0 if self.is_initial else self.ready,
            "restartCount": self.restarts,
            "image": image,
            "imageID": f"test://{image}" if self.identity else "",
            **({"containerID": f"test://{self.identity}"} if self.identity else {}),
            "started": started,
        }


def last_lines(log: Path) -> str:
    """The end of a log, for a termination message."""
    if not log.exists():
        return ""
    lines = log.read_bytes().split(b"\n")[-81:]
    text = b"\n".join(line.split(b" ", 3)[3] for line in lines if line.count(b" ") >= 3)
    return text[-2048:].decode(errors="replace")
