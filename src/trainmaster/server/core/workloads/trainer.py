"""The `trainer` workload, which a job without one has: training_config and data_config, done by a built-in trainer.
With framework CUSTOM a script of the user's own takes its place, and finds the same data and documents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, Literal

from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.server.core.errors import Problem, RefusedError, SpecError, choice_message, shown
from trainmaster.server.core.spec.configs import BaseModelConfig, OutputConfig, TrainingConfig
from trainmaster.server.core.spec.data import DataConfig
from trainmaster.server.core.training.engine_options import engine_lacks
from trainmaster.server.core.training.hyperparameters import FP8, read_hyperparameters
from trainmaster.server.core.training.options import (
    OPTIMIZERS_OF_WHOLE_WEIGHTS,
    refused_arguments,
    refused_fields,
    refused_options,
)
from trainmaster.server.core.training.sources import (
    SOURCE_TYPES,
    ModelSource,
    data_path,
    file_path,
    fixed_part,
    model_source,
    scheme_of,
)
from trainmaster.server.core.training.types import (
    ENGINE_ONLY,
    FRAMEWORKS,
    FrameworkType,
    TrainingType,
    measured,
    trains_adapter,
    unavailable,
)
from trainmaster.server.core.workloads.base import JobConfigs, WorkloadSpec, directories_above

KIND = "trainer"
_RUN = ("-P", "-m")
"""A module of ours, whatever the job ships: without the first, a file of that name would be imported in its place."""
_GUARDED = ("-s", *_RUN)
"""With tokens: no packages from the user's home either, which the account's jobs can write to."""
PREPARE = LaunchStep(name="prepare", argv=(*_GUARDED, "trainmaster.training.prepare"), python=True, tokens=True)
"""Fetches model and data, and makes rows of tokens of them; once for each node."""
FETCH = LaunchStep(name="prepare", argv=(*_GUARDED, "trainmaster.training.fetching"), python=True, tokens=True)
"""Fetches alone, for a script of the user's own."""
RESULT = "model"
"""The directory of the result in the job's output."""
TRAIN = LaunchStep(name="train", argv=(*_RUN, "trainmaster.training"), python=True)

_EXPORTS = ("safetensors", "adapter")
_BACKENDS = ("nccl", "gloo")
_MAX_PROBLEMS = 100
"""Of one kind: to look for the nearest name takes time."""


class TrainerSpec(WorkloadSpec):
    """What training_config and data_config declare. Only needed to upload files, or to set the common fields."""

    kind: Literal["trainer"]

    def check(self, job: JobConfigs) -> None:
        """Check what the tables say: training type, framework, hyperparameters, results."""
        training, data = configs_of(job)
        if (why := unavailable(training.framework.type, training.training_type, ranks=job.world_size)) is not None:
            raise RefusedError(why)
        if problems := [*_not_available(job, training, data), *_not_possible(job, training, data)]:
            raise RefusedError.because(problems)
        check_shipped(self, job)

    def compile(self, job: JobConfigs) -> Launch:
        spec = self.model_copy(update={"can_save": True}) if self.can_save is None else self
        return spec.launch(job, PREPARE, TRAIN, inputs=training_inputs(job), reports_phases=True)


def is_training(workload: WorkloadSpec | None) -> bool:
    """Whether training_config and data_config say what runs."""
    return workload is None or isinstance(workload, TrainerSpec)


def configs_of(job: JobConfigs) -> tuple[TrainingConfig, DataConfig]:
    if job.training_config is None or job.data_config is None:
        raise ValueError("a training has a training_config and a data_config")
    return job.training_config, job.data_config


def local_paths(job: JobConfigs) -> Iterator[tuple[str, str]]:
    """Every field of a training that names a file or a directory to read, and its path."""
    training, data = configs_of(job)
    if training.framework.custom_script_path is not None:
        yield "training_config.framework.custom_script_path", training.framework.custom_script_path
    for field, name in models_from(ModelSource.LOCAL, training.base_model, data):
        yield field, file_path(name) or name
    for index, source in enumerate(data.sources):
        if (path := data_path(source.path, source.type)) is not None:
            yield f"data_config.sources[{index}].path", path


