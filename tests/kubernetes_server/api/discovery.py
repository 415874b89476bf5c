"""Which groups, versions and resources there are: `/api`, `/apis` and what is below, `/version`, `/openapi/v3`."""

from __future__ import annotations

from typing import Any

from kubernetes_server.resources import REVIEWS, VERBS, Resource, Resources

VERSION = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0-test",
    "gitCommit": "0000000000000000000000000000000000000000",
    "gitTreeState": "clean",
    "buildDate": "2025-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}


def api_versions() -> dict[str, Any]:
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}


def group_list(resources: Resources) -> dict[str, Any]:
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group(resources, g) for g in resources.groups()]}


def group(resources: Resources, name: str) -> dict[str, Any]:
    versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in resources.versions(name)]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def resource_list(resources: Resources, api_group: str, version: str) -> dict[str, Any]:
    found = [each for each in resources if (each.group, each.version) == (api_group, version)]
    group_version = f"{api_group}/{version}" if api_group else version
    entries = [entry for resource in found for entry in _entries(resource)]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": entries}


def openapi_index(resources: Resources) -> dict[str, Any]:
    places = ["api/v1", *(f"apis/{g}/{version}" for g in resources.groups() for version in resources.versions(g))]
    return {"paths": {place: {"serverRelativeURL": f"/openapi/v3/{place}?hash=0"} for place in places}}


def openapi(resources: Resources, api_group: str, version: str) -> dict[str, Any]:
    """Schemas of custom resources only; else just enough for kubectl to see that the server validates fields itself."""
    parameters = [
        {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
        for name in ("dryRun", "fieldManager", "fieldValidation", "force")
    ]
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for resource in resources:
        if (resource.group, resource.version) != (api_group, version):
            continue
        if resource.schema:
            reverse = ".".join(reversed(resource.group.split(".")))
            schemas[f"{reverse}.{resource.version}.{resource.kind}"] = resource.schema
        kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
        prefix = f"/apis/{resource.api_version}" if resource.group else "/api/v1"
        namespaced = "/namespaces/{namespace}" if resource.namespaced else ""
        operation = {"x-kubernetes-group-version-kind": kind, "parameters": parameters, "responses": {}}
        path = f"{prefix}{namespaced}/{resource.plural}/{{name}}"
        paths[path] = {
            "patch": {**operation, "x-kubernetes-action": "patch"},
            "put": {**operation, "x-kubernetes-action": "put"},
        }
        paths[path.removesuffix("/{name}")] = {"post": {**operation, "x-kubernetes-action": "post"}}
    info = {"title": "Kubernetes", "version": VERSION["gitVersion"]}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _entries(resource: Resource) -> list[dict[str, Any]]:
    common = {"namespaced": resource.namespaced}
    entry: dict[str, Any] = {
        "name": resource.plural,
        "singularName": resource.singular,
        **common,
        "kind": resource.kind,
        "verbs": ["create"] if resource is REVIEWS else list(VERBS),
        **({"shortNames": list(resource.short_names)} if resource.short_names else {}),
        **({"categories": list(resource.categories)} if resource.categories else {}),
    }
    others = [
        {"name": f"{resource.plural}/{name}", "singularName": "", **common, "kind": kind, "verbs": verbs.split(",")}
        for name, kind, verbs in resource.subresources
    ]
    if resource.has_status:
        others.append(
            {
                "name": f"{resource.plural}/status",
                "singularName": "",
                **common,
                "kind": resource.kind,
                "verbs": ["get", "patch", "update"],
            }
        )
    return [entry, *others]
