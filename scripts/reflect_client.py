"""What the `tinker` package in this environment can ask of a server, read off its source; run with its own Python.

Prints a JSON object: the version, every request (method and path), and for each public method of the clients the
requests that it leads to.
"""

from __future__ import annotations

import ast
import json
import sys
from importlib import metadata
from pathlib import Path

import tinker

PREFIX = "/api/v1"
VERBS = {"get", "post", "put", "delete"}
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
RECEIVERS = {
    "holder": "InternalClientHolder",
    "rest_client": "RestClient",
    "_rest_client": "RestClient",
    "create_rest_client": "RestClient",
    "_get_rest_client_for_weights": "RestClient",
    "_admin_client": "AdminClient",
    "training_client": "TrainingClient",
}
"""What the clients call each other, and the classes that these are."""
FUTURE = "_APIFuture"
IDENTITY = "get_identity_jwt"
"""What this reads is a token that the server must have handed out, whenever that was asked for."""

Key = tuple[str, str]
"""A class, or a module for functions of none, and a name in it."""


def sources() -> dict[str, ast.Module]:
    """The modules of the package, without its tests."""
    root = Path(next(iter(tinker.__path__)))
    files = [file for file in sorted(root.rglob("*.py")) if not file.stem.endswith("_test")]
    return {
        ".".join(("tinker", *file.relative_to(root).with_suffix("").parts)): ast.parse(file.read_text())
        for file in files
    }


class Reader(ast.NodeVisitor):
    """Collects the functions of one module."""

    def __init__(self, module: str, functions: dict[Key, ast.AST]) -> None:
        self._owner = module
        self._functions = functions

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class owns its functions; those of the resources are found by their module's name."""
        before = self._owner
        resource = before.startswith("tinker.resources.") and node.name.endswith("Resource")
        self._owner = before.rpartition(".")[2] if resource else node.name
        self.generic_visit(node)
        self._owner = before

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._functions[self._owner, node.name] = node  # what it holds inside belongs to it

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815


def request_of(call: ast.Call) -> str | None:
    """The request that a call makes: `POST /create_model`; None when it makes none."""
    name = call.func.attr.lstrip("_") if isinstance(call.func, ast.Attribute) else ""
    arguments = list(call.args)
    if name == "request" and arguments and isinstance(arguments[0], ast.Constant):
        name = str(arguments.pop(0).value).lower()
    path = template(arguments[0]) if arguments else None
    return f"{name.upper()} {path.removeprefix(PREFIX)}" if name in VERBS and path else None


def template(node: ast.expr) -> str | None:
    """A path below the prefix, with `{}` for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    else:
        return None
    return text if text.startswith(PREFIX) else None


def callee(call: ast.Call, owner: str) -> Key | None:
    """The function that a call leads to, as far as names tell."""
    if not isinstance(call.func, ast.Attribute):
        return None
    receiver = call.func.value
    if isinstance(receiver, ast.Call):
        receiver = receiver.func
    last = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
    return (owner if last == "self" else RECEIVERS.get(last, last), call.func.attr)


def requests_of(key: Key, functions: dict[Key, ast.AST], seen: set[Key]) -> set[str]:
    """All requests that a function leads to."""
    if key in seen or key not in functions:
        return set()
    seen.add(key)
    found: set[str] = set()
    for node in ast.walk(functions[key]):
        if isinstance(node, ast.Call):
            if made := request_of(node):
                found.add(made)
            if isinstance(node.func, ast.Name) and node.func.id == FUTURE:
                found.add("POST /retrieve_future")
            if isinstance(node.func, ast.Attribute) and node.func.attr == IDENTITY:
                found.add("POST /auth/token")
            if leads_to := callee(node, key[0]):
                found |= requests_of(leads_to, functions, seen)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
            # Functions are also handed on, to be called later.
            found |= requests_of((key[0], node.attr), functions, seen)
    return found


def main() -> int:
    """Print what there is."""
    functions: dict[Key, ast.AST] = {}
    modules = sources()
    for name, module in modules.items():
        Reader(name, functions).visit(module)
    requests = {
        made
        for module in modules.values()
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and (made := request_of(node))
    }
    methods = {
        f"{name}.{method}": sorted(requests_of((name, method), functions, set()))
        for name, method in functions
        if name in CLIENTS and not method.startswith("_") and not method.endswith("_async")
    }
    json.dump({"version": metadata.version("tinker"), "requests": sorted(requests), "methods": methods}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
