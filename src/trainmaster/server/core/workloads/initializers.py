"""`workload.initializers`: a dataset and a model, each fetched in a step of its own before anything of the job runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SecretStr, Strict, ValidationInfo
from pydantic_core import PydanticCustomError

from trainmaster.protocol import environment
from trainmaster.protocol.launch import ContainerLimits, Gang, LaunchStep
from trainmaster.protocol.secrets import reference_to
from trainmaster.server.core.fields import (
    STORED,
    Image,
    Matches,
    Model,
    Positive,
    RuledModel,
    RuleViolation,
    TaggedUnion,
    Text,
    must,
    optional,
)
from trainmaster.server.core.resources import quantity
from trainmaster.server.core.training.sources import hub_name

INPUT_FILE = "initializers.json"
"""Among a launch's inputs: what the steps are to fetch, without secrets."""
OTHER_WEIGHTS = ("*.msgpack", "*.h5", "*.bin", "*.pt", "*.pth")
"""Weights again in other forms than *.safetensors; of a model they are left out unless the job says otherwise."""
SECRETS: Mapping[str, str] = environment.INITIALIZER_SECRETS
"""The fields that are encrypted, and the variables in which the step finds their values."""
_LEAST_MEMORY = 16 << 20
_NOT_FETCHED = ("type", "image", "timeout_s")
"""Fields that say how it is fetched, and not what."""


def _memory(value: str, info: ValidationInfo) -> str:
    if info.context == STORED:
        return value  # taken before there was this rule
    if value.endswith("m"):
        raise PydanticCustomError("rule", "must be in bytes, and m is a thousandth of one; for mebibytes write Mi")
    if quantity(value) < _LEAST_MEMORY:
        raise PydanticCustomError("rule", "must be at least 16Mi; a number without a unit is one of bytes")
    return value


def _cores(value: str, info: ValidationInfo) -> str:
    if info.context != STORED and not quantity(value):
        raise PydanticCustomError("rule", "must be more than 0")
    return value


Secret = Annotated[
    SecretStr,
    Field(min_length=1, max_length=4096),
    must(lambda secret: secret.get_secret_value().isprintable(), "must be one line, without control characters"),
]
Patterns = Annotated[tuple[Text, ...], Field(max_length=1024)]
HubUri = Annotated[
    Text,
    must(
        lambda uri: uri.startswith("hf://") and hub_name(uri) is not None,
        "must be hf://owner/name, hf://name or hf://owner/name/path, each with @revision or not",
    ),
]
S3Uri = Annotated[Text, Matches(r"s3://[^/]+(/.*)?", "must be s3://bucket/prefix")]
TableUri = Annotated[Text, Matches(r"cache://[^/]+/[^/]+", "must be cache://schema/table")]
MetadataLocation = Annotated[
    Text, Matches(r"(s3://[^/]+|file://)?/.+", "must be s3://bucket/path or an absolute path of the table's metadata")
]
Endpoint = Annotated[Text, Matches(r"https?://[^/].*", "must be an http or https URL")]
Quantity = Annotated[
    Text, Matches(r"[0-9]+(\.[0-9]+)?(m|k|K|M|G|T|Ki|Mi|Gi|Ti)?", "must be a quantity, such as 2, 500m or 4Gi")
]
Cores = Annotated[Quantity, AfterValidator(_cores)]
Memory = Annotated[Quantity, AfterValidator(_memory)]


class InitializerSpec(RuledModel):
    """What is fetched. Each type adds fields of its own."""

    type: str = Field(description="Where it is fetched from.")
    storage_uri: Text = Field(description="What is fetched.")
    image: Image | None = optional(
        "A container image that fetches it with its own command, like Kubeflow's initializers; needs "
        "a backend that runs images. Null: the built-in initializer, where the job runs."
    )
    timeout_s: Positive | None = optional("Time limit of the fetch. Null: no limit.")

    @property
    def secrets_set(self) -> list[str]:
        return [field for field in SECRETS if getattr(self, field, None) is not None]


