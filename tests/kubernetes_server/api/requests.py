"""A request taken apart: which resource, which object, what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import yaml
from starlette.requests import Request

from kubernetes_server.api.users import Access
from kubernetes_server.operations import APPLY_PATCH, Options
from kubernetes_server.resources import Resource, Resources
from kubernetes_server.statuses import StatusError, bad_request, no_such_resource, unsupported_media_type

BODY_LIMIT = 3 * 1024 * 1024
_READ = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_MEDIA_TYPES = ("application/json", "application/yaml", "application/vnd.kubernetes.protobuf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    resource: Resource
    namespace: str
    name: str
    subresource: str
    verb: str

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    def access(self) -> Access:
        plural = f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural
        namespace = self.name if self.resource.plural == "namespaces" else self.namespace
        return Access(verb=self.verb, group=self.resource.group, resource=plural, namespace=namespace, name=self.name)


def target_of(request: Request, resources: Resources) -> Target:
    """
    Raises:
        StatusError: there is no such resource.
    """
    parts = [part for part in request.url.path.split("/") if part]
    group, version, rest = ("", parts[1], parts[2:]) if parts[0] == "api" else (parts[1], parts[2], parts[3:])
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
        namespace, rest = rest[1], rest[2:]
    resource = resources.find(group, version, rest[0])
    if resource is None or (namespace and not resource.namespaced) or len(rest) > 3:
        raise no_such_resource()
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    known = [each[0] for each in resource.subresources] + (["status"] if resource.has_status else [])
    if (subresource and subresource not in known) or (name and resource.namespaced and not namespace):
        raise no_such_resource()
    verb = _READ.get(request.method, "")
    if verb == "get" and not name:
        verb = "watch" if truth(request, "watch") else "list"
    if verb == "delete" and not name:
        verb = "deletecollection"
    return Target(resource=resource, namespace=namespace, name=name, subresource=subresource, verb=verb)


def truth(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("true", "1")


async def body_of(request: Request) -> Any:
    """The decoded body; None if it is empty."""
    raw = await request.body()
    if len(raw) > BODY_LIMIT:
        message = f"Request entity too large: limit is {BODY_LIMIT}"
        raise StatusError(413, "RequestEntityTooLarge", message, {})
    if not raw:
        return None
    content_type = content_type_of(request)
    if "protobuf" in content_type:
        raise unsupported_media_type(content_type, _MEDIA_TYPES[:2])
    try:
        return json.loads(raw)
    except ValueError as error:
        if content_type not in (APPLY_PATCH, "application/yaml"):
            raise bad_request(f"the object provided is unrecognized: {error}") from error
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise bad_request(f"error decoding YAML: {error}") from error


def content_type_of(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip()


def options_of(request: Request, subresource: str) -> Options:
    query = request.query_params
    dry_run = query.get("dryRun", "")
    if dry_run not in ("", "All"):
        raise bad_request(f'Invalid value: "{dry_run}": must be All')
    agent = request.headers.get("user-agent", "unknown").partition("/")[0]
    is_apply = content_type_of(request) == APPLY_PATCH
    return Options(
        dry_run=dry_run == "All",
        manager=query.get("fieldManager", "" if is_apply else agent),
        force=truth(request, "force"),
        validation=query.get("fieldValidation", "Warn"),
        subresource=subresource,
    )
