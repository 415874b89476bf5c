"""The registered workload kinds, the field that holds any of them, and the launch of a request of any kind.

The union is open: a kind that was registered is accepted in requests, shown in the JSON schema and compiled, and
nothing else has to change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from trainmaster.protocol.launch import Launch
from trainmaster.server.core.fields import STORED, Broken, refuse
from trainmaster.server.core.training.types import FrameworkType
from trainmaster.server.core.workloads.base import WorkloadSpec
from trainmaster.server.core.workloads.script import ScriptSpec
from trainmaster.server.core.workloads.trainer import (
    FETCH,
    TRAINING_FILE,
    TrainerSpec,
    check_shipped,
    configs_of,
    is_training,
    training_text,
)

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest


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


if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

_SHARED = WorkloadSpec.model_fields.keys() - {"kind"}


def effective_workload(request: SubmitJobRequest) -> WorkloadSpec:
    """The workload that a request names, or the one that its training stands for: a trainer, or a CUSTOM script."""
    named = request.workload
    if named is not None and not is_training(named):
        return named
    framework = configs_of(request)[0].framework
    shared = {name: getattr(named, name) for name in _SHARED} if named is not None else {}
    shared["ranks_per_node"] = request.ranks_per_node
    if framework.custom_script_path is not None:
        return ScriptSpec(kind="script", path=framework.custom_script_path).model_copy(update=shared)
    return TrainerSpec(kind="trainer").model_copy(update=shared)


def validate_workload(request: SubmitJobRequest) -> None:
    """Check what the workload's kind knows and its fields do not say.

    Raises:
        SpecError: something is wrong with it.
        RefusedError: it asks for something that is not available.
    """
    if _is_custom(request):
        check_shipped(request)
    else:
        workload = effective_workload(request)
        module_for(workload.kind).validate(_running(request, workload))


def compile_launch(request: SubmitJobRequest) -> Launch:
    """What to run. Pure: the same request always gives the same launch."""
    workload = effective_workload(request)
    launch = module_for(workload.kind).compile(_running(request, workload))
    if not _is_custom(request):
        return launch
    inputs = {**launch.inputs, TRAINING_FILE: training_text(request)}
    return replace(launch, steps=(FETCH, *launch.steps), inputs=inputs)


def _running(request: SubmitJobRequest, workload: WorkloadSpec) -> SubmitJobRequest:
    return request if request.workload is workload else request.model_copy(update={"workload": workload})


def _is_custom(request: SubmitJobRequest) -> bool:
    training = request.training_config
    return is_training(request.workload) and training is not None and training.framework.type is FrameworkType.CUSTOM
