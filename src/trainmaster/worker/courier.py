"""The courier: mirrors a worker's run directory to a server whose files the worker cannot reach.

It claims the node at the server, lays out a private run directory, forks the worker on it and mirrors from then on:
streams and documents go up, control and rendezvous come down. Everything is on disk first and stays there until the
server has it, so that a server outage costs only time. The worker dies with its courier; a courier that is started
again on the same directory delivers what is left.

    <directory>/courier.json     the nonce of the claim, to claim the node again
    <directory>/blobs/<sha256>   files that the launch names
    <directory>/run/             the run directory

Secrets are fetched just before the worker starts, and reach it by the fork: no file holds them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.protocol.account_files import remove_tree
from trainmaster.protocol.documents import DISK_FULL_ERRNOS, read_document, write_document
from trainmaster.protocol.processes import ProcessIdentity, identity_of, is_alive, send_signal
from trainmaster.protocol.reasons import Reason, StopCause, exit_record
from trainmaster.protocol.request import AttemptRequest, ContainerOverrides, Control
from trainmaster.protocol.run_directory import (
    CONTROL,
    SEARCH_ONLY,
    RunDirectory,
    beat_document,
    exit_document,
)
from trainmaster.protocol.secrets import NO_SECRETS, Secrets
from trainmaster.protocol.sockets import HintListener
from trainmaster.worker.cgroups import remove_groups
from trainmaster.worker.echo import Echo
from trainmaster.worker.mirror import Mirror
from trainmaster.worker.processes import become_subreaper, descendants, die_with_parent, signal_all, sweep
from trainmaster.worker.records import exit_of_lost_worker
from trainmaster.worker.results import Results, name_places
from trainmaster.worker.supervise import run_worker
from trainmaster.worker.uplink import AttemptRefusedError, ClosedError, Uplink

LOOK_EVERY_S = 0.1
"""How long output may wait before it is sent; the worker's hints cut it short."""
BEAT_EVERY_S = 2.0
CONTROL_WAIT_S = 20
"""How long the server may hold a request for control."""
REFUSED_GRACE_S = 10.0
"""For the ranks of an attempt that the server does not know any more."""
_AS_REQUESTED = ContainerOverrides()
_WORKER_ENDS_S = 15.0
"""A worker that has written its exit, or was told to stop, is gone by then or hangs."""


def run_courier(
    server_url: str,
    token: str,
    attempt_id: str,
    node: int,
    directory: str | os.PathLike[str],
    *,
    delivers_only: bool = False,
    own: ContainerOverrides = _AS_REQUESTED,
    grace_s: float | None = None,
    caches: Path | None = None,
    echoes: bool = False,
) -> None:
    """Run one node for a server reached by HTTP, until all is delivered; `delivers_only`: what a dead courier left.

    `own` says what differs from the request on this node. With `grace_s`, a cluster's engine runs this process: SIGTERM
    from the engine stops the attempt, which has this long to save. `caches` has one directory for each account whose
    jobs do not share the server's files; by default it is beside the courier's directory. `echoes`: what the node's
    first rank writes is printed, too.
    """
    home = Path(directory).absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return  # Another courier is at it.
    courier = _Courier(server_url, token, attempt_id, node, home, lock, delivers_only=delivers_only, own=own)
    courier.echoes = echoes
    courier.caches = caches or home.parent / "caches"
    if grace_s is not None:
        courier.stop_on_sigterm(grace_s)
    courier.run()
    with contextlib.suppress(OSError):
        remove_tree(home)
    with contextlib.suppress(OSError):
        home.parent.rmdir()  # the last node of the attempt on this host


class _StopAskedError(Exception):
    """The attempt was stopped before it started."""


