"""A way to a server on which the chunks of a batch overtake each other."""

from __future__ import annotations

import json
import threading

import httpx
from lossy_proxy import LossyProxy

from patience import PATIENCE_S


class ReorderingProxy(LossyProxy):
    """Loses nothing, and turns the first `chunks` passes of a model round: the last one reaches the server first.

    Each is held back until the server has acknowledged the one after it.
    """

    def __init__(self, target: str, *, chunks: int) -> None:
        super().__init__(target)
        self.order: list[int] = []
        """The numbers of the passes as the server saw them."""
        self._chunks = chunks
        self._acknowledged: set[int] = set()
        self._turn = threading.Condition()

    def loses(self, path: str) -> bool:
        return False

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        if not path.endswith("/forward_backward"):
            return super().pass_on(method, path, headers, body)
        number = json.loads(body)["seq_id"]
        with self._turn:
            self._turn.wait_for(lambda: number >= self._chunks or number + 1 in self._acknowledged, PATIENCE_S)
            self.order.append(number)
        answer = super().pass_on(method, path, headers, body)
        with self._turn:
            self._acknowledged.add(number)
            self._turn.notify_all()
        return answer