def models_from(source: ModelSource, base: BaseModelConfig | None, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Every field that names a model or a tokenizer which comes from there, and what it says."""
    if base is not None and model_source(base.model_id, base.source) is source:
        yield "training_config.base_model.model_id", base.model_id
    tokenizers = {
        "training_config.base_model.tokenizer_id": base.tokenizer_id if base else None,
        "data_config.preprocess.tokenizer_id": data.preprocess.tokenizer_id,
    }
    for field, name in tokenizers.items():
        if name is not None and model_source(name) is source:
            yield field, name


def result_uri(output: OutputConfig) -> str | None:
    """Where a trainer puts its result beside the job's own output; None where the job names no place."""
    if output.output_path is None:
        return None
    place = output.output_path.removeprefix("file://")
    return f"{place.rstrip('/')}/{output.output_model_name}" if output.output_model_name else place


def check_shipped(workload: WorkloadSpec, job: JobConfigs) -> None:
    """See that relative paths name shipped files; with a working directory they may lie there."""
    if workload.working_directory is not None:
        return
    files = {file.path for file in workload.files}
    shipped = files | directories_above(files) | ({"."} if files else set())
    problems = [
        Problem(
            field=field,
            message=f"there is no such file: '{path}' was looked for among the shipped files. `trainmaster submit` "
            "sends along what lies beside the job file; otherwise ship it in workload.files, or give an absolute path "
            "on the server",
        )
        for field, path in local_paths(job)
        if not path.startswith("/") and not _is_shipped(path, shipped)
    ]
    if problems:
        raise SpecError(problems)


def _is_shipped(path: str, shipped: Set[str]) -> bool:
    """Whether a path is shipped; of a pattern, whether something is where its matches would lie."""
    return str(PurePosixPath(path)) in shipped or (
        ".." not in path.split("/") and str(PurePosixPath(fixed_part(path))) in shipped
    )


def _not_available(job: JobConfigs, training: TrainingConfig, data: DataConfig) -> Iterator[Problem]:
    """What has its place among the fields, and nobody does it yet."""
    output, framework = job.output_config, training.framework
    if output.export_format not in _EXPORTS:
        adapts = trains_adapter(training.training_type, training.hyperparameters)
        working = _EXPORTS if adapts and not output.merge_lora else _EXPORTS[:1]
        message = f"{output.export_format} is not available in this version; use {' or '.join(working)}"
        yield Problem(field="output_config.export_format", message=message)
    if output.push_to_hub:
        message = "is not available in this version; upload what `trainmaster download` fetches"
        yield Problem(field="output_config.push_to_hub", message=message)
    for index, source in enumerate(data.sources):
        if source.type is not None and source.type.lower() not in SOURCE_TYPES:
            message = choice_message("type", source.type, SOURCE_TYPES)
            yield Problem(field=f"data_config.sources[{index}].type", message=message)
    known = FRAMEWORKS[framework.type]
    where = "training_config.framework.distributed"
    strategy = framework.distributed.strategy
    if strategy is not None and strategy not in known.strategies:
        known_ones = " or ".join(known.strategies)
        message = f"'{strategy}' is not one of framework {framework.type}: use {known_ones}, or leave it out"
        yield Problem(field=f"{where}.strategy", message=message)
    if framework.distributed.backend not in _BACKENDS:
        message = f"is not available with built-in trainers; use {' or '.join(_BACKENDS)}"
        yield Problem(field=f"{where}.backend", message=message)
    refused = refused_options(framework.config, framework.distributed.config, sharded=framework.sharded)
    for field, message in islice(refused, _MAX_PROBLEMS):
        yield Problem(field=f"training_config.{field}", message=message)
    for name, message in islice(refused_fields(data.preprocess.field_mapping), _MAX_PROBLEMS):
        yield Problem(field=f"data_config.preprocess.field_mapping.{name}", message=message)


def _not_possible(job: JobConfigs, training: TrainingConfig, data: DataConfig) -> Iterator[Problem]:
    """What contradicts itself."""
    output = job.output_config
    if output.export_format == "adapter":
        if not trains_adapter(training.training_type, training.hyperparameters):
            message = "adapter is for LORA, and for DPO with an adapter; use safetensors"
            yield Problem(field="output_config.export_format", message=message)
        elif output.merge_lora:
            message = "an adapter that is merged into the model is none any more; set one of the two"
            yield Problem(field="output_config.merge_lora", message=message)
    if training.framework.sharded:
        yield from _not_shardable(job, training)
    alone = training.training_type in ENGINE_ONLY and training.framework.type is not FrameworkType.CUSTOM
    if training.framework.type is FrameworkType.ENGINE or alone:
        remedy = "leave it out" if alone else f"leave it out, or use framework type {FrameworkType.HF_TRAINER}"
        for field, message in islice(_engine_lacks(job, training, data), _MAX_PROBLEMS):
            where = field if field.startswith("data_config.") else f"training_config.{field}"
            yield Problem(field=where, message=f"{message}; {remedy}")
    if training.training_type is TrainingType.DPO:
        yield from _without_pairs(data)
    if _hyperparameters(job)["mixed_precision"] == FP8 and not training.framework.sharded:
        yield from _without_fp8(job, training, data)
    for field, options in (
        ("training_config.base_model.model_kwargs", training.base_model.model_kwargs),
        ("data_config.preprocess.tokenizer_config", data.preprocess.tokenizer_config),
    ):
        for name, instead in refused_arguments(options):
            yield Problem(field=f"{field}.{shown(name)}", message=instead)
    for field, name in models_from(ModelSource.HUGGINGFACE, training.base_model, data):
        if scheme_of(name) is None and name.count("/") > 1:
            message = (
                f"there is no such directory: '{shown(name)}'. A name on the Hub is owner/name; `trainmaster submit` "
                "looks for paths beside the job file; otherwise give an absolute path on the server"
            )
            yield Problem(field=field, message=message)
    place = output.output_path
    if place is not None and scheme_of(place) != "s3" and not (file_path(place) or "").startswith("/"):
        message = "must be an absolute path on the server, or an s3:// URI"
        yield Problem(field="output_config.output_path", message=message)
    if ".." in (output.output_model_name or "").split("/"):
        yield Problem(field="output_config.output_model_name", message="must not contain '..'")
    yield from _without_validation(job, data)


def _without_pairs(data: DataConfig) -> Iterator[Problem]:
    """What contradicts rows of two answers each."""
    if data.preprocess.packing:
        message = "samples of DPO are pairs, which are laid end to end as they are; leave it out"
        yield Problem(field="data_config.preprocess.packing", message=message)


def _not_shardable(job: JobConfigs, training: TrainingConfig) -> Iterator[Problem]:
    if job.world_size < 2:
        message = "FSDP shards the model over at least two ranks; set it to 2 or more, or use AUTO without a strategy"
        yield Problem(field="training_config.framework.distributed.world_size", message=message)
    if training.framework.distributed.backend == "gloo" and job.resource_config.gpu_count:
        message = "gloo cannot shard a model on GPUs; use nccl"
        yield Problem(field="training_config.framework.distributed.backend", message=message)
    optim = _hyperparameters(job)["optim"]
    if optim in OPTIMIZERS_OF_WHOLE_WEIGHTS:
        message = f"{optim} needs whole weights, and FSDP shards them; use another optimizer, or strategy ddp"
        yield Problem(field="training_config.hyperparameters.optim", message=message)
    if _hyperparameters(job)["mixed_precision"] == FP8:
        message = "weights of 8 bits are not sharded; use bf16, or strategy ddp"
        yield Problem(field="training_config.hyperparameters.mixed_precision", message=message)


def _without_fp8(job: JobConfigs, training: TrainingConfig, data: DataConfig) -> Iterator[Problem]:
    """What keeps the engine, which alone has fp8, from this training."""
    field, remedy = "training_config.hyperparameters.mixed_precision", "use bf16"
    if training.framework.type not in (FrameworkType.AUTO, FrameworkType.ENGINE):
        message = f"fp8 is computed by the engine alone, and not by {training.framework.type}; use framework type "
        yield Problem(field=field, message=f"{message}{FrameworkType.AUTO}, or {remedy}")
    elif training.framework.type is FrameworkType.AUTO:
        for lacking, why in islice(_engine_lacks(job, training, data), _MAX_PROBLEMS):
            message = f"fp8 is computed by the engine alone, and {lacking} {why}; change that, or {remedy}"
            yield Problem(field=field, message=message)


def _hyperparameters(job: JobConfigs) -> Mapping[str, Any]:
    """Typed, and all of them."""
    typed: Mapping[str, Any] = job.training_document["training_config"]["hyperparameters"]
    return typed


def _engine_lacks(job: JobConfigs, training: TrainingConfig, data: DataConfig) -> Iterator[tuple[str, str]]:
    document = job.training_document
    return engine_lacks(
        hyperparameters=_hyperparameters(job),
        config=training.framework.config,
        distributed=training.framework.distributed.config,
        sharded=training.framework.sharded,
        padding=data.preprocess.padding,
        packing=document["data_config"]["preprocess"]["packing"],
        dtype=training.base_model.dtype,
        trust_remote_code=training.base_model.trust_remote_code,
    )


def _without_validation(job: JobConfigs, data: DataConfig) -> Iterator[Problem]:
    strategy = _hyperparameters(job)["eval_strategy"]
    metric = job.output_config.checkpoint.metric_for_best_model or ""
    remedy = "there is no validation data: set data_config.validation_split, or validation of a source"
    names = measured(configs_of(job)[0].training_type, _hyperparameters(job))
    if metric and metric.removeprefix("eval_") not in names:
        evaluates = data.validates and strategy != "no"
        known = [prefix + name for prefix in (("", "eval_") if evaluates else ("",)) for name in names]
        message = choice_message("metric", metric, known)
        yield Problem(field="output_config.checkpoint.metric_for_best_model", message=message)
        metric = ""
    if _hyperparameters(job)["early_stopping_patience"] and not metric.startswith("eval_"):
        message = "needs a metric of the evaluations: set output_config.checkpoint.metric_for_best_model, to eval_loss"
        yield Problem(field="training_config.hyperparameters.early_stopping_patience", message=f"{message} for example")
    if data.validates:
        if strategy == "no" and metric.startswith("eval_"):
            message = f"'{metric}' is measured by evaluations, and hyperparameters.eval_strategy is no"
            yield Problem(field="output_config.checkpoint.metric_for_best_model", message=message)
        return
    if strategy != "no":
        message = f"is {strategy}, and {remedy}, or leave this out"
        yield Problem(field="training_config.hyperparameters.eval_strategy", message=message)
    if metric.startswith("eval_"):
        message = f"is {metric}, and {remedy}, or take a metric of the training, such as loss"
        yield Problem(field="output_config.checkpoint.metric_for_best_model", message=message)


TRAINING_FILE = "training.json"
"""The input of a launch that tells the training processes what to do."""


def training_document(job: JobConfigs) -> dict[str, Any]:
    """The configs of a request without secrets, with whatever follows from them filled in. A built-in trainer gets its
    hyperparameters typed and complete (RefusedError where one is wrong); a user's script gets them as given."""
    training, data = configs_of(job)
    document: dict[str, Any] = {
        "name": job.name,
        "training_config": training.model_dump(mode="json", exclude={"environment"}),
        "data_config": data.model_dump(mode="json"),
        "output_config": job.output_config.model_dump(mode="json"),
        "resource_config": job.resource_config.model_dump(mode="json"),
    }
    if data.preprocess.packing is None:
        document["data_config"]["preprocess"]["packing"] = training.training_type is TrainingType.CONTINUED_PRETRAIN
    if training.framework.type is not FrameworkType.CUSTOM:
        base = training.base_model
        document["training_config"]["base_model"]["source"] = str(model_source(base.model_id, base.source))
        values = read_hyperparameters(training.training_type, training.hyperparameters)
        if values["eval_strategy"] is None:
            values["eval_strategy"] = "epoch" if data.validates else "no"
        if values["eval_steps"] is None:
            values["eval_steps"] = job.output_config.checkpoint.save_steps
        document["training_config"]["hyperparameters"] = values
    return document


def training_inputs(job: JobConfigs) -> dict[str, str]:
    return {TRAINING_FILE: json.dumps(job.training_document, indent=2, ensure_ascii=False) + "\n"}
