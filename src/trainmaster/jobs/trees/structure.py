"""The structure of a tree as JSON, and how a saved tree is matched with a template. Knows no array library.

A tree is made of dicts (with str or int keys), lists, tuples, named tuples and, where JAX is in use, whatever
is registered with it as a node; its leaves are plain values (None, bool, int, float, str) and arrays.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Path: TypeAlias = tuple[str | int, ...]
Node: TypeAlias = Mapping[str, Any]
"""A part of tree.json: a plain value, an array or a container of nodes."""

MAX_MISMATCHES = 10
"""More mismatches than this are counted, not named."""


class TreeError(ValueError):
    """The tree cannot be saved, or what was saved does not fit the template."""


class _Anything:
    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING = _Anything()
"""In a template: take what was saved at this place as it is, with arrays in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    kind: str
    dtype: str
    shape: tuple[int, ...]
    identity: object = None
    """Two leaves of the same identity are one array, and saved once."""
    extra: Node = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    name: str
    """Unique in the tree; made from the path."""
    value: Any
    described: Described
    node: dict[str, Any]
    """Its place in tree.json, to which the writer adds the array's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedArray:
    path: Path
    node: Node
    template: Any
    """An array like the one wanted, or ANYTHING."""


Describe: TypeAlias = Callable[[object], Described | None]
"""Returns None for what is no array; raises TypeError for an array that cannot be saved."""

Build: TypeAlias = Callable[[Sequence[Any]], Any]


def describe(tree: object, array: Describe) -> tuple[Node, list[Leaf]]:
    """Turn a tree into a JSON document and a list of its arrays; TreeError names the path of what cannot be saved."""
    describing = _Describing(array)
    return describing.node(tree, ()), describing.leaves


def match(document: Node, template: object, array: Describe, *, partial: bool) -> tuple[list[WantedArray], Build]:
    """The arrays to read, and what builds the tree; TreeError: it does not fit. `partial` keeps the template then."""
    matching = _Matching(array, partial=partial)
    build = matching.build(document, template, ())
    if matching.problems:
        listed = matching.problems[:MAX_MISMATCHES]
        if len(matching.problems) > MAX_MISMATCHES:
            listed.append(f"and {len(matching.problems) - MAX_MISMATCHES} more")
        raise TreeError("the checkpoint does not fit the template:\n  " + "\n  ".join(listed))
    return matching.wanted, build


def _spell(path: Path) -> str:
    return "/".join(map(str, path)) or "the tree itself"


class _Describing:
    def __init__(self, array: Describe) -> None:
        self.leaves: list[Leaf] = []
        self._array = array
        self._names = {"__metadata__"}  # means something else in a safetensors file
        self._nodes: dict[object, dict[str, Any]] = {}
        self._above: set[int] = set()

    def node(self, value: Any, path: Path) -> dict[str, Any]:
        if (plain := _plain(value)) is not None:
            return plain
        try:
            described = self._array(value)
        except TypeError as error:
            raise TreeError(f"{_spell(path)}: a checkpoint cannot hold {error}") from error
        if described is not None:
            return self._array_node(value, described, path)
        if (children := _children(value)) is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TreeError(f"{_spell(path)}: a checkpoint cannot hold a {kind}")
        if id(value) in self._above:
            raise TreeError(f"{_spell(path)}: the tree contains itself")
        self._above.add(id(value))
        try:
            return self._container(value, children, path)
        finally:
            self._above.discard(id(value))

    def _container(self, value: Any, children: list[tuple[Any, Any]], path: Path) -> dict[str, Any]:
        form = _form(value)
        if form != "dict":
            return {form: [self.node(child, (*path, key)) for key, child in children]}
        for key, _ in children:
            if type(key) not in (str, int):
                raise TreeError(f"{_spell(path)}: a key must be a string or an integer, not {key!r}")
        return {"dict": [[key, self.node(child, (*path, key))] for key, child in children]}

    def _array_node(self, value: Any, described: Described, path: Path) -> dict[str, Any]:
        if described.identity is not None and (known := self._nodes.get(described.identity)) is not None:
            return known
        base = ".".join(map(str, path)) or "array"
        name, number = base, 1
        while name in self._names:
            name, number = f"{base}#{number}", number + 1
        self._names.add(name)
        node: dict[str, Any] = {
            "array": described.kind,
            "name": name,
            "dtype": described.dtype,
            "shape": list(described.shape),
            **described.extra,
        }
        if described.identity is not None:
            self._nodes[described.identity] = node
        self.leaves.append(Leaf(name=name, value=value, described=described, node=node))
        return node


class _Matching:
    def __init__(self, array: Describe, *, partial: bool) -> None:
        self.wanted: list[WantedArray] = []
        self.problems: list[str] = []
        self._array = array
        self._partial = partial

    def build(self, node: Node, template: Any, path: Path) -> Build:
        if template is ANYTHING:
            return self._as_saved(node, path)
        if _plain(template) is not None:
            if (value := _value(node)) is not None:
                return lambda _: value[0]
            return self._mismatch(node, template, path)
        if (described := self._array(template)) is not None:
            return self._like_array(node, template, described, path)
        if (children := _children(template)) is None:
            kind = f"{type(template).__module__}.{type(template).__qualname__}"
            self.problems.append(f"{_spell(path)}: the template has a {kind}, which no checkpoint can hold")
            return lambda _: template
        return self._like_container(node, template, children, path)

    def _like_array(self, node: Node, template: Any, described: Described, path: Path) -> Build:
        same = _family(node.get("array")) == _family(described.kind)
        if not same or (node["dtype"], tuple(node["shape"])) != (described.dtype, described.shape):
            return self._mismatch(node, template, path)
        return self._want(WantedArray(path=path, node=node, template=template))

    def _like_container(self, node: Node, template: Any, children: list[tuple[Any, Any]], path: Path) -> Build:
        form = _form(template)
        if form not in node:
            return self._mismatch(node, template, path)
        saved = _saved_children(node)
        if form != "dict" and len(saved) != len(children) and self._partial:
            return lambda _: template  # the positions of saved and wanted children do not correspond
        if not self._partial:
            wanted_keys = {key for key, _ in children}
            self.problems += [
                f"{_spell((*path, key))}: the checkpoint has it, the template has not"
                for key in saved
                if key not in wanted_keys
            ]
        builds = [
            self.build(saved[key], child, (*path, key)) if key in saved else self._missing(child, (*path, key))
            for key, child in children
        ]
        rebuild = _rebuilding(template, [key for key, _ in children])
        return lambda results: rebuild([build(results) for build in builds])

    def _as_saved(self, node: Node, path: Path) -> Build:
        if "array" in node:
            return self._want(WantedArray(path=path, node=node, template=ANYTHING))
        if (value := _value(node)) is not None:
            return lambda _: value[0]
        builds = {key: self._as_saved(child, (*path, key)) for key, child in _saved_children(node).items()}
        if "dict" in node:
            return lambda results: {key: build(results) for key, build in builds.items()}
        make: Callable[[Any], Any] = list if "list" in node else tuple
        return lambda results: make(build(results) for build in builds.values())

    def _want(self, wanted: WantedArray) -> Build:
        index = len(self.wanted)
        self.wanted.append(wanted)
        return lambda results: results[index]

    def _missing(self, template: Any, path: Path) -> Build:
        if not self._partial:
            self.problems.append(f"{_spell(path)}: the template has it, the checkpoint has not")
        return lambda _: template

    def _mismatch(self, node: Node, template: Any, path: Path) -> Build:
        if not self._partial:
            wanted = self._describe_template(template)
            self.problems.append(f"{_spell(path)}: the checkpoint has {_describe_node(node)}, the template {wanted}")
        return lambda _: template

    def _describe_template(self, template: Any) -> str:
        if (plain := _plain(template)) is not None:
            return _describe_node(plain)
        if (described := self._array(template)) is None:
            return f"a {_form(template)} of {len(_children(template) or ())}"
        return f"{described.kind} {described.dtype} {list(described.shape)}"


def _plain(value: Any) -> dict[str, Any] | None:
    """The node of a plain value, of exactly these types: an enum member would come back as something else."""
    if value is None or type(value) in (bool, int, str):
        return {"value": value}
    if type(value) is float:
        return {"value": value} if math.isfinite(value) else {"float": repr(value)}
    return None


def _value(node: Node) -> tuple[Any] | None:
    if "value" in node:
        return (node["value"],)
    return (float(node["float"]),) if "float" in node else None


def _form(value: Any) -> str:
    """The name of a container in tree.json; nodes of JAX are stored as dicts."""
    if isinstance(value, list):
        return "list"
    return "tuple" if isinstance(value, tuple) else "dict"


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    found = _jax_children(value)
    return None if found is None else [(_key(entry), child) for entry, child in found[0]]


def _rebuilding(template: Any, keys: list[Any]) -> Callable[[list[Any]], Any]:
    if isinstance(template, dict):
        make = OrderedDict if isinstance(template, OrderedDict) else dict
        return lambda children: make(zip(keys, children, strict=True))
    if isinstance(template, list):
        return lambda children: children
    if isinstance(template, tuple):
        named = getattr(type(template), "_make", None)
        return named if named is not None else tuple
    found = _jax_children(template)
    assert found is not None
    unflatten: Callable[[list[Any]], Any] = found[1].unflatten
    return unflatten


def _jax_children(value: Any) -> tuple[list[tuple[Any, Any]], Any] | None:
    """The children of a node that is registered with JAX; None for all else."""
    if (jax := sys.modules.get("jax")) is None:
        return None
    flat, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    if jax.tree_util.treedef_is_leaf(treedef):
        return None
    return [(path[0], child) for path, child in flat], treedef


def _key(entry: Any) -> str | int:
    found = next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), str(entry))
    return found if type(found) in (str, int) else str(found)


def _saved_children(node: Node) -> dict[Any, Node]:
    if "dict" in node:
        return dict(node["dict"])
    return dict(enumerate(node.get("list", node.get("tuple", ()))))


def _family(kind: str | None) -> str | None:
    """Sharded tensors can be read as whole ones, and whole ones as sharded."""
    return "torch" if kind == "torch-sharded" else kind


def _describe_node(node: Node) -> str:
    if "array" in node:
        return f"{node['array']} {node['dtype']} {node['shape']}"
    if (value := _value(node)) is not None:
        return repr(value[0])
    form = next(iter(node))
    return f"a {form} of {len(node[form])}"
