"""Documents of job specs: parsed from requests, dumped without secrets, and read again whatever version wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from trainmaster.protocol.secrets import HUB_TOKEN, reference_to, variable_secret
from trainmaster.server.core.errors import NewerSpecError, Problem, SpecError
from trainmaster.server.core.fields import STORED, refuse
from trainmaster.server.core.spec.configs import CheckpointConfig, OutputConfig
from trainmaster.server.core.spec.data import Filters, broken_patterns
from trainmaster.server.core.spec.problems import item_at, problems_from
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.training.sources import ModelSource, model_source
from trainmaster.server.core.training.types import FrameworkType
from trainmaster.server.core.workloads.base import PackagedSpec, initializers_of
from trainmaster.server.core.workloads.initializers import conceal
from trainmaster.server.core.workloads.initializers import secret_values as initializer_secrets
from trainmaster.server.core.workloads.programs import Serving
from trainmaster.server.core.workloads.trainer import configs_of, is_training

# Parsing: from an untrusted document to a request that can be run, or to every problem with it. Stored specs may have
# fields without effect: what an earlier version accepted can still be read.

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_submit(document: object, *, seed: int | None = None) -> SubmitJobRequest:
    """The request of a document; it can be compiled into a launch. `seed` is the one of a training that names none.
    SpecError names every wrong shape or value, and what would change nothing; RefusedError, what is not available."""
    request = parse(SubmitJobRequest, document)
    found = _unused_in_training(request) if is_training(request.workload) else _unused_beside(request)
    if problems := (*found, *_unused_anywhere(request)):
        raise SpecError(problems)
    data = request.data_config
    if seed is not None and data is not None and data.seed is None:
        request = request.model_copy(update={"data_config": data.model_copy(update={"seed": seed})})
    request.check_workload()
    return request


def parse(model: type[ModelT], document: object) -> ModelT:
    """A document as any model, with the same errors; for the bodies of other requests."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = problems_from(error, model, document)
    # Outside of the handler: what pydantic says holds the values, which may be secrets.
    raise SpecError(problems)


_INSTEAD = {
    "training_config": "set variables in workload.environment, priority and max_retries in scheduling_config, and the "
    "checkpoint to start from in workload.resume_from_checkpoint; everything else is for the program's own arguments",
    "data_config": "pass the data to the program by its arguments, or fetch it with workload.initializers",
}
_WITH_REVISIONS = (ModelSource.HUGGINGFACE, ModelSource.SCAIATLAS)
_SAVED_BY_TRAINERS = ("save_strategy", "save_steps", "save_on_each_node")
_KEPT = CheckpointConfig.model_fields["save_total_limit"].default
_OUTPUT = "what it writes to TRAINMASTER_OUTPUT_DIR is what `trainmaster download` fetches"
_RESULT_OF_TRAINERS = {
    "output_path": f"{_OUTPUT}; to have it elsewhere, let the program copy it there",
    "output_model_name": f"{_OUTPUT}, under the names that the program gives",
    "push_to_hub": f"{_OUTPUT}; let the program upload it, with a token in its environment",
    "hub_repo_id": f"{_OUTPUT}; let the program upload it, with a token in its environment",
    "export_format": "the program decides in which form it writes its model",
    "merge_lora": "the program decides whether it merges its adapter",
}
"""What a built-in trainer does with its result, and what to do where a program of the user's own makes it."""


def _unused_in_training(request: SubmitJobRequest) -> Iterator[Problem]:
    training, data = configs_of(request)
    base, output = training.base_model, request.output_config
    if request.workload is not None and request.workload.resume_from_checkpoint is not None:
        message = "a training starts from training_config.resume_from_checkpoint; set it there"
        yield Problem(field="workload.resume_from_checkpoint", message=message)
    if training.framework.type is FrameworkType.CUSTOM:
        yield from _unused_result(request, "a CUSTOM script")
    else:
        if output.output_model_name is not None and output.output_path is None:
            message = "names the result below output_config.output_path; set that, too, or leave this out"
            yield Problem(field="output_config.output_model_name", message=message)
        if output.hub_repo_id is not None and not output.push_to_hub:
            message = "is where push_to_hub uploads to, and that is not set; leave this out"
            yield Problem(field="output_config.hub_repo_id", message=message)
    source = model_source(base.model_id, base.source)
    if base.revision is not None and source not in _WITH_REVISIONS:
        message = f"only models of the Hub and of ScaiAtlas have revisions, and this one is {source}; leave it out"
        yield Problem(field="training_config.base_model.revision", message=message)
    named = data.preprocess.tokenizer_id
    if named is not None and base.tokenizer_id is not None and named != base.tokenizer_id:
        message = f"is {base.tokenizer_id}, but data_config.preprocess.tokenizer_id is {named}; set one of them"
        yield Problem(field="training_config.base_model.tokenizer_id", message=message)


