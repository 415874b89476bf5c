"""The Kubernetes cluster that a client means: found in its kubeconfig, and declared on the server, once.

A server on this machine reads the kubeconfig where it is. Any other gets the credentials of one context, which it
stores encrypted and never shows.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainmaster import client as api
from trainmaster.client.types import BackendSummary
from trainmaster.plain_yaml import YamlError, parse_yaml
from trainmaster.protocol.launch import KUBERNETES

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "default"
_LONGEST_NAMESPACE = 18
"""Of a namespace, in the name of a cluster, which has at most 32 characters."""
_FILES = {"certificate-authority": "certificate-authority-data"}
_USER_FILES = {"client-certificate": "client-certificate-data", "client-key": "client-key-data"}
_PROGRAMS = ("exec", "auth-provider")
"""Credentials that a program makes anew each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCluster:
    """A cluster, by how to reach it from here."""

    shown: str
    """What messages call it."""
    namespace: str
    identity: str
    """Tells it from other clusters, and other users of the same one."""
    file: Path | None = None
    """The kubeconfig, where it is one file."""
    context: str = ""
    document: Mapping[str, Any] | None = field(default=None, repr=False)
    """A kubeconfig with one context and its credentials. None: the service account of this pod."""

    @property
    def name(self) -> str:
        """What a server calls it that learns of it from a client: the same for every client with this configuration."""
        digest = hashlib.sha256(f"{self.identity}\0{self.namespace}".encode()).hexdigest()
        return f"k8s-{self.namespace[:_LONGEST_NAMESPACE].strip('-.')}-{digest[:8]}"

    def options(self, *, here: bool) -> dict[str, Any]:
        """What a server is told of it; `here`: the server is of this machine and user. Raises ValueError."""
        common = {"namespace": self.namespace}
        if here and self.file is not None:
            return {**common, "kubeconfig": str(self.file), "context": self.context}
        if self.document is None:
            if here:
                return common
            raise ValueError(
                f"{self.shown} is reached with the service account of this pod, whose token soon expires elsewhere: "
                "have the operator of the server declare the cluster (`trainmaster backends add`)"
            )
        user = self.document["users"][0]["user"]
        if not here and (program := next((each for each in _PROGRAMS if each in user), None)):
            raise ValueError(
                f"the credentials of {self.shown} come from a program ({program}), which a server elsewhere cannot "
                "run: use a context with a token or a client certificate, such as that of a service account"
            )
        return {**common, "kubeconfig_content": json.dumps(self.document)}

    def is_declared_as(self, options: Mapping[str, Any]) -> bool:
        """Whether a server of this machine has it by these options."""
        if options.get("kubeconfig_content") or options.get("token") or options.get("namespace") != self.namespace:
            return False
        path = options.get("kubeconfig") or ""
        if self.file is None:
            return not path and self.document is None
        same_file = bool(path) and os.path.realpath(path) == os.path.realpath(self.file)
        return same_file and (options.get("context") or self.context) == self.context


