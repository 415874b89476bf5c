"""Every field of what `TrainerClient` is given has an effect, or is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from field_tables import Field, broken_reference, fields_of
from kubernetes import client as official

from trainmaster.protocol.launch import KUBERNETES
from trainmaster.trainer import options, server_choice, types
from trainmaster.trainer.job_document import job_document
from trainmaster.trainer.runtimes.sources import built_in
from trainmaster.trainer.server_choice import Surroundings, choose
from trainmaster.trainer.types import (
    BuiltinTrainer,
    CustomTrainer,
    CustomTrainerContainer,
    DataFormat,
    DataType,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    ScriptTrainer,
    TorchTuneConfig,
    TorchTuneInstructDataset,
)

REFUSED = "refused"
FIELDS = fields_of("trainer_client")
OPTIONS = "options"
PATCHES = {name for name in options.__all__ if name.endswith("Patch")} - {"RuntimePatch"}
"""Parts of a RuntimePatch."""
KUBECONFIG = Path(__file__).with_name("kubeconfig.yaml")
DATA, MODEL = HuggingFaceDatasetInitializer("hf://org/data"), HuggingFaceModelInitializer("hf://org/model")


def train(lr: float = 0.0) -> float:
    return lr


def nothing() -> None:
    """Another function."""


@functools.cache
def runtimes() -> Any:
    """Read once: that takes longer than all the rest."""
    return built_in()


def trained(trainer: object, initializer: Initializer | None = None, *given: Any) -> Any:
    name = "trainmaster-sft" if isinstance(trainer, BuiltinTrainer) else "torch-distributed"
    if isinstance(trainer, BuiltinTrainer) and trainer.config.peft_config is not None:
        name = "trainmaster-lora"
    runtime = runtimes().runtimes.get(name)
    assert runtime is not None
    shipped = ["train.py"] if isinstance(trainer, ScriptTrainer) else []
    return job_document(
        name="job-1",
        runtime=runtime,
        trainer=trainer,
        initializer=initializer,
        options=list(given),
        shipped=shipped,
        kind=KUBERNETES if any(isinstance(each, options.RuntimePatch) for each in given) else None,
    )


def tuned(config: TorchTuneConfig) -> Any:
    return trained(BuiltinTrainer(config), Initializer(DATA, MODEL))


def fetched(initializer: object) -> Any:
    part = "model" if "Model" in type(initializer).__name__ else "dataset"
    return trained(CustomTrainer(func=train), Initializer(**{part: initializer}))  # type: ignore[arg-type]


def chosen(config: Any) -> Any:
    around = Surroundings(environment={"KUBECONFIG": str(KUBECONFIG)}, home=Path("/nowhere"), in_cluster=False)
    return choose(config, around)


PARTS: dict[str, tuple[type, dict[str, Any], Callable[[Any], Any]]] = {
    "CustomTrainer": (CustomTrainer, {"func": train}, trained),
    "CustomTrainerContainer": (CustomTrainerContainer, {"image": "i:1"}, trained),
    "ScriptTrainer": (ScriptTrainer, {"script": "train.py"}, trained),
    "BuiltinTrainer": (
        BuiltinTrainer,
        {"config": TorchTuneConfig()},
        lambda trainer: trained(trainer, Initializer(DATA, MODEL)),
    ),
    "TorchTuneConfig": (TorchTuneConfig, {}, tuned),
    "LoraConfig": (LoraConfig, {}, lambda lora: tuned(TorchTuneConfig(peft_config=lora))),
    "TorchTuneInstructDataset": (
        TorchTuneInstructDataset,
        {},
        lambda rows: tuned(TorchTuneConfig(dataset_preprocess_config=rows)),
    ),
    "Initializer": (Initializer, {}, lambda initializer: trained(CustomTrainer(func=train), initializer)),
    "HuggingFaceDatasetInitializer": (HuggingFaceDatasetInitializer, {"storage_uri": "hf://org/data"}, fetched),
    "HuggingFaceModelInitializer": (HuggingFaceModelInitializer, {"storage_uri": "hf://org/data"}, fetched),
    "S3DatasetInitializer": (types.S3DatasetInitializer, {"storage_uri": "s3://bucket/a"}, fetched),
    "S3ModelInitializer": (types.S3ModelInitializer, {"storage_uri": "s3://bucket/a"}, fetched),
    "DataCacheInitializer": (
        types.DataCacheInitializer,
        {"storage_uri": "cache://a/b", "metadata_loc": "s3://m/x", "num_data_nodes": 2},
        fetched,
    ),
    "LocalProcessBackendConfig": (server_choice.LocalProcessBackendConfig, {}, chosen),
    "ServerBackendConfig": (server_choice.ServerBackendConfig, {"url": "http://a:1"}, chosen),
    "TrainingRuntimeSource": (
        server_choice.TrainingRuntimeSource,
        {},
        lambda source: chosen(server_choice.ContainerBackendConfig(runtime_source=source)),
    ),
    "ContainerBackendConfig": (server_choice.ContainerBackendConfig, {}, chosen),
    "KubernetesBackendConfig": (server_choice.KubernetesBackendConfig, {}, chosen),
}
"""What a part is of, what it cannot be without, and what is made of it."""
VALUES: dict[tuple[str, str], Any] = {
    ("CustomTrainer", "func"): nothing,
    ("BuiltinTrainer", "config"): TorchTuneConfig(epochs=2),
    ("TorchTuneConfig", "dtype"): DataType.BF16,
    ("TorchTuneConfig", "peft_config"): LoraConfig(),
    ("TorchTuneConfig", "dataset_preprocess_config"): TorchTuneInstructDataset(column_map={"input": "question"}),
    ("TorchTuneInstructDataset", "source"): DataFormat.JSON,
    ("Initializer", "dataset"): DATA,
    ("Initializer", "model"): MODEL,
    (OPTIONS, "Volumes"): [options.Volume(source="/a", target="/b")],
    (OPTIONS, "RuntimePatch"): options.TrainingRuntimeSpecPatch(
        template=options.JobSetTemplatePatch(metadata={"labels": {"team": "a"}})
    ),
    # The same file by another path.
    ("KubernetesBackendConfig", "config_file"): str(KUBECONFIG.parent / ".." / "fields" / KUBECONFIG.name),
    ("KubernetesBackendConfig", "client_configuration"): official.Configuration(host="https://other.test"),
}
"""Values that YAML cannot write, by part and field."""


def outcome(field: Field, *, changed: bool) -> Any:
    """What comes of the part, with the field at its value or without; `REFUSED` where that is what happens."""
    value = VALUES.get((field.part, field.name), field.value)
    try:
        if field.part == OPTIONS:
            given = [getattr(options, field.name)(value)] if changed else []
            return trained(CustomTrainerContainer(image="i:1"), None, *given)
        kind, needed, make = PARTS[field.part]
        return make(kind(**{**needed, **field.needs, **({field.name: value} if changed else {})}))
    except ValueError:
        return REFUSED


def test_table_has_a_row_for_every_field_and_option() -> None:
    rows: dict[str, set[str]] = {}
    for field in FIELDS:
        rows.setdefault(field.part, set()).add(field.name)
    given = rows.pop(OPTIONS)
    assert given == set(options.__all__) - PATCHES - {"Option", "Volume"}
    assert rows == {
        name: set(kind.model_fields)
        if issubclass(kind, server_choice.BackendConfig)
        else {field.name for field in dataclasses.fields(kind)}
        for name, (kind, _, _) in PARTS.items()
    }


def test_every_trainer_initializer_and_configuration_is_in_the_table() -> None:
    given = {
        name for name in types.types.__all__ if name.endswith(("Trainer", "TrainerContainer", "Initializer", "Config"))
    }
    ours = {name for name in vars(server_choice) if name.endswith("BackendConfig")} - {
        "BackendConfig",
        "AnyBackendConfig",
    }
    assert (given | ours) - {"BaseInitializer", "RuntimeTrainer"} <= PARTS.keys()


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_that_is_changed_changes_what_is_made_of_it(field: Field) -> None:
    before, after = outcome(field, changed=False), outcome(field, changed=True)
    assert (after is REFUSED) == field.effect.startswith(REFUSED)
    assert after != before


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_names_a_test_that_is_there(field: Field) -> None:
    assert broken_reference(field) is None
