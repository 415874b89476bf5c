"""A kubelet that only pretends: thousands of pods, whose phases follow annotations.

test.kubernetes.io/phase          Running (default), Succeeded or Failed; may be changed later
test.kubernetes.io/run-seconds    after how long a running pod succeeds by itself
test.kubernetes.io/exit-code      of a pod that fails (default 1)
"""

from __future__ import annotations

import asyncio

from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.kubelet.containers import ContainerRun
from kubernetes_server.kubelet.kubelet import Kubelet
from kubernetes_server.kubelet.status import write_status
from kubernetes_server.objects import Object, annotations_of, is_deleting, key_of
from kubernetes_server.resources import PODS
from kubernetes_server.statuses import StatusError

PREFIX = "test.kubernetes.io"


class FakeKubelet(Kubelet):
    def _follow(self, pod: Object) -> None:
        # Not while the store is still telling others of the change.
        asyncio.get_running_loop().call_soon(self._advance, key_of(pod), pod["metadata"]["uid"])

    def _remove(self, uid: str) -> None:
        pass

    def _advance(self, key: tuple[str, str], uid: str, phase: str = "") -> None:
        pod = self.cluster.store.get(PODS.store_key, key)
        if pod is None or pod["metadata"]["uid"] != uid or not self.up.is_set():
            return
        now_is = pod["status"].get("phase")
        ended = now_is in ("Succeeded", "Failed")
        if is_deleting(pod):
            if not ended:
                self._write(pod, "Failed", 137)
            try:
                self.cluster.operations.deletion.delete(PODS, key, DeleteOptions(grace_s=0, uid=uid))
            except StatusError:
                return
            return
        wanted = phase or annotations_of(pod).get(f"{PREFIX}/phase", "Running")
        if ended or now_is == wanted:
            return
        code = int(annotations_of(pod).get(f"{PREFIX}/exit-code", "1"))
        self._write(pod, wanted, code if wanted == "Failed" else 0)
        seconds = annotations_of(pod).get(f"{PREFIX}/run-seconds")
        if wanted == "Running" and seconds is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(float(seconds), self._advance, key, uid, "Succeeded")

    def _write(self, pod: Object, phase: str, code: int) -> None:
        runs = []
        for spec in pod["spec"]["containers"]:
            run = ContainerRun(spec=spec, is_initial=False, state={}, identity=pod["metadata"]["uid"], ready=True)
            run.run()
            if phase != "Running":
                run.end(code, "Error" if code else "Completed")
            runs.append(run)
        address = pod["status"].get("podIP") or self.cluster.new_address()

        def change(pod: Object) -> None:
            write_status(pod, [], runs, phase=phase, address=address, host="127.0.0.1")

        self.cluster.operations.modify(PODS, key_of(pod), change)
