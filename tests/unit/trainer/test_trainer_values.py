"""Trainers, initializers and configurations: what may be made of them, and what they refuse."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from trainmaster.trainer import server_choice
from trainmaster.trainer.constants import INITIALIZER_DEFAULT_IGNORE_PATTERNS
from trainmaster.trainer.errors import NotFoundError
from trainmaster.trainer.resources import get_tpu_num_nodes
from trainmaster.trainer.types import (
    CustomTrainer,
    DataCacheInitializer,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    LoraConfig,
    S3DatasetInitializer,
    S3ModelInitializer,
    TrainJobTemplate,
)

HUGGING_FACE: list[Callable[[Any], Any]] = [HuggingFaceDatasetInitializer, HuggingFaceModelInitializer]
S3: list[Callable[[Any], Any]] = [S3DatasetInitializer, S3ModelInitializer]


@pytest.mark.parametrize("make", HUGGING_FACE)
@pytest.mark.parametrize(
    "uri",
    [
        "hf://google/flan-t5",
        "hf://tatsu-lab/alpaca/data",
        "hf://tatsu-lab/alpaca/data/train.parquet",
        "hf://a/b@main",
        "hf://a/b@0f3c/part",
        "hf://a/b/part with spaces/*.parquet@main",
        "hf://meta-llama/Llama-3.2-1B-Instruct",
    ],
)
def test_hugging_face_uri_is_taken_as_it_is(make: Callable[[str], Any], uri: str) -> None:
    assert make(uri).storage_uri == uri


@pytest.mark.parametrize("make", HUGGING_FACE)
@pytest.mark.parametrize("uri", ["", "hf://", "owner/name", "s3://a/b", "hf:///b", "hf://a b/c", None, 3])
def test_hugging_face_uri_without_a_name_is_refused(make: Callable[[Any], Any], uri: Any) -> None:
    with pytest.raises(ValueError, match="hf://OWNER/REPOSITORY"):
        make(uri)


@pytest.mark.parametrize("make", S3)
@pytest.mark.parametrize("uri", ["s3://bucket", "s3://bucket/", "s3://bucket/path/with spaces/x"])
def test_s3_uri_with_a_bucket_is_taken(make: Callable[[str], Any], uri: str) -> None:
    assert make(uri).storage_uri == uri


@pytest.mark.parametrize("make", S3)
@pytest.mark.parametrize("uri", ["s3://", "s3:///path", "bucket/path", "https://bucket", None])
def test_s3_uri_without_a_bucket_is_refused(make: Callable[[Any], Any], uri: Any) -> None:
    with pytest.raises(ValueError, match="s3://BUCKET"):
        make(uri)


def test_data_cache_takes_a_table_and_several_nodes() -> None:
    cache = DataCacheInitializer("cache://schema/table", "s3://a/metadata.json", 2, worker_mem="4Gi")
    assert (cache.num_data_nodes, cache.worker_mem) == (2, "4Gi")


@pytest.mark.parametrize("uri", ["cache://schema", "cache://schema/", "cache:///table", "cache://a/b/c", "s3://a/b"])
def test_data_cache_of_no_table_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="cache://SCHEMA/TABLE"):
        DataCacheInitializer(uri, "metadata.json", 2)


@pytest.mark.parametrize("nodes", [1, 0, -1, 2.5, "2", True, None])
def test_data_cache_of_one_node_or_none_is_refused(nodes: Any) -> None:
    with pytest.raises(ValueError, match="num_data_nodes"):
        DataCacheInitializer("cache://schema/table", "metadata.json", nodes)


def test_data_cache_without_metadata_is_refused() -> None:
    with pytest.raises(ValueError, match="metadata_loc"):
        DataCacheInitializer("cache://schema/table", " ", 2)


def test_secrets_are_not_shown() -> None:
    shown = [
        repr(HuggingFaceDatasetInitializer("hf://a/b", access_token="sesame")),
        repr(HuggingFaceModelInitializer("hf://a/b", access_token="sesame")),
        repr(S3DatasetInitializer("s3://a", access_key_id="id", secret_access_key="sesame")),
        repr(S3ModelInitializer("s3://a", access_key_id="id", secret_access_key="sesame")),
        repr(server_choice.ServerBackendConfig(url="http://127.0.0.1:1", api_key="sesame")),
    ]
    assert not any("sesame" in text for text in shown)


def test_secret_beside_a_mistake_is_not_shown() -> None:
    with pytest.raises(ValueError, match="url") as caught:
        server_choice.ServerBackendConfig(api_key="sesame")  # type: ignore[call-arg]
    assert "sesame" not in str(caught.value)


def test_defaults_that_are_lists_are_not_shared() -> None:
    for make in (lambda: LoraConfig().lora_attn_modules, lambda: CustomTrainer(func=print).pip_index_urls):
        make().append("changed")
        assert "changed" not in make()
    patterns = HuggingFaceModelInitializer("hf://a/b").ignore_patterns
    assert patterns == INITIALIZER_DEFAULT_IGNORE_PATTERNS
    patterns.append("changed")
    assert "changed" not in INITIALIZER_DEFAULT_IGNORE_PATTERNS


def test_template_expands_into_arguments() -> None:
    trainer = CustomTrainer(func=print)
    template = TrainJobTemplate(trainer=trainer, runtime="torch-distributed")
    assert dict(**template) == {"trainer": trainer, "runtime": "torch-distributed", "initializer": None}
    with pytest.raises(KeyError):
        template["options"]


@pytest.mark.parametrize("given", ["Always", "always", "ALWAYS"])
def test_pull_policy_is_taken_in_any_case(given: Any) -> None:
    assert server_choice.ContainerBackendConfig(pull_policy=given).pull_policy == "Always"


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (server_choice.ContainerBackendConfig, "pull_policy", "sometimes"),
        (server_choice.ContainerBackendConfig, "pull_policy", None),
        (server_choice.ContainerBackendConfig, "container_runtime", "lxc"),
        (server_choice.ContainerBackendConfig, "container_runtime", ""),
        (server_choice.ContainerBackendConfig, "initializer_timeout", 0),
        (server_choice.ContainerBackendConfig, "initializer_timeout", "long"),
        (server_choice.ContainerBackendConfig, "auto_remove", "perhaps"),
        (server_choice.ContainerBackendConfig, "runtime_source", "github://a/b"),
        (server_choice.ContainerBackendConfig, "pull_polcy", "Always"),
        (server_choice.LocalProcessBackendConfig, "cleanup_venv", "perhaps"),
        (server_choice.LocalProcessBackendConfig, "namespace", "default"),
        (server_choice.KubernetesBackendConfig, "namespace", 1),
        (server_choice.KubernetesBackendConfig, "client_configuration", {"host": "x"}),
        (server_choice.TrainingRuntimeSource, "sources", "github://a/b"),
        (server_choice.TrainingRuntimeSource, "sources", ["ftp://a/b"]),
        (server_choice.TrainingRuntimeSource, "sources", ["relative/path"]),
        (server_choice.TrainingRuntimeSource, "sources", ["github://owner"]),
        (server_choice.TrainingRuntimeSource, "sources", [""]),
        (server_choice.ServerBackendConfig, "url", "127.0.0.1:7070"),
        (server_choice.ServerBackendConfig, "url", "unix:///a"),
    ],
)
def test_configuration_with_a_wrong_value_names_it(make: Callable[..., Any], field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        make(**{field: value})


def test_configuration_is_checked_when_it_is_changed_too() -> None:
    config = server_choice.ContainerBackendConfig()
    with pytest.raises(ValueError, match="pull_policy"):
        config.pull_policy = "sometimes"  # type: ignore[assignment]


def test_runtime_sources_of_every_kind_are_taken() -> None:
    sources = [
        "github://kubeflow/trainer",
        "github://kubeflow/trainer/manifests",
        "https://example.org/runtimes.yaml",
        "http://127.0.0.1:1/runtime.yaml",
        "file:///etc/runtimes",
        "/etc/runtimes/one.yaml",
    ]
    assert server_choice.TrainingRuntimeSource(sources=sources).sources == sources
    assert server_choice.TrainingRuntimeSource().sources == []


def test_not_found_is_what_either_caller_catches_and_survives_a_pickle() -> None:
    error = NotFoundError("runtime", "torc", ["torch", "jax"])
    assert isinstance(error, ValueError)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, LookupError)
    assert str(error) == "there is no runtime named 'torc'; there are: torch, jax"
    again = pickle.loads(pickle.dumps(error))
    assert (again.kind, again.name, again.known, str(again)) == (error.kind, error.name, error.known, str(error))
    assert str(NotFoundError("job", "x")) == "there is no job named 'x'"


@pytest.mark.parametrize(
    ("slices", "topology", "chips", "nodes"),
    [
        (1, "2x2", 4, 1),
        (1, "2x4", 4, 2),
        (2, "4x4", 4, 8),
        (1, "2x2x2", 4, 2),
        (3, " 2 X 2 ", 4, 3),
        (2, "1x3", 4, 2),
        (1, "4x4", 8, 2),
    ],
)
def test_tpu_nodes_follow_from_the_topology(slices: int, topology: str, chips: int, nodes: int) -> None:
    assert get_tpu_num_nodes(slices, topology, chips) == nodes


@pytest.mark.parametrize(
    ("slices", "topology", "chips", "blamed"),
    [
        (0, "2x2", 4, "num_slices"),
        (-1, "2x2", 4, "num_slices"),
        (1.0, "2x2", 4, "num_slices"),
        (True, "2x2", 4, "num_slices"),
        (1, "2x2", 0, "chips_per_host"),
        (1, "", 4, "topology"),
        (1, None, 4, "topology"),
        (1, "4", 4, "topology"),
        (1, "2x", 4, "topology"),
        (1, "2x2x2x2", 4, "topology"),
        (1, "axb", 4, "topology"),
        (1, "0x2", 4, "topology"),
        (1, "-1x2", 4, "topology"),
        (1, "3x3", 4, "do not fill"),
    ],
)
def test_tpu_nodes_of_wrong_values_are_refused(slices: Any, topology: Any, chips: Any, blamed: str) -> None:
    with pytest.raises(ValueError, match=blamed):
        get_tpu_num_nodes(slices, topology, chips)


@pytest.mark.parametrize("uri", ["hf://gpt2", "hf://squad@main", "hf://owner/name", "hf://owner/name/path"])
def test_hugging_face_uri_may_have_no_owner(uri: str) -> None:
    assert HuggingFaceDatasetInitializer(uri).storage_uri == uri
    assert HuggingFaceModelInitializer(uri).storage_uri == uri
