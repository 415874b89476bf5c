"""Names of `trainmaster.trainer`: where they are found, and what importing them costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from itertools import islice
from typing import Any

import pytest

import trainmaster.trainer
from trainmaster.trainer import options, types
from trainmaster.trainer.job_document import successors

PROGRAM = """
import json, sys
from trainmaster.trainer import CustomTrainer, update_trainjob_status
loaded = [name for name in ("httpx", "pydantic", "rich", "yaml", "trainmaster.client") if name in sys.modules]
from trainmaster.trainer.constants import constants
print(json.dumps({
    "loaded": loaded,
    "runtime": constants.DEFAULT_TRAINING_RUNTIME,
    "urls": CustomTrainer(func=print).pip_index_urls,
    "home": constants.DEFAULT_MPI_USER_HOME,
}))
"""


def found(**environment: str) -> Any:
    """What a fresh process finds in such an environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEFAULT_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**kept, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "is_retry", "names"),
    [
        ("lab", False, ["lab-2", "lab-3"]),
        ("lab-2", True, ["lab-3", "lab-4"]),
        ("run-5", False, ["run-5-2", "run-5-3"]),
        ("a" * 60 + "-bc", False, ["a" * 60 + "-2", "a" * 60 + "-3"]),
        (None, False, [None]),
    ],
)
def test_retry_is_named_after_its_job(name: str | None, is_retry: bool, names: list[str | None]) -> None:
    assert list(islice(successors(name, is_retry=is_retry), 2)) == names


def test_names_for_training_code_load_no_library_and_the_defaults() -> None:
    assert found() == {"loaded": [], "runtime": "torch-distributed", "urls": [], "home": "/home/mpiuser"}


def test_defaults_come_from_the_environment() -> None:
    given = found(DEFAULT_TRAINING_RUNTIME="jax", DEFAULT_PIP_INDEX_URLS="http://a/simple, http://b/simple,")
    assert (given["runtime"], given["urls"]) == ("jax", ["http://a/simple", "http://b/simple"])


@pytest.mark.parametrize("module", [trainmaster.trainer, types, types.types, options])
def test_every_name_that_is_listed_is_there_once(module: Any) -> None:
    assert len(module.__all__) == len(set(module.__all__))
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        trainmaster.trainer.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("api", "TrainerClient"),
        ("api.trainer_client", "TrainerClient"),
        ("backends.localprocess", "LocalProcessBackendConfig"),
        ("backends.localprocess.types", "LocalProcessBackendConfig"),
        ("backends.container", "ContainerBackendConfig"),
        ("backends.container.types", "ContainerBackendConfig"),
        ("backends.container.types", "TrainingRuntimeSource"),
        ("types.types", "CustomTrainer"),
        ("constants.constants", "DATASET_PATH"),
    ],
)
def test_name_is_where_kubeflow_has_it(module: str, name: str) -> None:
    assert getattr(import_module(f"trainmaster.trainer.{module}"), name) is getattr(trainmaster.trainer, name)


def test_options_are_where_kubeflow_has_them() -> None:
    from trainmaster.trainer.options import common, kubernetes

    assert common.Name is options.Name
    for name in kubernetes.__all__:
        assert getattr(kubernetes, name) is getattr(options, name)
