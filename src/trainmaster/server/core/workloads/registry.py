"""The registered workload kinds, and the field that holds a spec of any of them.

The union is open: a kind that was registered is accepted in requests, shown in the JSON schema and compiled, and
nothing else has to change.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from trainmaster.server.core.fields import STORED, Broken, refuse
from trainmaster.server.core.workloads.base import WorkloadSpec

_KINDS: dict[str, type[WorkloadSpec]] = {}


def register(spec: type[WorkloadSpec]) -> None:
    (kind,) = get_args(spec.model_fields["kind"].annotation)
    if kind in _KINDS:
        raise ValueError(f"workload kind {kind!r} is registered already")
    _KINDS[kind] = spec


def unregister(kind: str) -> None:
    del _KINDS[kind]


def kinds() -> tuple[str, ...]:
    """The names of all registered kinds, sorted."""
    return tuple(sorted(_KINDS))


def spec_for(kind: str) -> type[WorkloadSpec]:
    """The spec of a kind; KeyError when none is registered."""
    return _KINDS[kind]


class _AnyKind:
    """Reads the spec of whichever kind a document names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Without a serializer of its own the field is written by the class of the value it holds.
        return core_schema.with_info_plain_validator_function(_read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        choices = {kind: _KINDS[kind].__pydantic_core_schema__ for kind in kinds()}
        return handler(core_schema.tagged_union_schema(choices, "kind"))


def _read(value: object, info: ValidationInfo) -> WorkloadSpec:
    if isinstance(value, WorkloadSpec):
        return value
    if not isinstance(value, dict):
        raise ValidationError.from_exception_data("workload", [InitErrorDetails(type="dict_type", input=value)])
    kind = value.get("kind")
    if kind is None:
        refuse([Broken(("kind",), f"required; choices: {', '.join(kinds())}")])
    spec = _KINDS.get(kind) if isinstance(kind, str) else None
    if spec is None:
        expected = ", ".join(f"'{known}'" for known in kinds())
        details = InitErrorDetails(type="literal_error", loc=("kind",), input=kind, ctx={"expected": expected})
        raise ValidationError.from_exception_data("workload", [details])
    extra: Literal["ignore", "forbid"] = "ignore" if info.context == STORED else "forbid"
    return spec.model_validate(value, extra=extra, context=info.context)


AnyWorkload = Annotated[WorkloadSpec, _AnyKind()]
"""A workload of any registered kind, told apart by `kind`."""
