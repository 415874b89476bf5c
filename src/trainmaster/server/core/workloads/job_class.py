"""The `job_class` workload: a class of the in-job library. It is known by (account, project, group, name), not by the
job's id: submitted again, it finds what it saved before."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from trainmaster.protocol.launch import RUN_FILE, SEGMENT_PATTERN, SEGMENT_SAYS, Launch, LaunchStep, is_segment
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.fields import Arguments, Flag, JsonObject, Matches, RelativePath, Text, optional
from trainmaster.server.core.workloads.base import JobConfigs, WorkloadSpec

KIND = "job_class"
RUN = LaunchStep(name="main", argv=("-m", "trainmaster.jobs.runner"), python=True)

Segment = Annotated[str, Matches(SEGMENT_PATTERN, SEGMENT_SAYS)]
Module = Annotated[str, Matches(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "is the name of a module, with dots")]
ObjectStore = Annotated[str, Matches(r"s3://[^/\s]+(/\S*)?", "is like s3://bucket/prefix")]


class JobClassSpec(WorkloadSpec):
    """A subclass of `trainmaster.jobs.BasicJob`."""

    kind: Literal["job_class"]
    target: Text = Field(description="`module:Class`, or the name of a registered class.")
    module: Module | None = optional("A module to import, which registers the class.")
    config: JsonObject = Field(default_factory=dict, description="Its configuration.")
    overrides: Arguments = Field(
        default=(), description="`key=value`, with dots in the key; they override the configuration."
    )
    restore: RelativePath | None = optional(
        "The checkpoint of another run to start from: `project/group/name/suffix`. Used only while "
        "this job has no checkpoint."
    )
    overlay: Flag = Field(
        default=False,
        description="Continue with a configuration that differs from the latest checkpoint's; otherwise refused.",
    )
    elastic: Flag = Field(
        default=False,
        description="Continue from a checkpoint of another number of processes, which is refused otherwise: arrays "
        "are resharded, and random-number generators are not restored.",
    )
    project: Segment = Field(default="general", description="The first part of the run's name.")
    group: Segment = Field(default="default", description="The second part of the run's name.")
    name: Segment | None = optional("The third part of the run's name; the job's name when null.")
    checkpoints: ObjectStore | None = optional(
        "`s3://bucket/prefix` for its checkpoints, instead of the server's directory. Set the "
        "`AWS_*` variables in `environment`."
    )
    tracker: Literal["none", "trackio", "wandb"] = Field(
        default="none",
        description="The experiment tracker that metrics are mirrored to. Weights & Biases writes offline runs unless "
        "`environment` has a `WANDB_API_KEY`.",
    )

    def name_for(self, job: JobConfigs) -> str:
        return self.name if self.name is not None else job.name

    def check(self, job: JobConfigs) -> None:
        """The class can be found, and the job's name can be a part of a path."""
        problems = []
        module, colon, name = self.target.rpartition(":")
        if colon and not (module and name):
            problems.append(Problem(field="workload.target", message="has to be module:Class"))
        if not colon and self.module is None:
            message = "is not module:Class; for the name of a registered class, say in `module` where it is registered"
            problems.append(Problem(field="workload.target", message=message))
        if not is_segment(self.name_for(job)):
            message = f"the job's name cannot stand for it, since it {SEGMENT_SAYS}; give a name here"
            problems.append(Problem(field="workload.name", message=message))
        for index, setting in enumerate(self.overrides):
            if "=" not in setting.lstrip("="):
                problems.append(Problem(field=f"workload.overrides[{index}]", message="has to be key=value"))
        if problems:
            raise SpecError(problems)

    def compile(self, job: JobConfigs) -> Launch:
        resources = job.resource_config
        own = JobClassSpec.model_fields.keys() - WorkloadSpec.model_fields.keys()
        document = {
            **self.model_dump(mode="json", include=own),
            "name": self.name_for(job),
            "nodes": resources.node_count,
            "hardware": {"chip": resources.gpu_type, "min_chips": resources.gpu_count or 0},
        }
        return self.launch(job, RUN, inputs={RUN_FILE: json.dumps(document)}, reports_phases=True)
