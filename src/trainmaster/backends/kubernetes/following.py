"""Follows all objects of one kind: a list, and then a watch for as long as the API server keeps its history."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from trainmaster.backends.cluster.engine import EngineAwayError
from trainmaster.backends.kubernetes.connection import (
    OPENED,
    KubernetesConnection,
    KubernetesRefusedError,
    Object,
)

_log = logging.getLogger(__name__)

View = TypeVar("View")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 10.0


class Follower(Generic[View]):
    """Keeps a view of every object, by its uid. Its thread starts with the first call of `start`."""

    def __init__(
        self,
        connection: KubernetesConnection,
        name: str,
        where: Callable[[], tuple[str, Mapping[str, str]]],
        view: Callable[[Object], View | None],
        on_change: Callable[[View | None, View | None], None],
    ) -> None:
        """
        Args:
            where: The path of the list and its selectors, asked before each list.
            view: What to keep of an object; None: nothing.
            on_change: Called in the follower's thread with the old and the new view, None where there is none.
        """
        self._connection = connection
        self._where = where
        self._view = view
        self._on_change = on_change
        self._closed = threading.Event()
        self._listed = threading.Event()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"watch {name}", daemon=True)
        self._lock = threading.Lock()
        self.views: dict[str, View] = {}
        self.lists = 0
        """How many lists have been taken in."""

    def start(self) -> None:
        with self._lock:
            if self._thread.ident is None and not self._closed.is_set():
                self._thread.start()

    def require(self, timeout_s: float) -> None:
        """Wait for the first list. Raises EngineAwayError or KubernetesRefusedError while nothing is known of the
        present."""
        self.start()
        if not self._listed.wait(timeout_s) and self._problem is None:
            raise EngineAwayError("the API server has not listed everything yet")
        if self._problem is not None:
            raise self._problem

    @property
    def problem(self) -> Exception | None:
        return self._problem

    def close(self) -> None:
        self._closed.set()

    def snapshot(self) -> list[View]:
        with self._lock:
            return list(self.views.values())

    def _run(self) -> None:
        version, pause_s = "", _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                if not version:
                    version = self._list()
                for kind, obj in self._connection.watch(self._path, version, **self._selectors):
                    if kind == OPENED:
                        self._problem, pause_s = None, _FIRST_PAUSE_S
                        self._listed.set()
                        continue
                    version = str(obj["metadata"].get("resourceVersion") or version)
                    if kind != "BOOKMARK":
                        self._take(kind, obj)
                    if self._closed.is_set():
                        return
            except KubernetesRefusedError as error:
                if version and error.is_too_old:
                    version = ""
                    continue
                version = ""
                self._fail(error)
                pause_s = self._pause(pause_s)
            except EngineAwayError as error:
                self._fail(error)
                pause_s = self._pause(pause_s)
            except Exception as error:
                _log.exception("%s: an object cannot be read", self._thread.name)
                version = ""
                self._fail(EngineAwayError(f"{type(error).__name__}: {error}"))
                pause_s = self._pause(_LONGEST_PAUSE_S)

    def _fail(self, error: Exception) -> None:
        if not self._closed.is_set():
            self._problem = error
            self._listed.set()  # nobody waits for a list that does not come

    def _pause(self, pause_s: float) -> float:
        self._closed.wait(pause_s)
        return min(2 * pause_s, _LONGEST_PAUSE_S)

    def _list(self) -> str:
        self._path, self._selectors = self._where()
        found: dict[str, View] = {}
        version = ""
        for items, version in self._connection.pages(self._path, **self._selectors):  # noqa: B007 - the last one counts
            for obj in items:
                if (view := self._view(obj)) is not None:
                    found[obj["metadata"]["uid"]] = view
        with self._lock:
            before, self.views = self.views, found
            self.lists += 1
        for uid in before.keys() | found.keys():
            old, new = before.get(uid), found.get(uid)
            if old != new:
                self._on_change(old, new)
        return version

    def _take(self, kind: str, obj: Object) -> None:
        uid = obj["metadata"]["uid"]
        new = self._view(obj) if kind != "DELETED" else None
        last = self._view(obj) if kind == "DELETED" else None
        with self._lock:
            old = self.views.pop(uid, None)
            if new is not None:
                self.views[uid] = new
        if last is not None and last != old:
            # What an object was like in its last moment says how it ended.
            self._on_change(old, last)
            old = last
        if old != new:
            self._on_change(old, new)
