"""A client of a Kubernetes API for tests: plain requests, from a kubeconfig."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from patience import PATIENCE_S

Object = dict[str, Any]
Objects = list[Object]
_PLURALS = {"Endpoints": "endpoints", "PriorityClass": "priorityclasses"}
_CLUSTER_SCOPED = (
    "Namespace",
    "Node",
    "PriorityClass",
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "ClusterTrainingRuntime",
)
_GROUPS = {
    "Job": "batch/v1",
    "PriorityClass": "scheduling.k8s.io/v1",
    "Lease": "coordination.k8s.io/v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
}


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(f"{response.request.method} {response.request.url}: {response.status_code} {response.text}")
        self.code = response.status_code
        self.headers = response.headers
        self.status: Object = response.json() if "json" in response.headers.get("content-type", "") else {}

    @property
    def reason(self) -> str:
        return str(self.status.get("reason"))

    @property
    def message(self) -> str:
        return str(self.status.get("message"))


class KubernetesClient:
    def __init__(self, kubeconfig: Path, namespace: str = "default", *, token: str = "") -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        context = _named(document["contexts"], document["current-context"])["context"]
        cluster = _named(document["clusters"], context["cluster"])["cluster"]
        user = _named(document["users"], context["user"])["user"]
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        token = token or user.get("token", "")
        self.http = httpx.Client(
            base_url=cluster["server"],
            verify=_tls(cluster, {} if token else user),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "tests/1"}
            if token
            else {"User-Agent": "tests/1"},
            timeout=PATIENCE_S,
            trust_env=False,
        )

    def within(self, namespace: str, *, token: str = "") -> KubernetesClient:
        return KubernetesClient(self.kubeconfig, namespace, token=token)

    def close(self) -> None:
        self.http.close()

    # -- requests --

    def answer(self, method: str, path: str, body: Any = None, *, media: str = "json", **query: Any) -> httpx.Response:
        """The answer to a request, a success.

        Raises:
            ApiError: it is none.
        """
        content = None if body is None else json.dumps(body)
        kinds = {"json": "application/json", "apply": "application/apply-patch+yaml"}
        kind = kinds.get(media, f"application/{media.removesuffix('-patch')}-patch+json")
        headers = {"Content-Type": kind} if content is not None else {}
        response = self.http.request(method, path, content=content, params=query, headers=headers)
        if not response.is_success:
            raise ApiError(response)
        return response

    def ask(self, method: str, path: str, body: Any = None, *, media: str = "json", **query: Any) -> Any:
        return self.answer(method, path, body, media=media, **query).json()

    def path(self, kind: str, name: str = "", api_version: str = "") -> str:
        version = api_version or _GROUPS.get(kind, "v1")
        prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
        place = "" if kind in _CLUSTER_SCOPED else f"/namespaces/{self.namespace}"
        plural = _PLURALS.get(kind, f"{kind.lower()}s")
        return f"{prefix}{place}/{plural}" + (f"/{name}" if name else "")

    def create(self, obj: Object, **query: Any) -> Object:
        obj = {"apiVersion": _GROUPS.get(obj["kind"], "v1"), **obj}
        answer: Object = self.ask("POST", self.path(obj["kind"], api_version=obj["apiVersion"]), obj, **query)
        return answer

    def get(self, kind: str, name: str) -> Object:
        answer: Object = self.ask("GET", self.path(kind, name))
        return answer

    def list(self, kind: str, **query: Any) -> list[Object]:
        items: list[Object] = self.ask("GET", self.path(kind), **query)["items"]
        return items

    def replace(self, obj: Object) -> Object:
        answer: Object = self.ask("PUT", self.path(obj["kind"], obj["metadata"]["name"]), obj)
        return answer

    def patch(self, kind: str, name: str, patch: Any, media: str = "merge", below: str = "", **query: Any) -> Object:
        answer: Object = self.ask("PATCH", self.path(kind, name) + below, patch, media=media, **query)
        return answer

    def delete(self, kind: str, name: str, **options: Any) -> Object:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        answer: Object = self.ask("DELETE", self.path(kind, name), body)
        return answer

    def log(self, pod: str, **query: Any) -> str:
        return self.answer("GET", f"{self.path('Pod', pod)}/log", **query).text

    @contextlib.contextmanager
    def watch(self, kind: str, **query: Any) -> Iterator[Iterator[Object]]:
        """The events of a watch, as they come."""
        params = {"watch": "true", "timeoutSeconds": int(PATIENCE_S), **query}
        with self.http.stream("GET", self.path(kind), params=params) as response:
            assert response.is_success, response.read()
            yield (json.loads(line) for line in response.iter_lines())

    # -- waiting --

    def until(self, kind: str, name: str, holds: Callable[[Object], Any], timeout_s: float = PATIENCE_S) -> Object:
        """An object, once something is true of it."""
        found: Object = wait_for(
            lambda: (obj := self.get(kind, name)) and holds(obj) and obj, f"{kind} {name}", timeout_s
        )
        return found

    def until_gone(self, kind: str, name: str) -> None:
        def gone() -> bool:
            try:
                self.get(kind, name)
            except ApiError as error:
                return error.code == 404
            return False

        wait_for(gone, f"{kind} {name} to go")

    def until_condition(self, kind: str, name: str, condition: str) -> Object:
        return self.until(kind, name, lambda obj: condition_of(obj, condition).get("status") == "True")

    def pods_of(self, job: str, count: int = 1) -> Objects:
        """The pods of a job, once there are that many."""
        query = {"labelSelector": f"job-name={job}"}
        return list(
            wait_for(lambda: len(pods := self.list("Pod", **query)) >= count and pods, f"{count} pods of {job}")
        )

    def events_of(self, obj: Object, reason: str) -> Objects:
        """The events of an object that have a reason, once there are any."""
        selector = f"involvedObject.uid={obj['metadata']['uid']},reason={reason}"
        return list(
            wait_for(lambda: self.list("Event", fieldSelector=selector), f"{reason} of {obj['metadata']['name']}")
        )


def condition_of(obj: Object, kind: str) -> Object:
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), {})


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of a condition that becomes true by itself."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)
    return value


def _named(entries: list[Object], name: str) -> Object:
    return next(entry for entry in entries if entry["name"] == name)


def _tls(cluster: Object, user: Object) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority")
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    certificate, key = _content(user, "client-certificate"), _content(user, "client-key")
    if certificate and key:
        with tempfile.NamedTemporaryFile() as file:
            file.write(certificate + b"\n" + key)
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _content(entry: Object, name: str) -> bytes:
    if data := entry.get(f"{name}-data"):
        return base64.b64decode(data)
    return Path(entry[name]).read_bytes() if name in entry else b""