def find_cluster(
    *,
    environment: Mapping[str, str],
    home: Path,
    in_cluster: bool,
    config_file: str | None = None,
    context: str | None = None,
    namespace: str | None = None,
) -> WantedCluster | None:
    """The cluster that Kubeflow's client would use; None: there is none. Raises ValueError if a file that is named
    cannot be used."""
    if in_cluster and config_file is None and context is None:
        return _of_this_pod(environment, namespace)
    if config_file is not None:
        files = [Path(config_file).expanduser().absolute()]
    else:
        named = [Path(part) for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
        files = [path.absolute() for path in named] or [home / ".kube" / "config"]
    documents = [(path, document) for path in files if (document := _read(path, required=config_file is not None))]
    chosen = context or next((str(each["current-context"]) for _, each in documents if each.get("current-context")), "")
    if not chosen:
        if config_file is not None:
            raise ValueError(f"{config_file} has no current-context: name one as `context`")
        return None
    return _of_context(documents, chosen, namespace)


def cluster_of_configuration(configuration: Any, namespace: str | None) -> WantedCluster:
    """The cluster of a `kubernetes.client.Configuration`."""
    host = str(configuration.host).rstrip("/")
    cluster: dict[str, Any] = {"server": host}
    if configuration.ssl_ca_cert:
        cluster["certificate-authority-data"] = _encoded(Path(configuration.ssl_ca_cert))
    if not configuration.verify_ssl:
        cluster["insecure-skip-tls-verify"] = True
    if getattr(configuration, "tls_server_name", None):
        cluster["tls-server-name"] = configuration.tls_server_name
    if configuration.proxy:
        cluster["proxy-url"] = configuration.proxy
    user: dict[str, Any] = {}
    headers = {str(each["key"]).lower(): str(each["value"]) for each in configuration.auth_settings().values()}
    if token := headers.get("authorization", "").removeprefix("Bearer ").strip():
        user["token"] = token
    if configuration.username:
        user |= {"username": configuration.username, "password": configuration.password}
    if configuration.cert_file:
        user["client-certificate-data"] = _encoded(Path(configuration.cert_file))
    if configuration.key_file:
        user["client-key-data"] = _encoded(Path(configuration.key_file))
    return WantedCluster(
        shown=f"the Kubernetes cluster at {host}",
        namespace=namespace or DEFAULT_NAMESPACE,
        identity=host,
        context="client",
        document=_one_context("client", cluster, user),
    )


def declare(client: api.Client, wanted: WantedCluster, *, here: bool) -> str:
    """The name of the server's backend for a cluster; declared where the server does not have it.

    Raises ValueError if the server does not take it, RuntimeError if the cluster cannot be used now, and ClientError.
    """
    found = _found(client.cluster.backends(), wanted, here=here)
    if found is None:
        _put(client, wanted.name, wanted.options(here=here))
        if problem := _problem(client, wanted.name):
            with contextlib.suppress(api.ClientError):
                client.cluster.remove_backend(wanted.name)  # it would be there for everybody, and be of no use
            raise RuntimeError(f"{wanted.shown}: {problem}")
        return wanted.name
    problem = _problem(client, found)
    if problem and found == wanted.name:
        # Credentials change; what an operator has set beside them stays.
        before = client.cluster.backend(found)["options"] or {}
        _put(client, found, {**_set(before), **wanted.options(here=here)})
        problem = _problem(client, found)
    if problem:
        raise RuntimeError(f"{wanted.shown}: {problem}")
    return found


def _found(backends: Sequence[BackendSummary], wanted: WantedCluster, *, here: bool) -> str | None:
    clusters = [each for each in backends if each["kind"] == KUBERNETES]
    same = (each["name"] for each in clusters if here and wanted.is_declared_as(each["options"] or {}))
    by_name = (each["name"] for each in clusters if each["name"] == wanted.name)
    return next(iter([*by_name, *same]), None)


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were set, of those that are shown; where a cluster is may have changed."""
    where = ("kubeconfig", "kubeconfig_content", "context")
    return {name: value for name, value in options.items() if value is not None and name not in where}


def _put(client: api.Client, name: str, options: Mapping[str, Any]) -> None:
    if "kubeconfig_content" in options and not _is_secret_on_the_way(client.url):
        raise ValueError(
            f"credentials of a cluster are not sent to {client.url}, where others could read them on the way: use a "
            "server with https, or have its operator add the cluster (`trainmaster backends add NAME --kind "
            "kubernetes ...`), and pass ServerBackendConfig(url=..., backend=NAME)"
        )
    try:
        client.cluster.put_backend(name, kind=KUBERNETES, options=options)
    except api.ForbiddenError as error:
        raise ValueError(
            f"this key may not add a cluster to the server at {client.url}: have its operator add it (`trainmaster "
            "backends add NAME --kind kubernetes ...`), and pass ServerBackendConfig(url=..., backend=NAME)"
        ) from error
    except (api.InvalidError, api.RefusedError) as error:
        said = "; ".join(problem.message for problem in error.problems) or str(error)
        raise ValueError(f"the server at {client.url} cannot use the cluster: {said}") from error


def _is_secret_on_the_way(url: str) -> bool:
    parts = urlsplit(url)
    try:
        is_here = ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        is_here = parts.hostname == "localhost"
    return parts.scheme == "https" or is_here


def _problem(client: api.Client, name: str) -> str | None:
    engine = client.cluster.backend(name)["engine"]
    return engine["problem"] if engine is not None else None


def _of_this_pod(environment: Mapping[str, str], namespace: str | None) -> WantedCluster:
    if namespace is None:
        try:
            namespace = (SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip()
        except OSError:
            namespace = DEFAULT_NAMESPACE
    return WantedCluster(
        shown="the Kubernetes cluster that this process runs in",
        namespace=namespace,
        identity=f"pod:{environment.get('KUBERNETES_SERVICE_HOST', '')}",
    )


def _read(path: Path, *, required: bool) -> Mapping[str, Any] | None:
    """None: none that Kubeflow's client could use either."""
    try:
        document = parse_yaml(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError, YamlError) as error:
        if required:
            raise ValueError(f"the kubeconfig {path} cannot be read: {error}") from error
        return None
    if isinstance(document, Mapping):
        return document
    if required:
        raise ValueError(f"{path} is no kubeconfig")
    return None


def _of_context(documents: Sequence[tuple[Path, Mapping[str, Any]]], name: str, namespace: str | None) -> WantedCluster:
    path, context = _entry(documents, "context", name)
    cluster_path, cluster = _entry(documents, "cluster", str(context.get("cluster")))
    user_path, user = _entry(documents, "user", str(context.get("user")))
    cluster, user = _inlined(cluster, _FILES, cluster_path.parent), _inlined(user, _USER_FILES, user_path.parent)
    if token := user.pop("tokenFile", None):
        user["token"] = _text(user_path.parent / token).strip()
    return WantedCluster(
        shown=f"the Kubernetes context {name!r} of {path}",
        namespace=namespace or str(context.get("namespace") or DEFAULT_NAMESPACE),
        identity=f"{cluster.get('server')} {context.get('user')}",
        file=path if len({path, cluster_path, user_path}) == 1 else None,
        context=name,
        document=_one_context(name, cluster, user),
    )


def _entry(documents: Sequence[tuple[Path, Mapping[str, Any]]], kind: str, name: str) -> tuple[Path, dict[str, Any]]:
    """Of several files, the first that has it counts."""
    for path, document in documents:
        for each in document.get(f"{kind}s") or ():
            if isinstance(each, Mapping) and str(each.get("name")) == name and isinstance(each.get(kind), Mapping):
                return path, dict(each[kind])
    known = ", ".join(_names(documents, kind)) or "none"
    files = ", ".join(str(path) for path, _ in documents) or "the kubeconfig"
    raise ValueError(f"{files}: there is no {kind} {name!r}; there are: {known}")


def _names(documents: Sequence[tuple[Path, Mapping[str, Any]]], kind: str) -> Iterator[str]:
    for _, document in documents:
        yield from (str(each["name"]) for each in document.get(f"{kind}s") or () if isinstance(each, Mapping))


def _inlined(entry: Mapping[str, Any], files: Mapping[str, str], directory: Path) -> dict[str, Any]:
    """With the content of files in place of their paths."""
    found = dict(entry)
    for name, instead in files.items():
        path = found.pop(name, None)
        if path and instead not in found:
            found[instead] = _encoded(directory / str(path))
    return found


def _encoded(path: Path) -> str:
    return base64.b64encode(_text(path).encode()).decode()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, which the kubeconfig names, cannot be read: {error}") from error


def _one_context(name: str, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": dict(cluster)}],
        "users": [{"name": name, "user": dict(user)}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }
