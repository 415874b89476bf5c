"""One pod on a node: its containers are started, watched, restarted and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.kubelet.container_spec import container_spec, write_hosts
from kubernetes_server.kubelet.containers import ContainerRun, last_lines
from kubernetes_server.kubelet.environment import ContainerConfigError
from kubernetes_server.kubelet.image_names import invalid_name
from kubernetes_server.kubelet.probes import is_well, run_command
from kubernetes_server.kubelet.status import phase_of, write_status
from kubernetes_server.kubelet.storage import excess, has_limits
from kubernetes_server.kubelet.volumes import PodVolumes, VolumeError
from kubernetes_server.objects import Object, age_s, is_deleting, key_of
from kubernetes_server.resources import PODS
from kubernetes_server.runtime.client import ContainerStartError, Exit
from kubernetes_server.statuses import StatusError

if TYPE_CHECKING:
    from kubernetes_server.kubelet.kubelet import Kubelet

log = logging.getLogger(__name__)


class PodWorker:
    def __init__(self, kubelet: Kubelet, pod: Object) -> None:
        self.pod = pod
        self.key = key_of(pod)
        self.uid: str = pod["metadata"]["uid"]
        self._kubelet = kubelet
        self._cluster = kubelet.cluster
        self.folder: Path = self._cluster.settings.directory / "pods" / self.uid
        self.address = ""
        self._initial = [self._new_run(each, is_initial=True) for each in pod["spec"].get("initContainers") or ()]
        self._main = [self._new_run(each, is_initial=False) for each in pod["spec"]["containers"]]
        memory, token = self._cluster.memory_folder, self._token
        self._volumes = PodVolumes(self._cluster.store, pod, self.folder, memory, token)
        self._environments: dict[str, dict[str, str]] = {}
        self._stopping = asyncio.Event()
        self._kill_at: float | None = None
        """When what still runs is killed, by the loop's clock."""
        self._ended = False
        self._verdict = ("", "")
        """Reason and message with which the kubelet itself ended the pod."""
        self._life = asyncio.create_task(self._live())
        self._end: asyncio.Task[None] | None = None
        self._deadline = asyncio.create_task(self._watch_deadline())
        self._storage = asyncio.create_task(self._watch_storage()) if has_limits(pod) else None

    # -- from outside --

    def changed(self, pod: Object) -> None:
        self.pod = pod
        if is_deleting(pod):
            self.stop(pod["metadata"].get("deletionGracePeriodSeconds"))

    def removed(self) -> None:
        """The pod is gone, and its containers follow."""
        self.stop(1)

    def stop(self, grace_s: float | None, reason: str = "", message: str = "") -> None:
        """End the pod: SIGTERM, and SIGKILL after the grace period."""
        if reason and not self._ended:
            self._verdict = (reason, message)
        grace_s = max(grace_s if grace_s is not None else self.pod["spec"]["terminationGracePeriodSeconds"], 1)
        kill_at = self._cluster.time() + grace_s
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
        self._stopping.set()
        if self._end is None:
            self._end = asyncio.create_task(self._terminate())

    def kill(self) -> None:
        """Kill the containers, as a node does that loses power."""
        for run in (*self._initial, *self._main):
            if run.is_running:
                self._cluster.runtime.signal(run.identity, signal.SIGKILL)

    async def note_deaths(self) -> None:
        """Wait for the containers that were killed."""
        for run in (*self._initial, *self._main):
            if run.is_running and run.exit is not None:
                self._note_exit(run, await asyncio.shield(run.exit))

    def log_path(self, name: str, *, previous: bool) -> Path:
        run = self._run_named(name)
        # While it waits to be started again, the previous one is the last one, too.
        goes_back = previous and "waiting" not in run.state
        return self._log_path(run, run.restarts - 1 if goes_back else run.restarts)

    def is_writing(self, name: str) -> bool:
        """Whether a container may still write to its log."""
        run = self._run_named(name)
        return not self._ended and "terminated" not in run.state

    def names_changed(self, lines: list[str]) -> None:
        """Rewrite /etc/hosts."""
        if self.folder.exists():
            write_hosts(self.folder, self.pod, self.address, lines)

    async def close(self) -> None:
        """When the cluster ends; the runtime kills the containers."""
        tasks = [task for task in (self._life, self._end, self._deadline, self._storage) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- the life of a pod --

    async def _live(self) -> None:
        try:
            await self._run()
        except Exception:
            log.exception("pod %s", self.key)

    async def _run(self) -> None:
        await self._kubelet.up.wait()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._publish()
        if not await self._mount():
            return
        self.address = self._cluster.new_address()
        self.names_changed(self._cluster.host_lines(self.key[0]))
        for run in self._initial:
            await self._keep(run)
            if run.exit_code != 0:
                break
        else:
            for run in self._main:
                if "waiting" in run.state:
                    run.wait("ContainerCreating")
            if self._initial:
                self._publish()
            await asyncio.gather(*(self._keep(run) for run in self._main))
        await self._kubelet.up.wait()
        if not self._stopping.is_set():
            self._ended = True
            self._publish()

    async def _mount(self) -> bool:
        while not self._stopping.is_set():
            try:
                self._volumes.set_up()
            except VolumeError as error:
                self._event("FailedMount", str(error), warning=True)
                await self._pause(self._cluster.settings.timing.image_backoff_s)
            else:
                return True
        return False

    async def _keep(self, run: ContainerRun) -> None:
        """Run a container for as long as its restart policy says."""
        policy = self.pod["spec"]["restartPolicy"]
        timing = self._cluster.settings.timing
        backoff_s = timing.crash_backoff_s
        while await self._pull(run) and await self._start(run):
            exit_ = run.exit
            assert exit_ is not None
            readiness = asyncio.create_task(self._watch_readiness(run))
            try:
                self._note_exit(run, await asyncio.shield(exit_))
            finally:
                readiness.cancel()
            await self._kubelet.up.wait()
            again = run.exit_code != 0 if policy == "OnFailure" or run.is_initial else policy == "Always"
            if self._stopping.is_set() or not again or policy == "Never":
                self._publish()
                return
            self._publish()
            last = f"back-off {backoff_s:.0f}s restarting failed container={run.name} pod={self.key[1]}"
            run.wait("CrashLoopBackOff", last)
            self._event(
                "BackOff", f"Back-off restarting failed container {run.name} in pod {self.key[1]}", run, warning=True
            )
            self._publish()
            await self._pause(backoff_s)
            backoff_s = min(backoff_s * 2, timing.crash_backoff_limit_s)
            if self._stopping.is_set():
                run.state, run.last_state = run.last_state, {}
                return
            run.restarts += 1

    async def _pull(self, run: ContainerRun) -> bool:
        image = run.spec["image"]
        while error := invalid_name(image):
            if self._stopping.is_set():
                return False
            self._event("InspectFailed", error, run, warning=True)
            run.wait("InvalidImageName", error)
            self._publish()
            await self._pause(self._cluster.settings.timing.image_backoff_s)
        while not self._cluster.has_image(image):
            if self._stopping.is_set():
                return False
            if run.spec["imagePullPolicy"] == "Never":
                text = f'Container image "{image}" is not present with pull policy of Never'
                self._event("ErrImageNeverPull", text, run, warning=True)
                run.wait("ErrImageNeverPull", text)
                self._publish()
            else:
                error = (
                    f'rpc error: code = NotFound desc = failed to pull and unpack image "{image}": '
                    f'failed to resolve reference "{image}": {image}: not found'
                )
                self._event("Pulling", f'Pulling image "{image}"', run)
                self._event("Failed", f'Failed to pull image "{image}": {error}', run, warning=True)
                self._event("Failed", "Error: ErrImagePull", run, warning=True)
                run.wait("ErrImagePull", error)
                self._publish()
                await self._pause(self._cluster.settings.timing.image_backoff_s / 2)
                text = f'Back-off pulling image "{image}"'
                self._event("BackOff", text, run)
                self._event("Failed", "Error: ImagePullBackOff", run, warning=True)
                run.wait("ImagePullBackOff", f"{text}: ErrImagePull: {error}")
                self._publish()
            await self._pause(self._cluster.settings.timing.image_backoff_s)
        self._event("Pulled", f'Container image "{image}" already present on machine', run)
        return not self._stopping.is_set()

    async def _start(self, run: ContainerRun) -> bool:
        while True:
            await self._kubelet.up.wait()
            if self._stopping.is_set():
                return False
            try:
                spec = self._runtime_spec(run)
                break
            except ContainerConfigError as error:
                self._event("Failed", f"Error: {error}", run, warning=True)
                run.wait("CreateContainerConfigError", str(error))
                self._publish()
                await self._pause(self._cluster.settings.timing.image_backoff_s)
        run.identity = f"{self._cluster.name}-{self.uid}-{run.name}-{run.restarts}"
        run.exit = asyncio.get_running_loop().create_future()
        self._event("Created", f"Created container: {run.name}", run)
        try:
            run.pid = await self._cluster.runtime.start(run.identity, spec, run.exit.set_result)
        except ContainerStartError as error:
            self._event("Failed", f"Error: {error}", run, warning=True)
            run.exit.set_result(Exit(code=128, oom=False))
            run.run()
            run.end(128, "StartError", str(error))
            return True
        run.run()
        self._event("Started", f"Started container {run.name}", run)
        run.ready = not run.is_initial and not run.spec.get("readinessProbe")
        self._publish()
        if self._stopping.is_set():
            # It was stopped while it was being started.
            self._cluster.runtime.signal(run.identity, signal.SIGTERM)
        return True

    def _note_exit(self, run: ContainerRun, exit_: Exit) -> None:
        if run.exit_code is not None:
            return
        reason = "OOMKilled" if exit_.oom else "Completed" if exit_.code == 0 else "Error"
        if self._kubelet.was_killed:
            exit_, reason = Exit(code=255, oom=False), "Unknown"
        message = ""
        if exit_.code and run.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            message = last_lines(self._log_path(run, run.restarts))
        run.end(exit_.code, reason, message)

    async def _watch_readiness(self, run: ContainerRun) -> None:
        probe = run.spec.get("readinessProbe")
        if not probe:
            return
        factor = self._cluster.settings.timing.probe_factor
        await asyncio.sleep(probe.get("initialDelaySeconds", 0) * factor)
        passed = failed = 0
        while True:
            well = await is_well(
                probe,
                pid=run.pid,
                address=self.address,
                environment=self._environments[run.name],
                container=run.spec,
            )
            passed, failed = (passed + 1, 0) if well else (0, failed + 1)
            ready = run.ready
            if passed >= probe["successThreshold"]:
                ready = True
            elif failed >= probe["failureThreshold"] or not run.ready:
                ready = False
            if ready != run.ready:
                run.ready = ready
                self._publish()
            elif not well:
                self._event("Unhealthy", "Readiness probe failed", run, warning=True)
            await asyncio.sleep(probe["periodSeconds"] * factor)

    async def _watch_deadline(self) -> None:
        while (deadline_s := self.pod["spec"].get("activeDeadlineSeconds")) is not None and not self._ended:
            started = self.pod["status"].get("startTime")
            left_s = deadline_s - age_s(started) if started else deadline_s
            if left_s <= 0:
                text = "Pod was active on the node longer than the specified deadline"
                self.stop(None, "DeadlineExceeded", text)
                return
            await asyncio.sleep(min(left_s, 1.0))

    async def _watch_storage(self) -> None:
        while not self._ended:
            await asyncio.sleep(self._cluster.settings.timing.storage_s)
            if text := excess(self.pod, self.folder / "volumes", self.folder / "logs"):
                self._kubelet.evict(self.key, text)
                return

    # -- its end --

    async def _terminate(self) -> None:
        await self._kubelet.up.wait()
        running = [run for run in (*self._initial, *self._main) if run.is_running]
        await asyncio.gather(*(self._stop_container(run) for run in running))
        # While a container is being started, nobody knows its process yet.
        while not self._life.done():
            for run in (*self._initial, *self._main):
                if run.is_running and self._cluster.time() >= (self._kill_at or 0):
                    self._cluster.runtime.signal(run.identity, signal.SIGKILL)
            await asyncio.wait([self._life], timeout=0.05)
        await self._kubelet.up.wait()
        self._ended = True
        for run in (*self._initial, *self._main):
            if run.exit_code is None and not run.is_initial:
                run.vanish()
        self._publish()
        if is_deleting(self.pod):
            with contextlib.suppress(StatusError):
                self._cluster.operations.deletion.delete(PODS, self.key, DeleteOptions(grace_s=0, uid=self.uid))

    async def _stop_container(self, run: ContainerRun) -> None:
        assert run.exit is not None
        self._event("Killing", f"Stopping container {run.name}", run)
        hook = (run.spec.get("lifecycle") or {}).get("preStop") or {}
        left_s = (self._kill_at or 0) - self._cluster.time()
        if command := (hook.get("exec") or {}).get("command"):
            await run_command(run.pid, command, self._environments[run.name], left_s)
        elif pause := hook.get("sleep"):
            await asyncio.sleep(min(pause["seconds"], left_s))
        self._cluster.runtime.signal(run.identity, signal.SIGTERM)
        while not run.exit.done():
            left_s = (self._kill_at or 0) - self._cluster.time()
            if left_s <= 0:
                self._cluster.runtime.signal(run.identity, signal.SIGKILL)
                await run.exit
                return
            # In short steps, since a second deletion may shorten the grace period.
            await asyncio.wait([run.exit], timeout=min(left_s, 0.1))

    async def forget(self) -> None:
        """Remove what the pod has on disk, once it is gone from the API."""
        await self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self._cluster.memory_folder / self.uid, ignore_errors=True)

    @property
    def end(self) -> asyncio.Task[None] | None:
        return self._end

    def publish(self) -> None:
        self._publish()

    # -- parts --

    def _publish(self) -> None:
        """Write the status of the pod; a kubelet that is stopped does so when it is back."""
        if not self._kubelet.up.is_set():
            return

        def change(pod: Object) -> None:
            if pod["metadata"]["uid"] != self.uid:
                return
            phase = phase_of(pod, self._initial, self._main, terminal=self._ended)
            reason, message = self._verdict if self._ended else ("", "")
            if reason == "Evicted" and phase == "Succeeded":
                reason = message = ""  # only the event, and a condition if there is one, tell of it
            elif reason:
                phase = "Failed"
            elif self._stopping.is_set() and not self._ended and phase in ("Succeeded", "Failed"):
                phase = "Running"  # until all of it has ended
            write_status(
                pod,
                self._initial,
                self._main,
                phase=phase,
                address=self.address,
                host="127.0.0.1",
                reason=reason,
                message=message,
            )

        stored = self._cluster.operations.modify(PODS, self.key, change)
        if stored is not None and stored["metadata"]["uid"] == self.uid:
            self.pod = stored

    def _runtime_spec(self, run: ContainerRun) -> dict[str, Any]:
        # The address of the pod is in its status only from now on.
        pod = {**self.pod, "status": {**self.pod["status"], "podIP": self.address, "hostIP": "127.0.0.1"}}
        spec = container_spec(self._cluster, pod, run.spec, self.folder, self._volumes)
        self._environments[run.name] = spec["env"]
        log_path = self._log_path(run, run.restarts)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        return {**spec, "log": str(log_path)}

    def _log_path(self, run: ContainerRun, restart: int) -> Path:
        return self.folder / "logs" / run.name / f"{restart}.log"

    def _new_run(self, spec: Object, *, is_initial: bool) -> ContainerRun:
        has_initial = bool(self.pod["spec"].get("initContainers"))
        reason = "PodInitializing" if has_initial else "ContainerCreating"
        return ContainerRun(spec=spec, is_initial=is_initial, state={"waiting": {"reason": reason}})

    def _run_named(self, name: str) -> ContainerRun:
        return next(run for run in (*self._initial, *self._main) if run.name == name)

    def _token(self) -> str:
        return self._cluster.service_account_token(self.key[0], self.pod["spec"]["serviceAccountName"])

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not for longer than the pod is to live."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _event(self, reason: str, message: str, run: ContainerRun | None = None, *, warning: bool = False) -> None:
        if not self._kubelet.up.is_set():
            return
        path = f"spec.{'initContainers' if run.is_initial else 'containers'}{{{run.name}}}" if run else ""
        self._cluster.events.record(
            self.pod,
            reason,
            message,
            component="kubelet",
            warning=warning,
            host=self._kubelet.name,
            field_path=path,
        )
