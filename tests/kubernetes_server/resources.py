"""Which resources the server has: the built-in ones, and those that a CustomResourceDefinition adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kubernetes_server.objects import Object

CORE = ""
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")
StoreKey = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    has_status: bool = False
    has_generation: bool = False
    """Whether changes of the specification count up `metadata.generation`."""
    subresources: tuple[tuple[str, str, str], ...] = ()
    """Name, kind and verbs (separated by commas) of each subresource other than status."""
    custom: bool = False
    columns: tuple[tuple[str, str, str], ...] = ()
    """Name, type and JSON path of each column that a CustomResourceDefinition prints."""
    defaults_to_background: bool = True
    schema: Object = field(default_factory=dict, compare=False)
    """Of a custom resource, as its CustomResourceDefinition has it."""

    @property
    def store_key(self) -> StoreKey:
        """All versions of a resource share their objects."""
        return self.group, self.plural

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def singular(self) -> str:
        return self.kind.lower()


def _core(plural: str, kind: str, **fields: Any) -> Resource:
    return Resource(group=CORE, version="v1", plural=plural, kind=kind, **fields)


NAMESPACES = _core("namespaces", "Namespace", namespaced=False, short_names=("ns",), has_status=True)
NODES = _core("nodes", "Node", namespaced=False, short_names=("no",), has_status=True)
PODS = _core(
    "pods",
    "Pod",
    short_names=("po",),
    categories=("all",),
    has_status=True,
    subresources=(("log", "Pod", "get"), ("eviction", "Eviction", "create"), ("binding", "Binding", "create")),
)
SERVICES = _core("services", "Service", short_names=("svc",), categories=("all",), has_status=True)
ENDPOINTS = _core("endpoints", "Endpoints", short_names=("ep",))
CONFIG_MAPS = _core("configmaps", "ConfigMap", short_names=("cm",))
SECRETS = _core("secrets", "Secret")
EVENTS = _core("events", "Event", short_names=("ev",))
SERVICE_ACCOUNTS = _core(
    "serviceaccounts", "ServiceAccount", short_names=("sa",), subresources=(("token", "TokenRequest", "create"),)
)
CLAIMS = _core("persistentvolumeclaims", "PersistentVolumeClaim", short_names=("pvc",), has_status=True)
JOBS = Resource(
    group="batch",
    version="v1",
    plural="jobs",
    kind="Job",
    categories=("all",),
    has_status=True,
    has_generation=True,
    defaults_to_background=False,
)
PRIORITY_CLASSES = Resource(
    group="scheduling.k8s.io",
    version="v1",
    plural="priorityclasses",
    kind="PriorityClass",
    namespaced=False,
    short_names=("pc",),
    has_generation=True,
)
LEASES = Resource(group="coordination.k8s.io", version="v1", plural="leases", kind="Lease")
DEFINITIONS = Resource(
    group="apiextensions.k8s.io",
    version="v1",
    plural="customresourcedefinitions",
    kind="CustomResourceDefinition",
    namespaced=False,
    short_names=("crd", "crds"),
    has_status=True,
    has_generation=True,
)
_RBAC = "rbac.authorization.k8s.io"
ROLES = Resource(group=_RBAC, version="v1", plural="roles", kind="Role")
ROLE_BINDINGS = Resource(group=_RBAC, version="v1", plural="rolebindings", kind="RoleBinding")
CLUSTER_ROLES = Resource(group=_RBAC, version="v1", plural="clusterroles", kind="ClusterRole", namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(
    group=_RBAC, version="v1", plural="clusterrolebindings", kind="ClusterRoleBinding", namespaced=False
)
REVIEWS = Resource(
    group="authorization.k8s.io",
    version="v1",
    plural="selfsubjectaccessreviews",
    kind="SelfSubjectAccessReview",
    namespaced=False,
)
"""Only created, never stored."""

BUILT_IN = (
    NAMESPACES, NODES, PODS, SERVICES, ENDPOINTS, CONFIG_MAPS, SECRETS, EVENTS, SERVICE_ACCOUNTS, CLAIMS, JOBS,
    PRIORITY_CLASSES, LEASES, DEFINITIONS, ROLES, ROLE_BINDINGS, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS, REVIEWS,
)  # fmt: skip


class Resources:
    """All resources by group, version and plural."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, str, str], Resource] = {}
        for resource in BUILT_IN:
            self.add(resource)

    def __iter__(self) -> Iterator[Resource]:
        return iter(self._all.values())

    def add(self, resource: Resource) -> None:
        self._all[resource.group, resource.version, resource.plural] = resource

    def remove(self, group: str, plural: str) -> None:
        for place in [place for place in self._all if place[0] == group and place[2] == plural]:
            del self._all[place]

    def find(self, group: str, version: str, plural: str) -> Resource | None:
        return self._all.get((group, version, plural))

    def of_kind(self, api_version: str, kind: str) -> Resource | None:
        return next((each for each in self if each.api_version == api_version and each.kind == kind), None)

    def of_store_key(self, key: StoreKey) -> Resource:
        return next(each for each in self if each.store_key == key)

    def versions(self, group: str) -> list[str]:
        return list(dict.fromkeys(each.version for each in self if each.group == group))

    def groups(self) -> list[str]:
        return list(dict.fromkeys(each.group for each in self if each.group))


def resources_of_definition(definition: Object) -> list[Resource]:
    """One resource for each served version of a CustomResourceDefinition."""
    spec = definition["spec"]
    names = spec["names"]
    return [
        Resource(
            group=spec["group"],
            version=version["name"],
            plural=names["plural"],
            kind=names["kind"],
            namespaced=spec["scope"] == "Namespaced",
            short_names=tuple(names.get("shortNames", ())),
            categories=tuple(names.get("categories", ())),
            has_status="status" in (version.get("subresources") or {}),
            has_generation=True,
            custom=True,
            columns=tuple(
                (column["name"], column["type"], column["jsonPath"])
                for column in version.get("additionalPrinterColumns", ())
                if not column.get("priority")
            ),
            schema=(version.get("schema") or {}).get("openAPIV3Schema") or {},
        )
        for version in spec["versions"]
        if version.get("served")
    ]
