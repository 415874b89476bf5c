"""Requests to the API server of a Kubernetes cluster, as plain documents. The official client reads the credentials."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import yaml
from kubernetes import client as official
from kubernetes import config as official_config

from trainmaster.backends.cluster.engine import EngineAwayError
from trainmaster.backends.kubernetes.options import KubernetesOptions

Object = dict[str, Any]

_config: Any = official_config
"""It has no types."""
ConfigException: type[Exception] = _config.ConfigException

TIMEOUT_S = 30.0
PAGE = 500
"""Objects of a list that are asked for at a time: thousands at once would need much memory here and there."""
WATCH_S = 300
OPENED = "OPENED"
SILENCE_S = 90.0
"""After so long without a word a watch is begun again, as it may be broken. Bookmarks come every minute, but of a kind
that nothing happens to there may be none."""
_THROTTLED_S = 20.0
"""How long a request is repeated that the API server puts off."""
_GONE = 410


class KubernetesRefusedError(Exception):
    """The API server answered that it will not do this; the message is what it said."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason

    @property
    def is_too_old(self) -> bool:
        """Whether a version is asked for that the API server no longer has."""
        return self.code == _GONE or self.reason in ("Expired", "Gone")


class KubernetesConnection:
    """Thread-safe. Raises EngineAwayError if the API server does not answer, has too much to do, or does not know who
    we are, and KubernetesRefusedError for every other answer that is no success."""

    def __init__(self, options: KubernetesOptions, *, timeout_s: float = TIMEOUT_S) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._last: _Session | None = None
        """The one before, whose requests may not have been answered."""
        self._closed = threading.Event()
        self._watched: set[httpx.Response] = set()
        self.heard_at = float("-inf")
        """When the API server last answered, or told something by itself."""

    @property
    def namespace(self) -> str:
        """That of the jobs. Raises EngineAwayError if there is no kubeconfig that says it."""
        return self._options.namespace or self._current().namespace

    @property
    def address(self) -> str:
        return str(self._current().host)

    def get(self, path: str, **parameters: Any) -> Any:
        return self._send("GET", path, parameters=parameters)

    def text(self, path: str, **parameters: Any) -> str:
        """What is no document, such as a log."""
        return str(self._send("GET", path, parameters=parameters, is_text=True))

    def create(self, path: str, body: Object) -> Any:
        """With unknown fields refused: what an overlay misspells would have no effect."""
        return self._send("POST", path, body=body, parameters={"fieldValidation": "Strict"})

    def patch(self, path: str, body: Object) -> Any:
        """A merge patch."""
        return self._send("PATCH", path, body=body, media="application/merge-patch+json")

    def delete(self, path: str, options: Object | None = None) -> Any:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **(options or {})}
        return self._send("DELETE", path, body=body)

    def pages(self, path: str, **selectors: str) -> Iterator[tuple[list[Object], str]]:
        """A list in parts, each with the version of the whole."""
        token = ""
        while True:
            parameters = {**selectors, "limit": PAGE, **({"continue": token} if token else {})}
            answer = self.get(path, **parameters)
            head = answer.get("metadata") or {}
            yield answer.get("items") or [], str(head.get("resourceVersion", ""))
            token = head.get("continue") or ""
            if not token:
                return

    def watch(self, path: str, version: str, **selectors: str) -> Iterator[tuple[str, Object]]:
        """What happened since a version, as it happens, until the API server ends it: (type, object). OPENED comes
        first, with nothing, once the API server has agreed."""
        parameters = {
            **selectors,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        session = self._current()
        patience = httpx.Timeout(self._timeout_s, read=SILENCE_S)
        try:
            with session.http.stream(
                "GET",
                path,
                params=parameters,
                headers=session.headers(),
                timeout=patience,
                extensions=session.extensions,
            ) as response:
                if not response.is_success:
                    response.read()
                    if response.status_code == 401:
                        self._forget(session)
                    raise _error_of(response)
                yield OPENED, {}
                with contextlib.suppress(httpx.ReadTimeout):
                    yield from self._events(response)
        except httpx.HTTPError as error:
            raise EngineAwayError(words_of(error, session.host)) from error
        except ValueError as error:
            raise EngineAwayError(f"{session.host} sends what is no event") from error

    def _events(self, response: httpx.Response) -> Iterator[tuple[str, Object]]:
        with self._lock:
            self._watched.add(response)
        try:
            for line in response.iter_lines():
                self.heard_at = time.monotonic()
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    code, reason = int(status.get("code") or 0), str(status.get("reason") or "")
                    raise KubernetesRefusedError(code, reason, str(status.get("message") or reason))
                yield event["type"], event["object"]
        finally:
            with self._lock:
                self._watched.discard(response)

    def interrupt(self) -> None:
        """End what waits in other threads: watches and pauses. Nothing is sent any more."""
        self._closed.set()
        with self._lock:
            for response in self._watched:
                stream = response.extensions.get("network_stream")
                if stream is not None and (own := stream.get_extra_info("socket")) is not None:
                    with contextlib.suppress(OSError):
                        # The method of TLS would take away what the other thread reads from.
                        socket.socket.shutdown(own, socket.SHUT_RDWR)

    def close(self) -> None:
        self.interrupt()
        with self._lock:
            for session in (self._session, self._last):
                if session is not None:
                    session.http.close()
            self._session = self._last = None

    # -- sending --

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        media: str = "application/json",
        parameters: Mapping[str, Any] | None = None,
        is_text: bool = False,
    ) -> Any:
        content = None if body is None else json.dumps(body).encode()
        deadline = time.monotonic() + _THROTTLED_S
        renewed = False
        while True:
            session = self._current()
            headers = {**session.headers(), **({"Content-Type": media} if content is not None else {})}
            try:
                response = session.http.request(
                    method, path, content=content, params=parameters, headers=headers, extensions=session.extensions
                )
            except httpx.HTTPError as error:
                raise EngineAwayError(words_of(error, session.host)) from error
            self.heard_at = time.monotonic()
            if response.status_code == 401 and not renewed:
                # Tokens and certificates expire, and others take their place.
                self._forget(session)
                renewed = True
                continue
            pause_s = _pause_s(response)
            if pause_s is not None and time.monotonic() + pause_s < deadline and not self._closed.wait(pause_s):
                continue
            if not response.is_success:
                raise _error_of(response)
            if is_text:
                return response.text
            try:
                return response.json()
            except ValueError as error:
                message = f"{session.host} is no API server of Kubernetes: it answers with a page"
                raise EngineAwayError(message) from error

    def _current(self) -> _Session:
        with self._lock:
            if self._closed.is_set():
                raise EngineAwayError("the connection is closed")
            if self._session is None:
                self._session = _Session(self._options, self._timeout_s)
            return self._session

    def _forget(self, session: _Session) -> None:
        """Have the credentials read again."""
        with self._lock:
            if self._session is session:
                if self._last is not None:
                    self._last.http.close()
                self._session, self._last = None, session


