"""The strict base model, and the field types of specs. Stands below `core.spec` and `core.workloads`, so that a job
spec can hold workloads without a circle."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    JsonValue,
    Strict,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from trainmaster.protocol.environment import RESERVED_PREFIX

MAX_RANKS_PER_NODE = 1024
"""No machine has more accelerators; a larger number is a slip."""
MAX_NODES = 65_536
MAX_GPUS = 1_000_000
MAX_INTEGER = 2**31 - 1
"""What every database and every client can hold."""
MAX_PATH_DEPTH = 64
"""Directories of a relative path: a request may name thousands of files, and looks at all directories above them."""
MAX_ARGUMENT_LENGTH = 128 * 1024 - 1
"""Linux refuses to start a program with a longer argument or variable."""
MAX_JSON_DEPTH = 64
"""Far above anything that a person writes, far below what any reader of JSON refuses."""

STORED = "stored"
"""Validation context of documents that this server wrote itself: unknown fields are ignored in them."""
NO_OTHER_KEYS: dict[str, Any] = {"additionalProperties": False}
"""Makes the schema of a mapping as strict about its keys as the mapping is."""


class Model(BaseModel):
    """A part of a request: unknown fields are refused, nothing changes after it was read."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,  # it may hold secrets
        protected_namespaces=(),  # `model_id` is a name of the field's own
    )


class RuleViolation(NamedTuple):
    """A rule between fields that does not hold: the field to blame, relative to the model, and what to do."""

    field: tuple[str | int, ...]
    message: str


def refuse(broken: Iterable[RuleViolation]) -> None:
    """Fail a validator with every rule that does not hold, each at its own field."""
    details = [
        InitErrorDetails(type=PydanticCustomError("rule", rule.message), loc=rule.field, input=None) for rule in broken
    ]
    if details:
        raise ValidationError.from_exception_data("rules", details)


class RuledModel(Model):
    """A part of a request with rules between its fields."""

    @model_validator(mode="after")
    def _keeps_its_rules(self) -> Self:
        refuse(self.broken_rules())
        return self

    def broken_rules(self) -> Iterable[RuleViolation]:
        """Every rule that does not hold, of a model whose fields are valid each by itself."""
        return ()


def must(holds: Callable[[Any], bool], says: str) -> AfterValidator:
    """A rule for a field; `says` is the error."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("rule", says)
        return value

    return AfterValidator(check)


def is_unicode(text: str) -> bool:
    """Whether a text can be written anywhere: JSON can spell half of a surrogate pair, which no file takes."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True, slots=True)
class Matches:
    """Proper Unicode that matches a pattern as a whole; the pattern shows in the schema, the words in the error."""

    pattern: str
    says: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        matches = re.compile(self.pattern).fullmatch

        def check(value: str) -> str:
            if not is_unicode(value):
                raise PydanticCustomError("rule", "contains a lone surrogate; send valid Unicode")
            if matches(value) is None:
                raise PydanticCustomError("rule", self.says)
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}


class TaggedUnion:
    """A field that holds one of several models, told apart by a literal field of each. Unlike with pydantic's
    discriminated union, models can be added later, and an error is at the field itself."""

    def __init__(self, tag: str, *models: type[Model]) -> None:
        self._tag = tag
        self.models: dict[str, type[Model]] = {}
        for model in models:
            self.add(model)

    def add(self, model: type[Model]) -> None:
        (name,) = get_args(model.model_fields[self._tag].annotation)
        if name in self.models:
            raise ValueError(f"{self._tag} {name!r} is registered already")
        self.models[name] = model

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Without a serializer of its own the field is written by the class of the value it holds.
        return core_schema.with_info_plain_validator_function(self._read)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        choices = {name: model.__pydantic_core_schema__ for name, model in self.models.items()}
        return handler(core_schema.tagged_union_schema(choices, self._tag))

    def _read(self, value: object, info: ValidationInfo) -> Model:
        if isinstance(value, Model):
            return value
        if not isinstance(value, dict):
            raise ValidationError.from_exception_data(self._tag, [InitErrorDetails(type="dict_type", input=value)])
        if (name := value.get(self._tag)) is None:
            refuse([RuleViolation((self._tag,), f"required; choices: {', '.join(self.models)}")])
        model = self.models.get(name) if isinstance(name, str) else None
        if model is None:
            expected = ", ".join(f"'{known}'" for known in self.models)
            details = InitErrorDetails(type="literal_error", loc=(self._tag,), input=name, ctx={"expected": expected})
            raise ValidationError.from_exception_data(self._tag, [details])
        extra: Literal["ignore", "forbid"] = "ignore" if info.context == STORED else "forbid"
        return model.model_validate(value, extra=extra, context=info.context)


