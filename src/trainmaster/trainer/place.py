"""The backend on which a client's jobs run, as the server describes it."""

from __future__ import annotations

from functools import cached_property

from trainmaster import client as api
from trainmaster.client.types import BackendSummary
from trainmaster.protocol.launch import KUBERNETES


class Place:
    """Asked once, when it first matters."""

    def __init__(self, client: api.Client, name: str | None) -> None:
        self._client = client
        self._name = name
        """None: the server's default."""

    @property
    def runs_images(self) -> bool:
        return self._backend["images"]

    @property
    def cluster(self) -> str | None:
        """Its name, where it is a Kubernetes cluster."""
        return self._backend["name"] if self._backend["kind"] == KUBERNETES else None

    @property
    def options_kind(self) -> str | None:
        """What options are told of it: their kind of backend; None: the server chooses."""
        return KUBERNETES if self.cluster is not None else self._name

    @cached_property
    def _backend(self) -> BackendSummary:
        for each in self._client.cluster.backends():
            if each["default"] if self._name is None else each["name"] == self._name:
                return each
        raise RuntimeError(f"the server at {self._client.url} has no backend {self._name or 'by default'} any more")