class HubInitializer(InitializerSpec):
    """A repository of the Hugging Face Hub, or a part of one."""

    type: Literal["huggingface"] = Field(description="The Hugging Face Hub.")
    storage_uri: HubUri = Field(
        description="hf://owner/name or hf://name, with /path for a part of it, and @revision at the end."
    )
    ignore_patterns: Patterns | None = optional("Files to leave out, such as *.bin.")
    access_token: Secret | None = optional(
        "A token for the Hub; HF_TOKEN of the environment when null. Encrypted, never shown."
    )


class S3Initializer(InitializerSpec):
    """An object, or all objects below a prefix."""

    type: Literal["s3"] = Field(description="An object store.")
    storage_uri: S3Uri = Field(description="s3://bucket/prefix.")
    ignore_patterns: Patterns | None = optional("Objects to leave out, such as *.bin.")
    endpoint: Endpoint | None = optional(
        "The store's endpoint; AWS_ENDPOINT_URL of the environment, or AWS, when null."
    )
    access_key_id: Secret | None = optional("AWS_ACCESS_KEY_ID of the environment when null. Encrypted, never shown.")
    secret_access_key: Secret | None = optional(
        "AWS_SECRET_ACCESS_KEY of the environment when null. Encrypted, never shown."
    )
    region: Text | None = optional("The region of the bucket.")
    role_arn: Text | None = optional("A role to assume with these keys.")

    def broken_rules(self) -> Iterator[RuleViolation]:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            yield RuleViolation((missing,), "required: a key has two halves; give both, or neither")


class CacheInitializer(InitializerSpec):
    """An Iceberg table as columnar shards on local disk, which jobs share."""

    type: Literal["cache"] = Field(description="An Iceberg table.")
    storage_uri: TableUri = Field(description="cache://schema/table: the name of the table.")
    image: Image | None = optional(
        "A container image with trainmaster[cache], in which a gang of containers writes the shards, on a "
        "backend that runs images. Null: processes where the job runs."
    )
    metadata_loc: MetadataLocation = Field(description="The table's metadata: a *.metadata.json.")
    num_data_nodes: Annotated[int, Strict(), Field(gt=1, le=1024)] = Field(
        description="Number of shards, each written by a separate process."
    )
    head_cpu: Cores | None = optional("CPU cores of the process that reads the table's metadata.")
    head_mem: Memory | None = optional("Memory of that process.")
    worker_cpu: Cores | None = optional("CPU cores of each process that writes a shard.")
    worker_mem: Memory | None = optional("Memory of each of these processes.")
    iam_role: Text | None = optional("A role to assume for reading the table on S3.")


class HubModelInitializer(HubInitializer):
    """A model of the Hugging Face Hub."""

    ignore_patterns: Patterns | None = Field(default=OTHER_WEIGHTS, description="Files to leave out.")


class S3ModelInitializerSpec(S3Initializer):
    """A model below a prefix."""

    ignore_patterns: Patterns | None = Field(default=OTHER_WEIGHTS, description="Objects to leave out.")


_DATASETS = TaggedUnion("type", HubInitializer, S3Initializer, CacheInitializer)
_MODELS = TaggedUnion("type", HubModelInitializer, S3ModelInitializerSpec)


class Initializers(Model):
    """What is fetched before the job's own processes start."""

    dataset: Annotated[InitializerSpec, _DATASETS] | None = optional(
        "Its directory is DATASET_PATH in the job's processes."
    )
    model: Annotated[InitializerSpec, _MODELS] | None = optional("Its directory is MODEL_PATH in the job's processes.")

    def named(self) -> Iterator[tuple[str, InitializerSpec]]:
        """The parts that are set (`dataset`, `model`), in the order of the steps."""
        for part in PARTS:
            if (spec := getattr(self, part)) is not None:
                yield part, spec


PARTS: Mapping[str, str] = {"dataset": "DATASET_PATH", "model": "MODEL_PATH"}
"""Each part, and the variable that names its directory to the ranks."""


