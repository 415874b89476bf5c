"""Who asks, and what they may do: bearer tokens, roles, and denials on demand."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kubernetes_server.objects import Object
from kubernetes_server.resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, ROLES, Resource
from kubernetes_server.statuses import StatusError, forbidden, unauthorized
from kubernetes_server.store import Store

MASTERS, EVERYBODY = "system:masters", "system:authenticated"


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One thing that somebody wants to do."""

    verb: str
    group: str
    resource: str
    """With its subresource: `pods/log`."""
    namespace: str = ""
    name: str = ""


OWN_RIGHTS = Access(verb="create", group="authorization.k8s.io", resource="selfsubjectaccessreviews")
"""Whoever has a token may ask what it allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denial:
    """A rule of a test that refuses what roles allow; an empty field or `*` is anything."""

    user: str = ""
    verb: str = ""
    resource: str = ""
    namespace: str = ""

    def covers(self, user: User, access: Access) -> bool:
        pairs = (
            (self.user, user.name),
            (self.verb, access.verb),
            (self.resource, access.resource),
            (self.namespace, access.namespace),
        )
        return all(wanted in ("", "*", found) for wanted, found in pairs)


@dataclass
class Users:
    store: Store
    denials: list[Denial] = field(default_factory=list)
    asked: dict[str, Counter[Access]] = field(default_factory=dict)
    """By the name of the user: what each has tried how often, without the names of objects."""
    _tokens: dict[str, User] = field(default_factory=dict)

    def add(self, user: User) -> str:
        """A token for a user."""
        token = secrets.token_urlsafe(24)
        self._tokens[token] = user
        return token

    def revoke(self, token: str) -> None:
        self._tokens.pop(token, None)

    def of(self, authorization: str) -> User:
        kind, _, token = authorization.partition(" ")
        if kind.lower() != "bearer" or token not in self._tokens:
            raise unauthorized()
        return self._tokens[token]

    def authorize(self, user: User, access: Access, resource: Resource) -> None:
        """
        Raises:
            StatusError: 403.
        """
        self.asked.setdefault(user.name, Counter())[replace(access, name="")] += 1
        if not self.allows(user, access):
            raise self.refusal(user, access, resource)

    def allows(self, user: User, access: Access) -> bool:
        if any(denial.covers(user, access) for denial in self.denials):
            return False
        if MASTERS in user.groups or (EVERYBODY in user.groups and access == OWN_RIGHTS):
            return True
        return any(_grants(rule, access) for rule in self._rules(user, access.namespace))

    def refusal(self, user: User, access: Access, resource: Resource) -> StatusError:
        where = f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
        return forbidden(
            resource,
            access.name,
            f'User "{user.name}" cannot {access.verb} resource "{access.resource}" '
            f'in API group "{access.group}" {where}',
        )

    def _rules(self, user: User, namespace: str) -> Iterator[Object]:
        for binding in self.store.objects(CLUSTER_ROLE_BINDINGS.store_key):
            if _binds(binding, user):
                yield from self._rules_of(binding, "")
        if namespace:
            for binding in self.store.objects(ROLE_BINDINGS.store_key, namespace):
                if _binds(binding, user):
                    yield from self._rules_of(binding, namespace)

    def _rules_of(self, binding: Object, namespace: str) -> list[Object]:
        reference = binding["roleRef"]
        if reference["kind"] == "ClusterRole":
            role = self.store.get(CLUSTER_ROLES.store_key, ("", reference["name"]))
        else:
            role = self.store.get(ROLES.store_key, (namespace, reference["name"]))
        return (role or {}).get("rules") or []


def service_account(namespace: str, name: str) -> User:
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", EVERYBODY)
    return User(f"system:serviceaccount:{namespace}:{name}", groups)


def _binds(binding: Object, user: User) -> bool:
    for subject in binding.get("subjects") or ():
        match subject["kind"]:
            case "User" if subject["name"] == user.name:
                return True
            case "Group" if subject["name"] in user.groups:
                return True
            case "ServiceAccount":
                namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
                if user.name == f"system:serviceaccount:{namespace}:{subject['name']}":
                    return True
    return False


def _grants(rule: dict[str, Any], access: Access) -> bool:
    names = rule.get("resourceNames")
    return (
        _has(rule.get("verbs"), access.verb)
        and _has(rule.get("apiGroups"), access.group)
        and _has(rule.get("resources"), access.resource)
        and (not names or access.name in names)
    )


def _has(allowed: list[str] | None, wanted: str) -> bool:
    return wanted in (allowed or ()) or "*" in (allowed or ())
