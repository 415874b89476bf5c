"""The `job_class` workload: a class of the in-job library, which goes on from its own checkpoints.

It is known by (account, project, group, name), not by the job's id: submitted again, it finds what it saved before.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainmaster.protocol.launch import RUN_FILE, SEGMENT_PATTERN, SEGMENT_SAYS, Launch, Step, is_segment
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.fields import Arguments, Flag, JsonObject, Matches, RelativePath, Text
from trainmaster.server.core.workloads.base import WorkloadSpec, launch_of, spec_of

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

KIND = "job_class"
RUN = Step(name="main", argv=("-m", "trainmaster.jobs.runner"), python=True)

Segment = Annotated[str, Matches(SEGMENT_PATTERN, SEGMENT_SAYS)]
Module = Annotated[str, Matches(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "is the name of a module, with dots")]
ObjectStore = Annotated[str, Matches(r"s3://[^/\s]+(/\S*)?", "is like s3://bucket/prefix")]


class JobClassSpec(WorkloadSpec):
    """A subclass of `trainmaster.jobs.BasicJob`."""

    kind: Literal["job_class"]
    target: Text = Field(description="`module:Class`, or the name of a registered class.")
    module: Module | None = Field(default=None, description="What to import so that a registered class is known.")
    config: JsonObject = Field(default_factory=dict, description="Its configuration.")
    overrides: Arguments = Field(default=(), description="`key=value`, with dots in the key, over the configuration.")
    restore: RelativePath | None = Field(
        default=None,
        description="A checkpoint of another job class's run to begin with: `project/group/name/suffix`. Used as long "
        "as this one has none of its own.",
    )
    overlay: Flag = Field(
        default=False,
        description="Go on with another configuration than that of the latest checkpoint; otherwise that is refused.",
    )
    elastic: Flag = Field(
        default=False,
        description="Go on from a checkpoint that another number of processes saved: arrays are sharded anew, and the "
        "random-number generators are not restored. Otherwise that is refused.",
    )
    project: Segment = Field(default="general", description="The first part of who it is.")
    group: Segment = Field(default="default", description="The second part.")
    name: Segment | None = Field(default=None, description="The third part; the job's name when null.")
    checkpoints: ObjectStore | None = Field(
        default=None,
        description="`s3://bucket/prefix` for its checkpoints, in place of the server's own directory. Give the "
        "`AWS_*` variables in `environment`.",
    )
    tracker: Literal["none", "trackio", "wandb"] = Field(
        default="none",
        description="The experiment tracker that metrics are mirrored to. Weights & Biases writes offline runs unless "
        "`environment` has a `WANDB_API_KEY`.",
    )

    def name_for(self, request: SubmitJobRequest) -> str:
        """The third part of who it is."""
        return self.name if self.name is not None else request.name


Spec = JobClassSpec


def validate(request: SubmitJobRequest) -> None:
    """The class can be found, and the job's name can be a part of a path."""
    spec = spec_of(request, JobClassSpec)
    problems = []
    module, colon, name = spec.target.rpartition(":")
    if colon and not (module and name):
        problems.append(Problem(field="workload.target", message="has to be module:Class"))
    if not colon and spec.module is None:
        message = "is not module:Class; for the name of a registered class, say in `module` where it is registered"
        problems.append(Problem(field="workload.target", message=message))
    if not is_segment(spec.name_for(request)):
        message = f"the job's name cannot stand for it, since it {SEGMENT_SAYS}; give a name here"
        problems.append(Problem(field="workload.name", message=message))
    for index, setting in enumerate(spec.overrides):
        if "=" not in setting.lstrip("="):
            problems.append(Problem(field=f"workload.overrides[{index}]", message="has to be key=value"))
    if problems:
        raise SpecError(problems)


def compile(request: SubmitJobRequest) -> Launch:  # noqa: A001
    """One step: the runner of job classes, told what to run."""
    spec = spec_of(request, JobClassSpec)
    resources = request.resource_config
    document = {
        "target": spec.target,
        "module": spec.module,
        "config": spec.config,
        "overrides": list(spec.overrides),
        "restore": spec.restore,
        "overlay": spec.overlay,
        "elastic": spec.elastic,
        "project": spec.project,
        "group": spec.group,
        "name": spec.name_for(request),
        "checkpoints": spec.checkpoints,
        "tracker": spec.tracker,
        "nodes": resources.node_count,
        "hardware": {"chip": resources.gpu_type, "min_chips": resources.gpu_count or 0},
    }
    return launch_of(request, spec, RUN, inputs={RUN_FILE: json.dumps(document)}, reports_phases=True)