def optional(description: str) -> Any:
    """A field that may be left out, or null."""
    return Field(default=None, description=description)


def null_means(default: Any, kind: Any) -> BeforeValidator:
    """A field that takes null for its default, and never holds null."""
    return BeforeValidator(lambda value: default if value is None else value, json_schema_input_type=kind | None)


def _scalar(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _is_storable(value: JsonValue, depth: int = MAX_JSON_DEPTH) -> bool:
    match value:
        case dict():
            return depth > 0 and all(is_unicode(key) and _is_storable(each, depth - 1) for key, each in value.items())
        case list():
            return depth > 0 and all(_is_storable(each, depth - 1) for each in value)
        case str():
            return is_unicode(value)
        case _:
            return True


def _names_a_program(argv: tuple[str, ...]) -> tuple[str, ...]:
    if not argv[0].strip():
        refuse([RuleViolation((0,), "must name a program")])
    return argv


_SINGLE_LINE = Matches(r"[^\x00-\x1f\x7f]+", "must be one line, without control characters")

Flag = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1, le=MAX_INTEGER)]
Natural = Annotated[int, Strict(), Field(ge=0, le=MAX_INTEGER)]
Positive = Annotated[float, Strict(), Field(gt=0)]
Share = Annotated[float, Strict(), Field(gt=0, lt=1)]

Verbatim = Annotated[
    str, StringConstraints(max_length=MAX_ARGUMENT_LENGTH), Matches(r"[^\x00]*", "must not hold a NUL character")
]
"""Any text that a process can be given."""
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=4096), _SINGLE_LINE]
"""One line that is not empty."""
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=128), _SINGLE_LINE]
"""A short line that is not empty."""
Scalar = Annotated[Verbatim, BeforeValidator(_scalar, json_schema_input_type=str | int | float | bool)]
"""Text; a number or a truth value is taken as its text, as it would be written in JSON."""
StringMap = Annotated[dict[Text, Scalar], Field(max_length=4096, json_schema_extra=NO_OTHER_KEYS)]
Names = Annotated[tuple[Name, ...], Field(max_length=1024)]

PathText = Annotated[Text, must(lambda path: ".." not in path.split("/"), "must not contain '..'")]
RelativePath = Annotated[
    Text,
    must(lambda path: not path.startswith("/"), "must be relative to the working directory, without a leading '/'"),
    must(
        lambda path: {"", ".", ".."}.isdisjoint(path.split("/")),
        "must be a plain relative path, without '..', '.' or doubled slashes",
    ),
    must(lambda path: path.count("/") <= MAX_PATH_DEPTH, f"may lead through at most {MAX_PATH_DEPTH} directories"),
]
AbsolutePath = Annotated[PathText, Matches(r"/.*", "must be an absolute path")]

DNS_LABEL = Matches(
    r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    "has 1 to 63 lower-case letters, digits and dashes, and no dash at either end",
)

EnvironmentName = Annotated[
    str,
    StringConstraints(max_length=256),
    Matches(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name has letters, digits and '_', and no digit first"),
    must(
        lambda name: not name.startswith(RESERVED_PREFIX),
        f"names that begin with {RESERVED_PREFIX} are reserved; choose another",
    ),
]
Environment = Annotated[dict[EnvironmentName, Scalar], Field(max_length=1024, json_schema_extra=NO_OTHER_KEYS)]

JsonObject = Annotated[
    dict[str, JsonValue], must(_is_storable, f"must be proper Unicode, and not nested deeper than {MAX_JSON_DEPTH}")
]
"""Anything that JSON can hold, by names."""
Image = Annotated[
    str,
    StringConstraints(strip_whitespace=True, max_length=512),
    Matches(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*", "must be the name of an image, such as registry.example/team/image:tag"),
]
Sha256 = Annotated[str, Matches(r"[0-9a-f]{64}", "must be 64 lower-case hexadecimal digits")]
Arguments = Annotated[tuple[Verbatim, ...], Field(max_length=8192)]
Argv = Annotated[tuple[Verbatim, ...], Field(min_length=1, max_length=8192), AfterValidator(_names_a_program)]
"""A program and its arguments."""
