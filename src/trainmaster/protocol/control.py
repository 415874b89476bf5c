"""What the server asks of a running attempt: the content of `control.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.protocol.reasons import StopCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A wish. It replaces the one before when its `seq` is higher; a stop is never taken back."""

    seq: int
    stop: StopCause | None = None
    save: bool = False
    """With a stop: save first. Without one: save at the next step and go on."""
    grace_s: float = 30.0
    """From now until the ranks are killed."""
    dump_stacks: bool = False
    """Make the ranks print their stacks (SIGUSR1 to ranks that registered for it; else where they are)."""

    def to_json(self) -> dict[str, Any]:
        """The plain form."""
        return {
            "seq": self.seq,
            "stop": self.stop,
            "save": self.save,
            "grace_s": self.grace_s,
            "dump_stacks": self.dump_stacks,
        }

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Control:
        """The control of a plain form."""
        stop = document.get("stop")
        return Control(
            seq=int(document["seq"]),
            stop=StopCause(stop) if stop else None,
            save=bool(document.get("save", False)),
            grace_s=float(document.get("grace_s", 30.0)),
            dump_stacks=bool(document.get("dump_stacks", False)),
        )
