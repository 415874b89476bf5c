"""The page of all fields of a submission, read off the models that check it: `docs/reference/job-fields.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads import WorkloadSpec, kinds, spec_for

Schema = Mapping[str, Any]

LARGEST = 2**31 - 1
"""A bound that only says what a database can hold; not worth a reader's attention."""
LONGEST = 4096

INTRODUCTION = """\
# The fields of a job

This page lists all fields of a job with types and defaults; [The job file](../guides/jobs.md) explains them.
`make docs` generates it from the models that check a submission (`trainmaster.server.core.spec` and
`trainmaster.server.core.workloads`).

Unknown fields are refused with 422 and the nearest known name. A *map* is an object whose values are text; numbers and
booleans are converted to text.
"""

HEAD = "| field | type | default | meaning |\n|---|---|---|---|"


def job_fields_page() -> str:
    """A table for every part of a submission."""
    schema = SubmitJobRequest.model_json_schema()
    lines = [INTRODUCTION]
    for title, part in parts(schema):
        lines += [f"## {title}", "", part["description"], ""]
        if not part["properties"]:
            continue
        lines.append(HEAD)
        required = part.get("required", ())
        for name, field in part["properties"].items():
            default = "required" if name in required else _default(field)
            cells = (f"`{name}`", _type(field, schema), default, _meaning(field, schema))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def parts(schema: Schema) -> list[tuple[str, Schema]]:
    """Every object of a submission: its title, and its schema with the definitions that it refers to."""
    # Several kinds may have a part in common.
    return list(dict(_parts(schema)).items())


def holds_objects(field: Schema, schema: Schema) -> bool:
    """Whether a field is an object or a list of objects, which are parts of their own."""
    return any(True for _ in _objects(field, schema))


def _parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield "The submission", schema
    shared = WorkloadSpec.model_json_schema()
    yield "`workload`, every kind", shared
    yield from _below(shared, "workload.", shared)
    for kind in kinds():
        spec = spec_for(kind).model_json_schema()
        common = {**shared["properties"], "kind": spec["properties"]["kind"]}
        own = {name: field for name, field in spec["properties"].items() if common.get(name) != field}
        yield f"`workload` of kind `{kind}`", {**spec, "properties": own}
        yield from _below({"properties": own}, "workload.", spec)
    configs = {name: field for name, field in schema["properties"].items() if name != "workload"}
    yield from _below({"properties": configs}, "", schema)


def _below(part: Schema, prefix: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    for name, field in part["properties"].items():
        seen: list[Schema] = []
        for found, inside in _objects(field, schema):
            if found in seen:  # one may stand without the list around it
                continue
            seen.append(found)
            path = f"{prefix}{name}{'[]' if inside else ''}"
            chosen = found["properties"].get("type", {}).get("const")
            yield f"`{path}` of type `{chosen}`" if chosen else f"`{path}`", {**found, "$defs": schema["$defs"]}
            yield from _below(found, f"{path}.", schema)


def _objects(field: Schema, schema: Schema) -> Iterator[tuple[Schema, bool]]:
    """The objects that a field holds, and whether it holds a list of them."""
    choices = [each for any_of in field.get("anyOf", (field,)) for each in any_of.get("oneOf", (any_of,))]
    for choice in choices:
        inner = choice.get("items", choice)
        target = _target(inner, schema)
        if target is not None and "properties" in target:
            yield target, inner is not choice


def _target(field: Schema, schema: Schema) -> Schema | None:
    reference = field.get("$ref")
    found: Schema | None = schema["$defs"][reference.rpartition("/")[2]] if reference else None
    return found


def _type(field: Schema, schema: Schema) -> str:
    if "anyOf" in field:
        return " or ".join(_type(choice, schema) for choice in field["anyOf"])
    if "discriminator" in field:
        return f"an object, by its `{field['discriminator']['propertyName']}`"
    if (target := _target(field, schema)) is not None:
        return _type(target, schema)
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    match field.get("type"):
        case [*kinds]:
            return ", ".join(_type({"type": kind}, schema) for kind in kinds)
        case "string":
            longest = field.get("maxLength", LONGEST)
            return f"text (at most {longest} characters)" if longest < LONGEST else "text"
        case "integer":
            return "whole number" + _bounds(field)
        case "number":
            return "number" + _bounds(field)
        case "boolean":
            return "true or false"
        case "array":
            return f"list of {_type(field['items'], schema)}" if "items" in field else "list"
        case "object":
            return "map" if "patternProperties" in field else "object"
        case other:
            return str(other)


def _bounds(field: Schema) -> str:
    words = []
    if "minimum" in field:
        words.append(f"≥ {field['minimum']:g}")
    if "exclusiveMinimum" in field:
        words.append(f"> {field['exclusiveMinimum']:g}")
    if field.get("maximum", LARGEST) < LARGEST:
        words.append(f"≤ {field['maximum']:.0f}")
    if "exclusiveMaximum" in field:
        words.append(f"< {field['exclusiveMaximum']:g}")
    return f" ({', '.join(words)})" if words else ""


def _default(field: Schema) -> str:
    if "default" not in field:
        return "all defaults" if "$ref" in field else "`{}`"
    return f"`{json.dumps(field['default'])}`"


def _meaning(field: Schema, schema: Schema) -> str:
    target = _target(field, schema) or {}
    return str(field.get("description") or target.get("description") or "")
