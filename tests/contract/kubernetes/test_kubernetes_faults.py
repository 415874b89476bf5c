"""The faults that the Kubernetes test server makes on demand, and how it ends; none of this is for a real cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kubernetes_client import ApiError, KubernetesClient, Object, condition_of, wait_for
from kubernetes_server.process import KubernetesServer, running

pytestmark = pytest.mark.long  # until a backend runs on it

SLEEP = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this machine that pods must not see."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "file").touch()
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, hidden: Path) -> Iterator[KubernetesServer]:
    options = ("--nodes", "2", "--set", "node_grace_s=1", "--hidden", str(hidden))
    with running(tmp_path_factory.mktemp("faults"), *options) as started:
        yield started


@pytest.fixture
def api(server: KubernetesServer) -> Iterator[KubernetesClient]:
    client = KubernetesClient(server.kubeconfig)
    yield client
    server.faults.clear()
    for node in ("node-0", "node-1"):
        server.faults.node_back(name=node)
        server.faults.disk_full(name=node, full=False)
    client.ask("DELETE", client.path("Job"), propagationPolicy="Background")
    client.ask("DELETE", client.path("Pod"), gracePeriodSeconds=1)
    wait_for(lambda: not client.list("Pod"), "the pods to go")
    client.close()


def pod(name: str, *python: str, **spec: Any) -> Object:
    container = {"name": "main", "image": "any", "command": ["python3", "-c", *(python or (SLEEP,))]}
    plain = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": {**plain, "containers": [container], **spec}}


def until_up(api: KubernetesClient, name: str) -> Object:
    def up() -> Any:
        found = api.get("Pod", name)
        return found["status"]["phase"] == "Running" and api.log(name) and found

    found: Object = wait_for(up, f"{name} to be up")
    return found


def started_at(identity: str) -> list[int]:
    """The processes whose command line has a word."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if identity.encode() in words and Path(f"/proc/{name}/stat").read_text().split()[2] != "Z":
                    found.append(int(name))
    return found


def test_refusing_api_comes_back(server: KubernetesServer, api: KubernetesClient) -> None:
    with api.watch("Pod") as events:
        server.faults.api_refuse(seconds=600)
        with pytest.raises(httpx.TransportError):
            list(events)
    with pytest.raises(httpx.ConnectError):
        api.list("Pod")
    server.faults.api_up()
    assert api.list("Pod") == []
    server.faults.api_refuse(seconds=0.1)

    def is_back() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return api.list("Pod") == []
        return False

    wait_for(is_back, "the API to come back")


def test_unavailable_and_throttled_api_says_so(server: KubernetesServer, api: KubernetesClient) -> None:
    server.faults.api_unavailable(seconds=600)
    with pytest.raises(ApiError) as caught:
        api.list("Pod")
    assert (caught.value.code, caught.value.reason) == (503, "ServiceUnavailable")
    server.faults.api_up()
    server.faults.api_throttle(requests=1, retry_after_s=3)
    with pytest.raises(ApiError) as caught:
        api.list("Pod")
    assert (caught.value.code, caught.value.reason) == (429, "TooManyRequests")
    assert caught.value.headers["Retry-After"] == "3"
    assert api.list("Pod") == []


def test_slow_api_answers_late(server: KubernetesServer, api: KubernetesClient) -> None:
    server.faults.api_slow(seconds=0.3)
    start = time.monotonic()
    api.list("Pod")
    assert time.monotonic() - start >= 0.3


def test_denied_request_is_forbidden(server: KubernetesServer, api: KubernetesClient) -> None:
    server.faults.deny(verb="list", resource="pods")
    with pytest.raises(ApiError) as caught:
        api.list("Pod")
    assert caught.value.code == 403
    server.faults.clear()
    assert api.list("Pod") == []


def test_dropped_watch_breaks_and_compacted_one_expires(server: KubernetesServer, api: KubernetesClient) -> None:
    start = api.ask("GET", api.path("Pod"))["metadata"]["resourceVersion"]
    with api.watch("Pod", resourceVersion=start) as events:
        assert server.faults.watches_drop() >= 1
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    server.faults.compact()
    with api.watch("Pod", resourceVersion=start) as events:
        assert next(events)["object"]["code"] == 410


