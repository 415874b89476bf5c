"""The program of a Trainmaster's one Ray job: places attempts, runs the worker of each of their nodes, and reports.

Its source is executed by `render.LOADER` on the head node, after that of `actor.py`; the loader has connected to Ray
and read `given`. Standard library and Ray only, and without newer syntax. Requests are packages in the cluster's store,
below `given["mailbox"]`:

    <attempt>.zip          launch it; stays there until its actors have been created
    <attempt>.stop.zip     end it
    <attempt>.forget.zip   drop what is known of its end

What it knows is in one JSON document, a file among Ray's logs, which the dashboard shows. Placement groups and actors
are detached: when this program is killed they live on, and the next one finds them by their names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import time
import zlib
from typing import Any

TURN_S = 0.3
TAKES_OVER_S = 10
IDLE_S = 300
"""Without an attempt for this long, it ends."""
LOOKS_AT_ONCE = 50
"""Attempts that wait, of which Ray is asked in one turn."""
KEPT = 5000
"""Ends that nobody has told it to forget."""
STOP_MARGIN_S = 20


class Attempt:
    def __init__(self, name: str, known: dict[str, Any]) -> None:
        """`known`: what the document says of it."""
        self.name = name
        self.known = known
        self.group: Any = None
        self.launch: dict[str, Any] = {}
        self.actors: list[Any] = []
        self.refs: dict[Any, tuple[str, int]] = {}
        self.stop_by: float | None = None

    @property
    def count(self) -> int:
        return int(self.known["nodes"])

    @property
    def is_over(self) -> bool:
        return bool(self.known["phase"] == "ended")


class Driver:
    def __init__(self, ray: Any, make_node: Any, given: dict[str, Any], document: str) -> None:
        self.ray = ray
        self.store: Any = importlib.import_module("ray.experimental.internal_kv")
        self.groups: Any = importlib.import_module("ray.util.placement_group")
        self.strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self.make_node = make_node
        self.mailbox = given["mailbox"]
        self.version = given["version"]
        self.keeper = given["keeper"]
        self.namespace = given["namespace"]
        self.document = document
        self.attempts: dict[str, Attempt] = {}
        self.written = ""
        self.looked_at = 0
        self.busy_at = time.monotonic()
        self.nonce = os.urandom(8).hex()
        self.claim = f"{self.mailbox}.driver"
        self.mark = f"{self.mailbox}.work."
        """Begins the keys of drivers at work."""

    # -- what is known --

    def recover(self) -> None:
        """Go on with what an earlier driver had begun."""
        try:
            with open(self.document) as file:
                known = json.load(file)["attempts"]
        except (OSError, ValueError, KeyError):
            known = {}
        for name, each in known.items():
            attempt = self.attempts[name] = Attempt(name, each)
            if attempt.is_over:
                continue
            try:
                attempt.group = self.ray.util.get_placement_group(name)
            except ValueError:
                attempt.group = None
            if each["phase"] != "waiting":
                self.follow(attempt, [self.found(name, number) for number in range(attempt.count)])

    def found(self, name: str, number: int) -> Any:
        try:
            return self.ray.get_actor(f"{name}/{number}", namespace=self.namespace)
        except ValueError:
            return None

    def write(self) -> None:
        ended = [name for name, each in self.attempts.items() if each.is_over]
        for name in ended[: max(0, len(ended) - KEPT)]:
            del self.attempts[name]
        content = {"version": self.version, "attempts": {name: each.known for name, each in self.attempts.items()}}
        text = json.dumps(content)
        if text != self.written:
            with open(self.document + ".new", "w") as file:
                file.write(text)
            os.replace(self.document + ".new", self.document)
            self.written = text

    # -- turns --

    def run(self) -> None:
        self.take_over()
        self.recover()
        # Another one may have been started while this one was taken for dead.
        while self.store._internal_kv_get(self.claim) == self.nonce.encode():
            self.turn()
            if time.monotonic() > self.busy_at + IDLE_S:
                self.store._internal_kv_del(self.claim)
                break
        self.store._internal_kv_del(self.mark + self.nonce)

    def take_over(self) -> None:
        """Have any other driver end its turn, and wait for that, unless it was killed."""
        self.store._internal_kv_put(self.claim, self.nonce)
        deadline = time.monotonic() + TAKES_OVER_S
        while others := self.store._internal_kv_list(self.mark):
            if time.monotonic() > deadline:
                for key in others:
                    self.store._internal_kv_del(key)
            time.sleep(TURN_S)
        self.store._internal_kv_put(self.mark + self.nonce, b"-")

    def turn(self) -> None:
        self.read_mailbox()
        if not all(each.is_over for each in self.attempts.values()):
            self.busy_at = time.monotonic()
        waiting = [each for each in self.attempts.values() if each.known["phase"] == "waiting"]
        for attempt in self.some_of(waiting):
            try:
                self.advance(attempt)
            except (TypeError, ValueError) as error:
                self.end(attempt, refused=str(error)[:2000])
        started = [each for each in self.attempts.values() if each.refs]
        refs = {ref: each for each in started for ref in each.refs}
        if refs:
            done, _ = self.ray.wait(list(refs), num_returns=len(refs), timeout=TURN_S)
            for ref in done:
                self.take(refs[ref], ref)
        else:
            time.sleep(TURN_S)
        for attempt in started:
            self.conclude(attempt)
        self.write()

    def some_of(self, waiting: list[Attempt]) -> list[Attempt]:
        """All in turn, some at a time: each costs a request."""
        start = self.looked_at if self.looked_at < len(waiting) else 0
        self.looked_at = start + LOOKS_AT_ONCE
        return waiting[start : self.looked_at]

    def read_mailbox(self) -> None:
        keys = [key for key in self.store._internal_kv_list(self.mailbox.encode()) if key.endswith(b".zip")]
        for key in sorted(keys, key=lambda key: (key.count(b"."), key)):  # launches first
            parts = key.decode()[len("gcs://") :].split(".")
            name, request = parts[0], parts[1] if len(parts) == 3 else "launch"
            self.busy_at = time.monotonic()
            attempt = self.attempts.get(name)
            if request == "launch":
                if attempt is None:
                    package = self.store._internal_kv_get(key)
                    if package is not None:
                        self.accept(name, json.loads(zlib.decompress(package)))
                elif attempt.known["phase"] != "waiting":
                    self.store._internal_kv_del(key)  # it was sent twice
                elif not attempt.launch:
                    attempt.launch = json.loads(zlib.decompress(self.store._internal_kv_get(key)))
            else:
                if attempt is not None and request == "forget" and attempt.is_over:
                    del self.attempts[name]
                elif attempt is not None and request == "stop" and not attempt.is_over:
                    self.stop(attempt)
                self.store._internal_kv_del(key)

    def accept(self, name: str, launch: dict[str, Any]) -> None:
        known = {"attempt": launch["attempt"], "nodes": launch["nodes"], "grace_s": launch["grace_s"]}
        known["phase"] = "waiting"
        self.attempts[name] = Attempt(name, known)
        self.attempts[name].launch = launch
        self.write()  # before anything of it is there

    def advance(self, attempt: Attempt) -> None:
        """Reserve nodes for an attempt, or start its actors on those that it has."""
        if not attempt.launch:
            self.end(attempt, lost_launch=True)
            return
        if attempt.group is None:
            attempt.known["bundle"] = bundle = self.bundle_of(attempt.launch)
            attempt.group = self.reserve(attempt, bundle)
        shown = self.groups.placement_group_table(attempt.group)
        if shown["state"] == "REMOVED":
            self.end(attempt, removed=True)
        elif shown["state"] == "CREATED":
            self.start(attempt)
        else:
            attempt.known["why"] = str((shown.get("stats") or {}).get("scheduling_state", ""))

    def bundle_of(self, launch: dict[str, Any]) -> dict[str, float]:
        bundle = dict(launch["bundle"])
        if wanted := launch["accelerators"]:
            resources = self.ray.cluster_resources()
            known = sorted(name.partition(":")[2] for name in resources if name.startswith("accelerator_type:"))
            same = [name for each in wanted for name in known if words(name) == words(each)]
            more = [name for each in wanted for name in known if words(name) > words(each)]
            bundle["accelerator_type:" + (same + more + wanted[-1:])[0]] = 0.001
        return bundle

    def reserve(self, attempt: Attempt, bundle: dict[str, float]) -> Any:
        launch = attempt.launch
        with contextlib.suppress(ValueError):  # there is none yet
            return self.ray.util.get_placement_group(attempt.name)
        options: dict[str, Any] = {}
        if launch["labels"]:
            options["bundle_label_selector"] = [launch["labels"]] * attempt.count
        bundles = [bundle] * attempt.count
        make = self.groups.placement_group
        try:
            return make(bundles, strategy=launch["strategy"], name=attempt.name, lifetime="detached", **options)
        except TypeError:
            if options:
                raise ValueError("this version of Ray cannot choose nodes by labels; 2.49 can")  # noqa: B904
            raise

    def start(self, attempt: Attempt) -> None:
        bundle = attempt.known["bundle"]
        rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
        actors = [
            self.make_node.options(
                name=f"{attempt.name}/{number}",
                namespace=self.namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=int(bundle["memory"]) if "memory" in bundle else None,
                resources=rest,
                max_restarts=0,
                max_concurrency=32,
                scheduling_strategy=self.strategies.PlacementGroupSchedulingStrategy(
                    placement_group=attempt.group, placement_group_bundle_index=number
                ),
            ).remote(attempt.launch, self.keeper, number)
            for number in range(attempt.count)
        ]
        attempt.known.update(phase="starting", why="", addresses={}, results={})
        self.write()
        self.store._internal_kv_del(f"gcs://{attempt.name}.zip")
        self.follow(attempt, actors)

    def follow(self, attempt: Attempt, actors: list[Any]) -> None:
        """Ask the actors where they are and how they end; None: one that is gone."""
        attempt.launch = {}
        attempt.actors = actors
        for number, actor in enumerate(actors):
            if str(number) in attempt.known["results"]:
                continue
            if actor is None:
                attempt.known["results"][str(number)] = {"lost": "worker", "message": "it ended while nobody looked"}
                continue
            if str(number) not in attempt.known["addresses"]:
                attempt.refs[actor.address.remote()] = ("address", number)
            attempt.refs[actor.wait.remote()] = ("wait", number)
        if not attempt.refs:
            self.conclude(attempt)

    def take(self, attempt: Attempt, ref: Any) -> None:
        what, number = attempt.refs.pop(ref)
        known = attempt.known
        try:
            found = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            if isinstance(error, getattr(self.ray.exceptions, "ActorUnavailableError", ())):
                actor = attempt.actors[number]
                attempt.refs[actor.wait.remote() if what == "wait" else actor.address.remote()] = (what, number)
                time.sleep(TURN_S)
            elif what == "wait":
                known["results"][str(number)] = lost(error)
            return
        known["results" if what == "wait" else "addresses"][str(number)] = found
        if len(known["addresses"].keys() | known["results"].keys()) == attempt.count:
            known["phase"] = "running"

    def conclude(self, attempt: Attempt) -> None:
        """End an attempt whose nodes have all ended, or did not end in time."""
        over = all(what != "wait" for what, _ in attempt.refs.values())
        if not attempt.is_over and (over or (attempt.stop_by is not None and time.monotonic() > attempt.stop_by)):
            self.end(attempt)

    def stop(self, attempt: Attempt) -> None:
        attempt.known["stopped"] = True
        if attempt.known["phase"] == "waiting":
            self.end(attempt)
        elif attempt.stop_by is None:
            attempt.stop_by = time.monotonic() + attempt.known["grace_s"] + STOP_MARGIN_S
            for actor in attempt.actors:
                if actor is not None:
                    actor.stop.remote()

    def end(self, attempt: Attempt, **more: Any) -> None:
        """Nothing of it is left but what is known."""
        for actor in attempt.actors:
            if actor is not None:
                with contextlib.suppress(Exception):
                    self.ray.kill(actor)
        if attempt.group is None:
            with contextlib.suppress(ValueError):
                attempt.group = self.ray.util.get_placement_group(attempt.name)
        if attempt.group is not None:
            self.groups.remove_placement_group(attempt.group)
        bad = {number: each for number, each in attempt.known.get("results", {}).items() if each.get("exit") != 0}
        kept: dict[str, Any] = {
            name: attempt.known[name] for name in ("attempt", "nodes", "stopped") if name in attempt.known
        }
        attempt.known = kept
        attempt.known.update(phase="ended", results=bad, **more)
        attempt.refs, attempt.actors, attempt.group = {}, [], None
        self.store._internal_kv_del(f"gcs://{attempt.name}.zip")


def lost(error: Exception) -> dict[str, Any]:
    """Why an actor is gone, in Ray's words, and which of five kinds that is."""
    text = str(error)
    if getattr(error, "preempted", False):
        kind = "preempted"
    elif "OutOfMemory" in type(error).__name__ or "running low on memory" in text or "OOM" in text:
        kind = "memory"
    elif "placement group was removed" in text or "killed by `ray.kill`" in text:
        kind = "removed"
    elif re.search(r"node (has died|died|was terminated|failed)|its node", text, re.IGNORECASE):
        kind = "node"
    else:
        kind = "worker"
    return {"lost": kind, "message": text[:1000]}


def words(name: str) -> set[str]:
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return {re.sub(r"^(\d+)gb$", r"\1g", word) for word in found} - {"nvidia", "tesla"}


def main(given: dict[str, Any], actor: type) -> None:
    ray: Any = importlib.import_module("ray")
    # What it prints goes to a file of Ray's logs.
    logs = os.path.dirname(os.readlink("/proc/self/fd/1"))
    Driver(ray, ray.remote(actor), given, os.path.join(logs, given["document"])).run()


if __name__ == "__main__":
    main(globals()["given"], globals()["Node"])