def _unused_beside(request: SubmitJobRequest) -> Iterator[Problem]:
    """What is set for a trainer in a job whose workload is something else."""
    kind = request.workload.kind if request.workload is not None else ""
    for name, instead in _INSTEAD.items():
        if getattr(request, name) is not None:
            yield Problem(field=name, message=f"has no effect on a workload of kind {kind}: {instead}")
    checkpoint = request.output_config.checkpoint
    for name in _SAVED_BY_TRAINERS:
        if getattr(checkpoint, name) != CheckpointConfig.model_fields[name].default:
            message = f"has no effect on a workload of kind {kind}: the program decides when it saves; leave it out"
            yield Problem(field=f"output_config.checkpoint.{name}", message=message)
    if isinstance(request.workload, Serving) and checkpoint.save_total_limit != _KEPT:
        message = f"has no effect on a workload of kind {kind}: what its clients save stays until they delete it"
        yield Problem(field="output_config.checkpoint.save_total_limit", message=message)
    yield from _unused_result(request, f"a workload of kind {kind}")
    if request.output_config.hub_token is not None:
        message = f"has no effect on a workload of kind {kind}: pass the token in workload.environment"
        yield Problem(field="output_config.hub_token", message=message)


def _unused_result(request: SubmitJobRequest, whose: str) -> Iterator[Problem]:
    """What a built-in trainer would do with its result, where a program makes it."""
    for name, instead in _RESULT_OF_TRAINERS.items():
        if getattr(request.output_config, name) != OutputConfig.model_fields[name].default:
            yield Problem(field=f"output_config.{name}", message=f"has no effect on {whose}: {instead}")


def _unused_anywhere(request: SubmitJobRequest) -> Iterator[Problem]:
    resources, workload = request.resource_config, request.workload
    checkpoint = request.output_config.checkpoint
    if resources.gpu_count == 0:
        for name in ("gpu_type", "gpu_memory_min_mb"):
            if getattr(resources, name):
                message = "has no effect without a GPU, and gpu_count is 0; leave it out, or ask for GPUs"
                yield Problem(field=f"resource_config.{name}", message=message)
    if checkpoint.greater_is_better is not None and checkpoint.metric_for_best_model is None:
        message = "has no effect without metric_for_best_model; name the metric, or leave this out"
        yield Problem(field="output_config.checkpoint.greater_is_better", message=message)
    if workload is None:
        return
    if workload.remove_working_directory and workload.working_directory is not None:
        message = "is for a fresh directory, and working_directory names one of yours; set one of the two"
        yield Problem(field="workload.remove_working_directory", message=message)
    if isinstance(workload, PackagedSpec) and workload.index_urls and not workload.packages:
        message = "is where workload.packages come from, and there are none; leave it out"
        yield Problem(field="workload.index_urls", message=message)


HIDDEN = "***"
"""Stands where a secret was."""


def dump(request: SubmitJobRequest) -> dict[str, Any]:
    """The document that is stored: defaults filled, references where environment values and tokens were."""
    return _document(request, reference_to)


def redacted(request: SubmitJobRequest) -> dict[str, Any]:
    """The document that is shown: defaults filled, environment values and tokens hidden."""
    return _document(request, lambda _: HIDDEN)


def with_secrets_of(document: Any, earlier: SubmitJobRequest, values: Mapping[str, str]) -> Any:
    """A new document, with a secret of the earlier request wherever it has the `***` that `redacted` shows there."""
    problems: list[Problem] = []
    found = _filled(document, redacted(earlier), _document(earlier, lambda name: values.get(name, "")), "", problems)
    if problems:
        raise SpecError(problems)
    return found