def test_pod_of_a_lost_node_is_replaced_while_it_runs_on(server: KubernetesServer, api: KubernetesClient) -> None:
    toleration = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    template = {"spec": {**pod("", tolerations=[{**toleration, "tolerationSeconds": 1}])["spec"]}}
    spec = {"template": template, "completions": 1, "completionMode": "Indexed"}
    api.create({"kind": "Job", "metadata": {"name": "moving"}, "spec": spec})
    (first,) = api.pods_of("moving")
    name = first["metadata"]["name"]
    node = until_up(api, name)["spec"]["nodeName"]
    server.faults.node_lost(name=node)
    lost = api.until("Node", node, lambda found: condition_of(found, "Ready")["status"] == "Unknown")
    assert condition_of(lost, "Ready")["reason"] == "NodeStatusUnknown"
    assert condition_of(lost, "Ready")["message"] == "Kubelet stopped posting node status."
    found = api.until_condition("Pod", name, "DisruptionTarget")
    assert condition_of(found, "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert found["status"]["phase"] == "Running"
    assert condition_of(found, "Ready")["status"] == "False"
    with pytest.raises(ApiError) as caught:
        api.log(name)
    assert "connect: connection refused" in caught.value.message
    replaced = ("active", "failed", "terminating")
    api.until("Job", "moving", lambda each: [each["status"].get(name) for name in replaced] == [1, 1, 1])
    server.faults.node_back(name=node)
    api.until_condition("Node", node, "Ready")
    api.until("Node", node, lambda each: not each["spec"].get("taints"))
    api.until_gone("Pod", name)


def test_pods_of_a_killed_node_have_failed_when_it_is_back(server: KubernetesServer, api: KubernetesClient) -> None:
    api.create(pod("dies"))
    node = until_up(api, "dies")["spec"]["nodeName"]
    server.faults.node_killed(name=node)
    assert api.get("Pod", "dies")["status"]["phase"] == "Running"
    server.faults.node_back(name=node)
    found = api.until("Pod", "dies", lambda each: each["status"]["phase"] == "Failed")
    assert found["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 255


def test_pods_of_a_stopped_kubelet_go_on(server: KubernetesServer, api: KubernetesClient) -> None:
    api.create(pod("lasts"))
    before = until_up(api, "lasts")
    server.faults.node_lost(name=before["spec"]["nodeName"])
    server.faults.node_back(name=before["spec"]["nodeName"])
    after = api.until("Pod", "lasts", lambda each: condition_of(each, "Ready")["status"] == "True")
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]


def test_full_disk_evicts(server: KubernetesServer, api: KubernetesClient) -> None:
    api.create(pod("large"))
    node = until_up(api, "large")["spec"]["nodeName"]
    server.faults.disk_full(name=node)
    found = api.until("Pod", "large", lambda each: each["status"]["phase"] == "Failed")
    assert found["status"]["reason"] == "Evicted"
    assert condition_of(found, "DisruptionTarget")["reason"] == "TerminationByKubelet"
    assert condition_of(api.get("Node", node), "DiskPressure")["status"] == "True"


def test_object_vanishes_behind_the_client(server: KubernetesServer, api: KubernetesClient) -> None:
    api.create(pod("gone"))
    until_up(api, "gone")
    server.faults.object_delete(api_version="v1", kind="Pod", namespace="default", name="gone")
    with pytest.raises(ApiError):
        api.get("Pod", "gone")


def test_evicted_pod_stays_as_failed(server: KubernetesServer, api: KubernetesClient) -> None:
    api.create(pod("evicted"))
    until_up(api, "evicted")
    server.faults.pod_evict(namespace="default", name="evicted")
    found = api.until("Pod", "evicted", lambda each: each["status"]["phase"] == "Failed")
    assert found["status"]["reason"] == "Evicted"
    assert api.log("evicted") == "up\n"


def test_disrupted_pod_is_marked_and_goes(server: KubernetesServer, api: KubernetesClient) -> None:
    made = api.create(pod("disrupted"))
    until_up(api, "disrupted")
    with api.watch("Pod", resourceVersion=made["metadata"]["resourceVersion"]) as events:
        server.faults.pod_disrupt(namespace="default", name="disrupted")
        last = next(event["object"] for event in events if event["type"] == "DELETED")
    assert condition_of(last, "DisruptionTarget")["reason"] == "PreemptionByScheduler"
    assert last["status"]["phase"] == "Failed"


def test_user_may_do_nothing_without_a_role(server: KubernetesServer, api: KubernetesClient) -> None:
    token = server.faults.user_add(name="somebody")
    somebody = api.within("default", token=token)
    with pytest.raises(ApiError) as caught:
        somebody.list("Pod")
    assert caught.value.code == 403
    server.faults.token_revoke(token=token)
    with pytest.raises(ApiError) as caught:
        somebody.list("Pod")
    assert caught.value.code == 401
    somebody.close()


def test_object_changes_behind_the_client(server: KubernetesServer, api: KubernetesClient) -> None:
    api.create(pod("changed"))
    until_up(api, "changed")
    merge = {"metadata": {"labels": {"a": "b"}}, "status": {"reason": "Odd"}}
    server.faults.object_change(api_version="v1", kind="Pod", namespace="default", name="changed", merge=merge)
    found = api.get("Pod", "changed")
    assert (found["metadata"]["labels"], found["status"]["reason"]) == ({"a": "b"}, "Odd")


def test_missing_image_is_pulled_once_it_is_there(server: KubernetesServer, api: KubernetesClient) -> None:
    server.faults.image_missing(image="any")
    made = api.create(pod("waits", "pass"))
    for reason in ("ErrImagePull", "ImagePullBackOff"):
        with api.watch("Pod", fieldSelector="metadata.name=waits") as events:
            states = (event["object"]["status"].get("containerStatuses") for event in events)
            next(each for each in states if each and each[0]["state"].get("waiting", {}).get("reason") == reason)
    with pytest.raises(ApiError) as caught:
        api.log("waits")
    assert caught.value.message.endswith("is waiting to start: trying and failing to pull image")
    assert api.events_of(made, "Failed")
    server.faults.image_present(image="any")
    api.until("Pod", "waits", lambda each: each["status"]["phase"] == "Succeeded")


def test_hidden_folder_is_empty_in_pods(server: KubernetesServer, api: KubernetesClient, hidden: Path) -> None:
    api.create(pod("looks", f"import os; print(os.listdir({str(hidden)!r}))"))
    api.until("Pod", "looks", lambda each: each["status"]["phase"] == "Succeeded")
    assert api.log("looks") == "[]\n"


def test_killed_server_takes_its_containers_along(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    with running(tmp_path, "--nodes", "1") as server:
        client = KubernetesClient(server.kubeconfig)
        client.create(pod("marked", SLEEP, mark))
        until_up(client, "marked")
        client.close()
        assert started_at(mark)
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: not started_at(mark), "the container to end")


def test_server_ends_with_its_parent(tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
import pathlib, time
from kubernetes_client import KubernetesClient
from kubernetes_server.process import running
with running(pathlib.Path({str(tmp_path)!r})) as server:
    client = KubernetesClient(server.kubeconfig)
    container = {{"name": "main", "image": "any", "command": ["sh", "-c", "sleep 600; true", {mark!r}]}}
    client.create({{"kind": "Pod", "metadata": {{"name": "a"}}, "spec": {{"containers": [container]}}}})
    print(server.pid, flush=True)
    time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: started_at(mark), "the container to run")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not started_at(mark) and not _runs(pid), "the server and its container to end")


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    return False


def test_fake_pods_follow_their_annotations(tmp_path: Path) -> None:
    with running(tmp_path, "--nodes", "3", "--fake", "--max-pods", "100") as server:
        client = KubernetesClient(server.kubeconfig)
        template = {"metadata": {"annotations": {"test.kubernetes.io/run-seconds": "0.1"}}, "spec": pod("")["spec"]}
        spec = {"template": template, "completions": 200, "parallelism": 200, "completionMode": "Indexed"}
        client.create({"kind": "Job", "metadata": {"name": "many"}, "spec": spec})
        ended = client.until_condition("Job", "many", "Complete")
        assert ended["status"]["completedIndexes"] == "0-199"
        failing = pod("fails")
        failing["metadata"]["annotations"] = {"test.kubernetes.io/phase": "Failed", "test.kubernetes.io/exit-code": "3"}
        client.create(failing)
        found = client.until("Pod", "fails", lambda each: each["status"]["phase"] == "Failed")
        assert found["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
        client.close()
