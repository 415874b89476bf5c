"""All objects, their history, and who is told of a change."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kubernetes_server.objects import Key, Object, key_of, owners_of
from kubernetes_server.resources import StoreKey

HISTORY = 20_000
"""How many changes of one resource a watch can go back."""


class Record:
    """One version of an object. Nobody changes a stored object: a change replaces it, so that it can be shared."""

    __slots__ = ("_json", "key", "object", "store_key", "version")

    def __init__(self, store_key: StoreKey, obj: Object, version: int) -> None:
        self.store_key = store_key
        self.key: Key = key_of(obj)
        self.object = obj
        self.version = version
        self._json: bytes | None = None

    @property
    def json(self) -> bytes:
        if self._json is None:
            self._json = json.dumps(self.object, separators=(",", ":")).encode()
        return self._json


class Change(NamedTuple):
    kind: str
    """ADDED, MODIFIED or DELETED."""
    record: Record
    previous: Record | None

    @property
    def version(self) -> int:
        return self.record.version


Listener = Callable[[Change], None]
Place = tuple[StoreKey, Key]


class TooOldError(Exception):
    """The changes after this version are no longer known."""


class Store:
    def __init__(self) -> None:
        self.version = 1
        self.compacted = 0
        self._tables: defaultdict[StoreKey, dict[Key, Record]] = defaultdict(dict)
        self._history: defaultdict[StoreKey, deque[Change]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._forgotten: defaultdict[StoreKey, int] = defaultdict(int)
        self._listeners: defaultdict[StoreKey | None, list[Listener]] = defaultdict(list)
        self._places: dict[str, Place] = {}
        self._dependents: defaultdict[str, set[Place]] = defaultdict(set)

    # -- reading --

    def get(self, store_key: StoreKey, key: Key) -> Object | None:
        record = self._tables[store_key].get(key)
        return record.object if record else None

    def record(self, store_key: StoreKey, key: Key) -> Record | None:
        return self._tables[store_key].get(key)

    def records(self, store_key: StoreKey, namespace: str = "") -> list[Record]:
        """In the order of the real server: by namespace and name."""
        table = self._tables[store_key]
        return [table[key] for key in sorted(table) if not namespace or key[0] == namespace]

    def objects(self, store_key: StoreKey, namespace: str = "") -> list[Object]:
        """In no particular order."""
        return [
            record.object for key, record in self._tables[store_key].items() if not namespace or key[0] == namespace
        ]

    def count(self, store_key: StoreKey) -> int:
        return len(self._tables[store_key])

    def in_namespace(self, namespace: str) -> list[Record]:
        return [record for table in self._tables.values() for key, record in table.items() if key[0] == namespace]

    def with_uid(self, uid: str) -> Record | None:
        place = self._places.get(uid)
        return self._tables[place[0]].get(place[1]) if place else None

    def dependents(self, uid: str) -> list[Record]:
        """The objects that name the object with this uid as an owner."""
        return [self._tables[store_key][key] for store_key, key in self._dependents.get(uid, ())]

    # -- writing --

    def add(self, store_key: StoreKey, obj: Object) -> Object:
        assert key_of(obj) not in self._tables[store_key]
        return self._commit("ADDED", store_key, obj, None)

    def replace(self, store_key: StoreKey, obj: Object) -> Object:
        return self._commit("MODIFIED", store_key, obj, self._tables[store_key][key_of(obj)])

    def remove(self, store_key: StoreKey, key: Key) -> Object:
        previous = self._tables[store_key][key]
        last = {**previous.object, "metadata": dict(previous.object["metadata"])}
        return self._commit("DELETED", store_key, last, previous)

    def _commit(self, kind: str, store_key: StoreKey, obj: Object, previous: Record | None) -> Object:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        record = Record(store_key, obj, self.version)
        if previous is not None:
            self._unindex(previous)
        if kind == "DELETED":
            del self._tables[store_key][record.key]
        else:
            self._tables[store_key][record.key] = record
            self._index(record)
        change = Change(kind, record, previous)
        history = self._history[store_key]
        if len(history) == HISTORY:
            self._forgotten[store_key] = history[0].version
        history.append(change)
        for listener in (*self._listeners[store_key], *self._listeners[None]):
            listener(change)
        return obj

    def _index(self, record: Record) -> None:
        place = (record.store_key, record.key)
        self._places[record.object["metadata"]["uid"]] = place
        for owner in owners_of(record.object):
            self._dependents[owner["uid"]].add(place)

    def _unindex(self, record: Record) -> None:
        place = (record.store_key, record.key)
        self._places.pop(record.object["metadata"]["uid"], None)
        for owner in owners_of(record.object):
            places = self._dependents[owner["uid"]]
            places.discard(place)
            if not places:
                del self._dependents[owner["uid"]]

    # -- changes --

    def subscribe(self, store_key: StoreKey | None, listener: Listener) -> Callable[[], None]:
        """Call a function on each change of one resource, or of all; returns what ends that."""
        self._listeners[store_key].append(listener)
        return lambda: self._listeners[store_key].remove(listener)

    def since(self, store_key: StoreKey, version: int) -> Iterable[Change]:
        """The changes after a version.

        Raises:
            TooOldError: they are not all known.
        """
        if version < max(self.compacted, self._forgotten[store_key]):
            raise TooOldError
        return [change for change in self._history[store_key] if change.version > version]

    def compact(self) -> None:
        """Forget all history, as etcd does every few minutes."""
        self.version += 1
        self.compacted = self.version
        for history in self._history.values():
            history.clear()