def _filled(document: Any, shown: Any, values: Any, path: str, problems: list[Problem]) -> Any:
    if document == HIDDEN:
        if shown != HIDDEN:
            message = f"the earlier job has no secret here, so '{HIDDEN}' stands for nothing; give the value"
            problems.append(Problem(field=path, message=message))
        return values

    def filled(each: Any, part: int | str, where: str) -> Any:
        return _filled(each, item_at(shown, part), item_at(values, part), where, problems)

    if isinstance(document, dict):
        return {name: filled(each, name, f"{path}.{name}" if path else name) for name, each in document.items()}
    if isinstance(document, list):
        return [filled(each, index, f"{path}[{index}]") for index, each in enumerate(document)]
    return document


def secret_values(request: SubmitJobRequest) -> dict[str, str]:
    """What `dump` leaves out, by the secrets' names. Of a stored request these are references."""
    values = {}
    for part in (request.training_config, request.workload):  # the workload's variables win
        if part is not None and part.environment:
            values.update({variable_secret(name): value for name, value in part.environment.items()})
    if (initializers := initializers_of(request.workload)) is not None:
        values.update(initializer_secrets(initializers))
    if request.output_config.hub_token is not None:
        values[HUB_TOKEN] = request.output_config.hub_token.get_secret_value()
    return values


def _document(request: SubmitJobRequest, shown: Callable[[str], str]) -> dict[str, Any]:
    document = request.model_dump(mode="json")
    for part in (document["training_config"], document["workload"]):
        if part is not None and part["environment"]:
            part["environment"] = {name: shown(variable_secret(name)) for name in part["environment"]}
    if (initializers := initializers_of(request.workload)) is not None:
        conceal(initializers, document["workload"]["initializers"], shown)
    document["output_config"]["hub_token"] = shown(HUB_TOKEN) if request.output_config.hub_token else None
    return document


SPEC_VERSION = 3
"""Stored beside every document; raised whenever an old document would be read wrongly."""

Upcaster = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_SEALED_SINCE = 2
"""From this version on the values of secrets are not in the document; version 1 has them in the clear."""
_FILTERS: TypeAdapter[Any] = TypeAdapter(Filters | None)


def _from_2(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """`sampling.max` has another name; filters, which had no effect, were not checked; nor was data fetched."""
    changed = dict(document)
    data, training = document.get("data_config"), document.get("training_config")
    if data is not None:
        changed["data_config"] = {**data, "sources": [_with_checked_rows(source) for source in data["sources"]]}
    if document.get("workload") is None and training is not None and training["framework"]["custom_script_path"]:
        changed["workload"] = _script_alone(training["framework"], document["resource_config"])
    return changed


def _with_checked_rows(source: Mapping[str, Any]) -> dict[str, Any]:
    changed = dict(source)
    if (sampling := source.get("sampling")) is not None:
        changed["sampling"] = {("max_samples" if name == "max" else name): value for name, value in sampling.items()}
    try:
        refuse(broken_patterns([_FILTERS.validate_python(source.get("filters"))]))
    except ValidationError:
        changed["filters"] = None
    return changed


def _script_alone(framework: Mapping[str, Any], resources: Mapping[str, Any]) -> dict[str, Any]:
    """The workload of a job that names none: a CUSTOM script, before which nothing ran."""
    nodes = resources["node_count"]
    ranks = framework["distributed"]["world_size"] or resources["gpu_count"] or nodes
    return {"kind": "script", "path": framework["custom_script_path"], "ranks_per_node": ranks // nodes}


UPCASTERS: Mapping[int, Upcaster] = {1: lambda document: document, 2: _from_2}
"""From a version to the next one. Every version below ours has one."""


def load_stored(version: int, document: Mapping[str, Any]) -> SubmitJobRequest:
    """The request of a stored document of any version; fields that are not known any more are ignored."""
    if version > SPEC_VERSION:
        message = f"stored job spec has version {version}, and this server reads up to {SPEC_VERSION}; upgrade"
        raise NewerSpecError(message)
    for older in range(version, SPEC_VERSION):
        document = UPCASTERS[older](document)
    try:
        return SubmitJobRequest.model_validate(document, extra="ignore", context=STORED)
    except ValidationError as error:
        problems = problems_from(error, SubmitJobRequest, document)
    raise SpecError(problems)


def unsealed_values(version: int, document: Mapping[str, Any]) -> dict[str, str]:
    """The values of secrets that an old document has in the clear, by the secrets' names."""
    return secret_values(load_stored(version, document)) if version < _SEALED_SINCE else {}