def secret_values(initializers: Initializers) -> dict[str, str]:
    """The values of secrets, by the secrets' names. Of a stored request these are references."""
    return {
        secret_name(part, field): getattr(spec, field).get_secret_value()
        for part, spec in initializers.named()
        for field in spec.secrets_set
    }


def conceal(initializers: Initializers, document: dict[str, Any], shown: Callable[[str], str]) -> None:
    """Put what is shown of secrets into the plain form of initializers, in the place of their values."""
    for part, spec in initializers.named():
        for field in spec.secrets_set:
            document[part][field] = shown(secret_name(part, field))


def secret_name(part: str, field: str) -> str:
    return f"{part}_initializer_{field}"


def initializing_steps(initializers: Initializers) -> tuple[LaunchStep, ...]:
    """A step for each, those with images of their own first; its secrets are given to it alone."""
    steps = (
        _foreign_step(part, spec) if spec.image is not None and spec.type != "cache" else _own_step(part, spec)
        for part, spec in initializers.named()
    )
    return tuple(sorted(steps, key=lambda step: step.image is None))


def _own_step(part: str, spec: InitializerSpec) -> LaunchStep:
    """Our own initializer; for a table, of which there is no other, also in an image of its own."""
    return LaunchStep(
        name=f"{part}-initializer",
        # Whatever the job ships: without -P, a file of that name would be imported in the module's place, and without
        # -s what lies in the home, which may be the working directory.
        argv=("-s", "-P", "-m", "trainmaster.training.initializer", part),
        python=True,
        secrets={SECRETS[field]: reference_to(secret_name(part, field)) for field in spec.secrets_set},
        timeout_s=spec.timeout_s,
        image=spec.image,
        gang=_gang(spec) if spec.image is not None and isinstance(spec, CacheInitializer) else None,
    )


def _gang(spec: CacheInitializer) -> Gang:
    return Gang(
        count=spec.num_data_nodes,
        argv=("-s", "-P", "-m", "trainmaster.training.tables.shard_writer"),
        size=_size(spec.worker_cpu, spec.worker_mem),
        head=_size(spec.head_cpu, spec.head_mem),
    )


def _size(cpu: str | None, memory: str | None) -> ContainerLimits:
    return ContainerLimits(
        cpu_cores=None if cpu is None else quantity(cpu), memory_bytes=None if memory is None else int(quantity(memory))
    )


def _foreign_step(part: str, spec: InitializerSpec) -> LaunchStep:
    """An image's own command. As with Kubeflow, each field that has a value is a variable."""
    # There Kubeflow's images leave what they fetch, whether they look at OUTPUT_PATH or not.
    target = f"{environment.WORKSPACE}/{part}"
    fields = spec.model_dump(mode="json", exclude={*_NOT_FETCHED, *SECRETS}, exclude_none=True)
    return LaunchStep(
        name=f"{part}-initializer",
        argv=(),
        environment={
            **{name.upper(): ",".join(value) if isinstance(value, list) else value for name, value in fields.items()},
            "OUTPUT_PATH": target,
        },
        secrets={field.upper(): reference_to(secret_name(part, field)) for field in spec.secrets_set},
        timeout_s=spec.timeout_s,
        image=spec.image,
        outputs={target: part},
    )


def initializers_text(initializers: Initializers, variables: Mapping[str, str]) -> str:
    """The input file of the steps: each part without its secrets, and which endpoints the job itself has set."""
    document: dict[str, Any] = {
        part: spec.model_dump(mode="json", exclude={"image", "timeout_s", *SECRETS})
        for part, spec in initializers.named()
    }
    # What a job sets them to is checked as any URL that it names.
    named = [name for name in environment.ENDPOINTS if name in variables]
    return json.dumps({**document, "endpoints_of_the_job": named}, indent=2) + "\n"


def prepared_paths(initializers: Initializers) -> dict[str, str]:
    """The variables of the ranks, and what they name below the prepared directory."""
    return {PARTS[part]: part for part, _ in initializers.named()}
