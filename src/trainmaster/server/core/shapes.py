"""Training shapes: named, versioned sets of machines on which a trainer was tried. Operators write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, Strict

from trainmaster.server.core.errors import NotFoundError, Problem, SpecError, choice_message
from trainmaster.server.core.fields import (
    DNS_LABEL,
    Count,
    Flag,
    Model,
    Name,
    Names,
    RuledModel,
    RuleViolation,
    Scalar,
    Share,
    Text,
    optional,
)

ANYBODYS = "fireworks"
"""Shapes are the operator's, and found in every account; clients also ask for them in this one."""
LATEST = "latest"
"""Stands for the latest version that is validated."""

_REFERENCE = re.compile(r"accounts/([^/]+)/trainingShapes/([^/]+)(?:/versions/([^/]+))?")


class ShapeMode(StrEnum):
    """What trainers of a shape are for."""

    POLICY = "POLICY_TRAINER"  # the weights themselves
    LORA = "LORA_TRAINER"  # adapters, or the weights themselves
    FORWARD_ONLY = "FORWARD_ONLY"  # forward passes alone


class Sharding(Model):
    """How a model is spread over the GPUs of a shape; replicas beside each other need nothing here."""

    pipeline_parallelism: Count = Field(default=1, description="Stages of a pipeline.")
    tensor_parallelism: Count = Field(default=1, description="Parts of each matrix.")
    context_parallelism: Count = Field(default=1, description="Parts of each sequence.")
    expert_parallelism: Count = Field(default=1, description="Parts of each mixture of experts.")


class ShapeVersion(Model):
    """One version of a shape."""

    version: Annotated[Scalar, DNS_LABEL] = Field(description="Its name among the versions.")
    validated: Flag = Field(default=True, description="Whether it may be launched without asking for it by name.")
    trainer_mode: ShapeMode = Field(default=ShapeMode.LORA, description="What its trainers are for.")
    base_models: Names = Field(default=(), description="The models that it is for; empty: any.")
    region: Name | None = optional("The label `region=...` of the nodes that it runs on.")
    accelerator_type: Name | None = optional("Such as NVIDIA_H100_80GB, or H100.")
    accelerator_count: Annotated[int, Strict(), Field(ge=0, le=1024)] = Field(
        default=0, description="GPUs of each node; 0: the CPU."
    )
    node_count: Count = Field(default=1, description="Nodes of the gang.")
    cpu_cores: Count | None = optional("Least cores of each node.")
    image_tag: Name | None = optional("For clients that ask for it; trainers do not run in it.")
    max_context_length: Count = Field(description="The longest sequence in tokens.")
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = Field(default="auto", description="Of the base model.")
    sampling_share: Share = Field(default=0.5, description="Of the time, where training and samples both wait.")
    sharding: Sharding = Field(default_factory=Sharding, description="How a model is spread over the GPUs.")
    deployment_shape: Text | None = optional("The deployment shape that belongs to it.")
    deployment_image_tag: Name | None = optional("The image of that deployment.")

    @property
    def unusable(self) -> str | None:
        """Why no trainer can run on it; None when one can."""
        split = ", ".join(f"{name} {count}" for name, count in self.sharding if count > 1)
        return f"it wants {split}, and this version only runs replicas beside each other; use 1" if split else None


class Shape(RuledModel):
    """A shape with its versions, the latest last."""

    name: Annotated[str, DNS_LABEL] = Field(description="In its address.")
    description: Text | None = optional("For people.")
    versions: Annotated[tuple[ShapeVersion, ...], Field(min_length=1, max_length=1024)] = Field(
        description="The latest last."
    )

    def broken_rules(self) -> Iterator[RuleViolation]:
        names = [each.version for each in self.versions]
        for index, name in enumerate(names):
            if name in names[:index] or name == LATEST:
                yield RuleViolation(("versions", index, "version"), f"'{name}' is there twice, or stands for another")

    @property
    def latest(self) -> ShapeVersion | None:
        """The latest version that is validated and can be run."""
        return next((each for each in reversed(self.versions) if each.validated and not each.unusable), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The name of a shape, or of a version of one."""

    account_id: str
    shape: str
    version: str | None

    @staticmethod
    def read(text: str) -> Reference:
        """The reference of a text; SpecError when it is none."""
        if (found := _REFERENCE.fullmatch(text)) is None:
            message = "is not accounts/ACCOUNT/trainingShapes/SHAPE, with or without /versions/VERSION"
            raise SpecError([Problem(field="trainingShape", message=message)])
        return Reference(account_id=found[1], shape=found[2], version=found[3])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenShape:
    shape: str
    version: ShapeVersion

    def name_for(self, account_id: str) -> str:
        return f"accounts/{account_id}/trainingShapes/{self.shape}/versions/{self.version.version}"


BUILT_IN = (
    Shape(
        name="cpu",
        description="One process on the CPU of any node.",
        versions=(ShapeVersion(version="1", max_context_length=32768, precision="float32"),),
    ),
    Shape(
        name="one-gpu",
        description="One process on one GPU of any kind.",
        versions=(ShapeVersion(version="1", accelerator_count=1, max_context_length=32768),),
    ),
)
"""Shapes of every server; a file of the same name replaces one. They book no cores: see docs/guides/fireworks.md."""


class Shapes:
    def __init__(self, written: Sequence[Shape] = ()) -> None:
        self._shapes: Mapping[str, Shape] = {shape.name: shape for shape in (*BUILT_IN, *written)}

    def __iter__(self) -> Iterator[Shape]:
        return iter(sorted(self._shapes.values(), key=lambda shape: shape.name))

    def get(self, name: str) -> Shape:
        """NotFoundError when there is none of that name."""
        if name not in self._shapes:
            raise NotFoundError(choice_message("training shape", name, sorted(self._shapes)))
        return self._shapes[name]

    def version(self, name: str, version: str) -> ShapeVersion:
        """A version of a shape, `latest` being the latest validated one; NotFoundError when there is none."""
        shape = self.get(name)
        named = (each for each in shape.versions if each.version == version)
        found = shape.latest if version == LATEST else next(named, None)
        if found is None:
            raise NotFoundError(f"training shape {name} has no version {version}")
        return found

    def named(self, reference: Reference) -> ChosenShape:
        """What a reference stands for, without a version the latest validated one; NotFoundError when there is none."""
        return ChosenShape(shape=reference.shape, version=self.version(reference.shape, reference.version or LATEST))