class _Courier:
    def __init__(
        self,
        server_url: str,
        token: str,
        attempt_id: str,
        node: int,
        home: Path,
        lock: int,
        *,
        delivers_only: bool,
        own: ContainerOverrides,
    ) -> None:
        self._server_url = server_url
        self._token = token
        self._attempt_id = attempt_id
        self._node = node
        self._home = home
        self._lock = lock
        self._delivers_only = delivers_only
        self._own = own
        self._uplink = Uplink(server_url, token)
        self._route = f"/v1/worker/attempts/{attempt_id}"
        self._run = RunDirectory(home / "run")
        self._worker: int | None = None
        self._worker_end = "never started"
        self._inherited = False
        self._mirrored = Mirror(self._uplink, self._route, self._run, node, tick=self._beat)
        self._next_beat = 0.0
        self._refused = threading.Event()
        self._terminated = False
        self._grace_s = 0.0
        self.caches = home.parent / "caches"
        self.echoes = False
        self._results: Results | None = None

    def stop_on_sigterm(self, grace_s: float) -> None:
        """Take SIGTERM for a stop by the engine of the cluster, with this long to save."""
        self._grace_s = grace_s
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def run(self) -> None:
        try:
            request = AttemptRequest.from_json(self._uplink.ask("GET", f"{self._route}/request"))
            if not self._claim():
                return
            try:
                self._prepare(request)
            except OSError as error:
                reason = Reason.DISK_FULL if error.errno in DISK_FULL_ERRNOS else Reason.STORAGE_UNAVAILABLE
                message = f"the node could not prepare for the job: {error}"
                self._mirrored.put(exit_document(self._node), exit_record(reason, message))
                return
            with self._following_control(), self._echoing(request), self._hints() as hints:
                self._mirror(hints)
        except AttemptRefusedError:
            self._abandon()
        self._end_worker(_WORKER_ENDS_S)

    def _claim(self) -> bool:
        name = self._home / "courier.json"
        nonce = (read_document(name) or {}).get("nonce") or uuid.uuid4().hex
        with contextlib.suppress(OSError):
            write_document(name, {"nonce": nonce})
        identity = identity_of(os.getpid())
        claimant = {"nonce": nonce, "host": socket.gethostname(), **(identity.to_json() if identity else {})}
        return bool(self._uplink.ask("POST", f"{self._route}/claims/{self._node}", document=claimant)["granted"])

    def _prepare(self, request: AttemptRequest) -> None:
        """Lay out the run directory and start the worker, unless an earlier courier did."""
        blobs = self._home / "blobs"
        blobs.mkdir(mode=0o700, exist_ok=True)
        if request.uid is not None:
            self._home.parent.chmod(SEARCH_ONLY)
        request, self._results = name_places(request, self._node, self._home, self.caches)
        self._run.create(
            replace(
                request,
                token="",  # the ranks can read this directory
                server_url=self._server_url,
                owner_file="",
                blob_dir=str(blobs),
                hint_socket=str(self._home / "hints"),
            )
        )
        if claim := self._run.claimant(self._node):
            self._worker_end = "died with the courier before this one"
            self._inherited = True
            _kill(ProcessIdentity.from_json(claim))
            return
        if self._delivers_only:
            self._worker_end = "was never started, as the courier before this one died"
            return
        self._worker = self._fork_worker(self._fetch(request, blobs))

    def _deliver_results(self, end: dict[str, Any]) -> dict[str, Any]:
        """Send what the job has left; returns the exit document, which names files that the server did not take."""

        def tick() -> None:
            self._worker_runs()
            self._beat()
            if self._refused.is_set():
                raise AttemptRefusedError(404)

        problems = self._results.deliver(self._server_url, self._token, tick=tick) if self._results else []
        if not problems:
            return end
        message = f"{len(problems)} results were not delivered, such as {problems[0]}"
        return {**end, "message": "; ".join(filter(None, (str(end.get("message") or ""), message)))}

    def _fetch(self, request: AttemptRequest, blobs: Path) -> Secrets:
        """Fetch the launch's files, and its secrets, which stay in memory. The worker will report a missing file."""
        secrets = NO_SECRETS
        downloads = Uplink(self._server_url, self._token, on_wait=self._attend)
        with contextlib.suppress(_StopAskedError):
            secrets = Secrets.from_json(downloads.ask("GET", f"{self._route}/secrets"))
            for digest in dict.fromkeys(blob.sha256 for blob in request.launch.blobs):
                if not (blobs / digest).exists():
                    downloads.download(f"/v1/blobs/{digest}", blobs / digest, digest)
        downloads.disconnect()
        return secrets

    def _attend(self) -> None:
        """While files are fetched: send heartbeats, and stop fetching if the attempt is stopped."""
        if self._beat():
            control = self._uplink.ask("GET", f"{self._route}/control?after=0&wait_s=0")
            if control is not None and control.get("stop"):
                self._run.set_control(control)
                raise _StopAskedError

    def _fork_worker(self, secrets: Secrets) -> int:
        self._uplink.disconnect()
        become_subreaper()
        courier = os.getpid()
        if pid := os.fork():
            return pid
        status = 1
        try:
            os.setsid()
            os.close(self._lock)
            die_with_parent(courier)
            # Not ignored: the worker sees by it that ranks obeyed the engine, which signals all of them at once.
            signal.pthread_sigmask(signal.SIG_BLOCK if self._grace_s else signal.SIG_UNBLOCK, {signal.SIGTERM})
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            status = run_worker(self._run.path, self._node, secrets, self._own)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    @contextlib.contextmanager
    def _following_control(self) -> Iterator[None]:
        uplink = Uplink(self._server_url, self._token, timeout_s=CONTROL_WAIT_S + 10.0)
        thread = threading.Thread(target=self._follow_control, args=(uplink,), name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            uplink.close()
            thread.join()

    def _follow_control(self, uplink: Uplink) -> None:
        seq = 0
        with contextlib.suppress(ClosedError):
            while True:
                asked_at = time.monotonic()
                try:
                    document = uplink.ask("GET", f"{self._route}/control?after={seq}&wait_s={CONTROL_WAIT_S}")
                except AttemptRefusedError:
                    self._refused.set()
                    return
                if document is None:
                    # Do not flood a server that answers at once.
                    uplink.pause(max(0.0, asked_at + LOOK_EVERY_S - time.monotonic()))
                    continue
                try:
                    self._run.set_control(document)
                    seq = int(document["seq"])
                except OSError:
                    uplink.pause(1.0)  # No room on the disk: ask for the same wish again.

    @contextlib.contextmanager
    def _hints(self) -> Iterator[HintListener | None]:
        try:
            listener = HintListener(self._home / "hints")
        except OSError:
            yield None  # The path is too long for a socket: looking every now and then does as well.
            return
        with contextlib.closing(listener):
            yield listener

    def _echoing(self, request: AttemptRequest) -> contextlib.AbstractContextManager[None]:
        if not self.echoes:
            return contextlib.nullcontext()
        return Echo(self._run, self._node, first_rank=self._node * request.launch.ranks_per_node).printing()

    def _mirror(self, hints: HintListener | None) -> None:
        while True:
            running = self._worker_runs()
            if self._terminated and running:
                self._terminated = False
                self._stop_for_engine()
            # Read before the streams are sent: they are complete when it exists.
            if (end := self._run.document(exit_document(self._node))) is None and not running:
                self._kill_strays()
                end = exit_of_lost_worker(self._run, self._node, self._worker_end)
            self._mirrored.turn()
            if self._refused.is_set():
                raise AttemptRefusedError(404)
            if end is not None:
                self._mirrored.put(exit_document(self._node), self._deliver_results(end))
                return
            if select.select([hints] if hints else [], [], [], LOOK_EVERY_S)[0] and hints:
                hints.drain()

    def _beat(self) -> bool:
        """Send heartbeats while the worker does not: before its start, and after its end."""
        now = time.monotonic()
        if self._worker is not None or now < self._next_beat:
            return False
        self._next_beat = now + BEAT_EVERY_S
        self._mirrored.put(beat_document(self._node), {"t": time.time(), "seq": 0})
        return True

    def _worker_runs(self) -> bool:
        if self._worker is None:
            return False
        pid, status = os.waitpid(self._worker, os.WNOHANG)
        if pid == 0:
            return True
        self._worker = None
        code = os.waitstatus_to_exitcode(status)
        self._worker_end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return False

    def _abandon(self) -> None:
        """The server does not know the attempt any more: end the ranks as after a deletion."""
        if self._worker is not None:
            self._stop_worker(Control(seq=0, stop=StopCause.DELETE, grace_s=REFUSED_GRACE_S))
            self._end_worker(REFUSED_GRACE_S + _WORKER_ENDS_S)

    def _stop_for_engine(self) -> None:
        """Unless the attempt is being stopped anyhow: then the engine does what the server asked of it."""
        if not (self._run.document(CONTROL) or {}).get("stop"):
            self._stop_worker(Control(seq=0, stop=StopCause.ENGINE, save=True, grace_s=self._grace_s))

    def _stop_worker(self, control: Control) -> None:
        last = self._run.document(CONTROL) or {}
        with contextlib.suppress(OSError):
            self._run.set_control(replace(control, seq=int(last.get("seq", 0)) + 1).to_json())

    def _end_worker(self, within_s: float) -> None:
        """Wait for the worker's end. If it hangs, kill it with everything it started."""
        deadline = time.monotonic() + within_s
        while self._worker_runs():
            if self._worker is not None and time.monotonic() >= deadline:
                os.kill(self._worker, signal.SIGKILL)
                os.waitpid(self._worker, 0)
                self._worker = None
                self._kill_strays()
                return
            time.sleep(0.005)

    def _kill_strays(self) -> None:
        """Kill what a dead worker left; the node has not ended before."""
        if self._inherited:
            sweep(self._attempt_id, self._node)
        # What our own worker left is below us now; processes of other nodes on this host are not.
        while strays := descendants(os.getpid()):
            signal_all(strays, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.005)
        remove_groups(self._attempt_id, self._node)


def _kill(process: ProcessIdentity) -> None:
    while is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            send_signal(process, signal.SIGKILL)
        time.sleep(0.01)