class _Session:
    """The credentials as they were read, and connections with them."""

    def __init__(self, options: KubernetesOptions, timeout_s: float) -> None:
        self._lock = threading.Lock()
        configuration = official.Configuration()
        try:
            self.namespace = _load(options, configuration)
            self._configuration: Any = configuration
            self.host = str(configuration.host).rstrip("/")
            name = configuration.tls_server_name
            self.extensions = {"sni_hostname": name} if name else {}
            self.http = httpx.Client(
                base_url=self.host,
                verify=_tls(configuration),
                proxy=configuration.proxy or None,
                timeout=timeout_s,
                trust_env=False,
                headers={"Accept": "application/json", "User-Agent": "trainmaster"},
            )
        except (ConfigException, OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
            # A kubeconfig is written by others, at any time.
            message = f"the kubeconfig cannot be used: {error}; see the options kubeconfig and context"
            raise EngineAwayError(message) from error

    def headers(self) -> dict[str, str]:
        """Read again where they expire; that may run a program."""
        with self._lock:
            try:
                found = {str(each["key"]): str(each["value"]) for each in self._configuration.auth_settings().values()}
                if self._configuration.username:
                    found["authorization"] = self._configuration.get_basic_auth_token()
            except (ConfigException, OSError, ValueError) as error:
                raise EngineAwayError(f"the credentials of the kubeconfig cannot be renewed: {error}") from error
        return {name: value for name, value in found.items() if value}


def _load(options: KubernetesOptions, configuration: Any) -> str:
    """Read the credentials that the options name; returns the namespace that comes with them."""
    context, content = options.context or None, options.kubeconfig_content.get_secret_value()
    if content:
        document = yaml.safe_load(content)
        _config.load_kube_config_from_dict(document, context=context, client_configuration=configuration)
        namespace = _namespace_in(document, context)
    elif options.kubeconfig or not _is_in_cluster():
        path = options.kubeconfig or None
        if path is not None and not os.path.exists(path):
            raise ConfigException(f"there is no file {path} on the server")
        _config.load_kube_config(config_file=path, context=context, client_configuration=configuration)
        contexts, active = _config.list_kube_config_contexts(config_file=path)
        chosen = next((each for each in contexts if each["name"] == context), active)
        namespace = str(chosen["context"].get("namespace") or "default")
    else:
        _config.load_incluster_config(client_configuration=configuration)
        with open(f"{_SERVICE_ACCOUNT}/namespace", encoding="utf-8") as file:
            namespace = file.read().strip()
    if token := options.token.get_secret_value():
        configuration.api_key = {"authorization": f"Bearer {token}"}
        configuration.refresh_api_key_hook = None
        configuration.username = configuration.password = ""
        configuration.cert_file = configuration.key_file = None
    return namespace


_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def _is_in_cluster() -> bool:
    try:
        with open(f"{_SERVICE_ACCOUNT}/token", encoding="utf-8"):
            return True
    except OSError:
        return False


def _namespace_in(document: Mapping[str, Any], context: str | None) -> str:
    name = context or document.get("current-context")
    chosen: Mapping[str, Any] = next((each["context"] for each in document["contexts"] if each["name"] == name), {})
    return str(chosen.get("namespace") or "default")


def _tls(configuration: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    # The authorities of clusters are their own, and their certificates seldom have all that a public one needs.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def _pause_s(response: httpx.Response) -> float | None:
    """When to ask again, if the API server says that it has too much to do."""
    told = response.headers.get("retry-after", "")
    if response.status_code == 429:
        return float(told) if told.isdigit() else 1.0
    return float(told) if response.status_code == 503 and told.isdigit() else None


def _error_of(response: httpx.Response) -> Exception:
    try:
        status = response.json()
    except ValueError:
        status = {}
    if not isinstance(status, dict):
        status = {}
    code, reason = response.status_code, str(status.get("reason") or "")
    message = str(status.get("message") or response.text.strip()[:500] or response.reason_phrase)
    if code == 401:
        return EngineAwayError(f"the API server does not accept our credentials: {message}")
    if code == 429:
        return EngineAwayError(f"the API server has too many requests: {message}")
    if code >= 500:
        return EngineAwayError(f"the API server answers with status {code}: {message}")
    return KubernetesRefusedError(code, reason, message)


def words_of(error: httpx.HTTPError, host: str) -> str:
    words = f"{host}: {type(error).__name__}: {error}".rstrip(": ")
    if "CERTIFICATE_VERIFY_FAILED" in words:
        return f"{words}; the kubeconfig has to have the authority of the cluster (certificate-authority-data)"
    if isinstance(error, httpx.ConnectError):
        return f"{words}; is the cluster up, and the address in the kubeconfig right?"
    return words
