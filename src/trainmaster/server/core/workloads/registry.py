"""The workload kinds that are known, and the field that holds any of them.

The union is open: a kind that was registered is accepted in requests, shown in the JSON schema and
compiled, and nothing else has to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from trainmaster.protocol.launch import Launch
from trainmaster.server.core.fields import Broken, refuse
from trainmaster.server.core.workloads.base import WorkloadSpec

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

STORED = "stored"
"""Validation context of documents that we wrote ourselves: unknown fields are ignored in them."""


class WorkloadKind(Protocol):
    """A workload kind; a module with these names is one.

    `validate` and `compile` are only called with a request whose `workload` is this kind's `Spec`.
    """

    @property
    def KIND(self) -> str:  # noqa: N802
        """What `workload.kind` says."""

    @property
    def Spec(self) -> type[WorkloadSpec]:  # noqa: N802
        """The fields of this kind; its `kind` is the literal `KIND`."""

    def validate(self, request: SubmitJobRequest) -> None:
        """Check what the fields alone do not say; raises SpecError or RefusedError."""

    def compile(self, request: SubmitJobRequest) -> Launch:
        """What to run. Pure."""
        ...


_KINDS: dict[str, WorkloadKind] = {}


def register(module: WorkloadKind) -> None:
    """Make a kind known."""
    if module.KIND in _KINDS:
        raise ValueError(f"workload kind {module.KIND!r} is registered already")
    _KINDS[module.KIND] = module


def unregister(kind: str) -> None:
    """Forget a kind."""
    del _KINDS[kind]


def kinds() -> tuple[str, ...]:
    """The names of all known kinds, sorted."""
    return tuple(sorted(_KINDS))


def module_for(kind: str) -> WorkloadKind:
    """The module of a kind; KeyError when there is none."""
    return _KINDS[kind]


class _AnyKind:
    """Reads the spec of whichever kind a document names."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Without a serializer of its own the field is written by the class of the value it holds.
        return core_schema.with_info_plain_validator_function(_read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        choices = {kind: _KINDS[kind].Spec.__pydantic_core_schema__ for kind in kinds()}
        return handler(core_schema.tagged_union_schema(choices, "kind"))


def _read(value: object, info: ValidationInfo) -> WorkloadSpec:
    if isinstance(value, WorkloadSpec):
        return value
    if not isinstance(value, dict):
        raise ValidationError.from_exception_data("workload", [InitErrorDetails(type="dict_type", input=value)])
    kind = value.get("kind")
    if kind is None:
        refuse([Broken(("kind",), f"required; choices: {', '.join(kinds())}")])
    module = _KINDS.get(kind) if isinstance(kind, str) else None
    if module is None:
        expected = ", ".join(f"'{known}'" for known in kinds())
        details = InitErrorDetails(type="literal_error", loc=("kind",), input=kind, ctx={"expected": expected})
        raise ValidationError.from_exception_data("workload", [details])
    extra: Literal["ignore", "forbid"] = "ignore" if info.context == STORED else "forbid"
    return module.Spec.model_validate(value, extra=extra, context=info.context)


AnyWorkload = Annotated[WorkloadSpec, _AnyKind()]
"""A workload of any registered kind, told apart by `kind`."""
