"""The arguments of `train()` as an ordinary job document, and names of jobs. Pure, but for the source of a function."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from trainmaster.protocol.function_runner import MPI_LAUNCHER
from trainmaster.protocol.launch import KUBERNETES
from trainmaster.trainer import types
from trainmaster.trainer.builtin_trainer import training_from
from trainmaster.trainer.constants import JOB_NAME_UUID_LENGTH
from trainmaster.trainer.errors import NameRefusedError
from trainmaster.trainer.functions import check_arguments, source_of, tuple_paths
from trainmaster.trainer.options.train_job import add_objects, environment_of, take_train_job_fields
from trainmaster.trainer.resources import nodes_from
from trainmaster.trainer.runtimes.document import TORCH, TrainingRuntime, torchrun_variables
from trainmaster.trainer.server_choice import INITIALIZER_TIMEOUT_S

LONGEST = 63
MOST_TRIED = 100
"""Names of retries that others may have before one goes without."""
_LEGAL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def random_name() -> str:
    """A name that nobody has: a letter and hexadecimal digits."""
    return secrets.choice(string.ascii_lowercase) + secrets.token_hex(JOB_NAME_UUID_LENGTH)[:JOB_NAME_UUID_LENGTH]


def successors(name: str | None, *, is_retry: bool) -> Iterator[str | None]:
    """Names of a retry, the best first: `lab-2` after `lab`, `lab-3` after the retry `lab-2`. None: no name."""
    if name is None:
        yield None
        return
    root, number = name, 1
    if is_retry and (numbered := re.fullmatch(r"(.+)-([1-9]\d{0,5})", name)):
        root, number = numbered[1], int(numbered[2])
    for following in range(number + 1, number + 1 + MOST_TRIED):
        ending = f"-{following}"
        yield root[: LONGEST - len(ending)].rstrip("-") + ending
    yield None


def check_name(name: object) -> str:
    """A name that a job can have; raises NameRefusedError if none can."""
    if not isinstance(name, str) or not _LEGAL.fullmatch(name):
        raise NameRefusedError(
            f"{name!r} is no name for a job: 1 to {LONGEST} lower-case letters, digits and dashes, and no dash at "
            "either end"
        )
    return name


RUNTIME_LABEL = "trainmaster.io/runtime"
FRAMEWORK_LABEL = "trainmaster.io/framework"

_INITIALIZERS: Mapping[type[types.BaseInitializer], str] = {
    types.HuggingFaceDatasetInitializer: "huggingface",
    types.HuggingFaceModelInitializer: "huggingface",
    types.S3DatasetInitializer: "s3",
    types.S3ModelInitializer: "s3",
    types.DataCacheInitializer: "cache",
}
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")


def job_document(
    *,
    name: str,
    runtime: TrainingRuntime,
    trainer: object = None,
    initializer: types.Initializer | None = None,
    options: object = None,
    backend: str | None = None,
    kind: str | None = None,
    common: Mapping[str, Any] = MappingProxyType({}),
    initializers: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    shipped: Sequence[str] = (),
) -> dict[str, Any]:
    """The job that is submitted; raises ValueError if something is missing, unreadable, or does not fit together.

    An option may give another `name`. The `runtime` is without its image for a backend that runs none; `kind` is what
    options are told of the `backend`. `common` are fields for the workload of every job of the client, `initializers`
    for every `dataset` and `model` that is fetched, and `shipped` the files of a ScriptTrainer's directory that are
    uploaded.
    """
    if initializer is not None and not isinstance(initializer, types.Initializer):
        raise ValueError(f"initializer must be an Initializer, not a {type(initializer).__name__}")
    if trainer is None and runtime.trainer_type is types.TrainerType.BUILTIN_TRAINER:
        trainer = types.BuiltinTrainer(types.TorchTuneConfig())
    document: dict[str, Any] = {
        "name": name,
        "handle": name,
        "labels": {RUNTIME_LABEL: runtime.name, FRAMEWORK_LABEL: runtime.framework},
    }
    if backend is not None:
        document["backend"] = backend
    if isinstance(trainer, types.BuiltinTrainer):
        _refuse_unused(initializer, initializers)
        document |= _training(trainer, runtime, initializer)
    else:
        document |= _job(trainer, runtime, initializer, initializers, shipped)
    if common:
        document.setdefault("workload", {"kind": "trainer"}).update(deepcopy(dict(common)))
    _apply(options, document, trainer, kind or backend)
    if kind == KUBERNETES:
        add_objects(document, runtime)
    check_name(document["handle"])
    for variable in runtime.job_name_variables:
        environment_of(document).setdefault(variable, document["handle"])
    return document


def _apply(options: object, document: dict[str, Any], trainer: object, backend: str | None) -> None:
    if options is None:
        return
    if not isinstance(options, list | tuple):
        raise ValueError(f"options must be a list, not a {type(options).__name__}")
    for option in options:
        if not callable(option) or isinstance(option, type):
            raise ValueError(f"{option!r} is no option; trainmaster.trainer.options has them, such as Name('first')")
        option(document, trainer, backend)
        take_train_job_fields(document, trainer, backend)


def _training(
    trainer: types.BuiltinTrainer, runtime: TrainingRuntime, initializer: types.Initializer | None
) -> dict[str, Any]:
    if runtime.trainer_type is not types.TrainerType.BUILTIN_TRAINER:
        raise ValueError(
            f"the runtime {runtime.name} has no trainer of its own, as a BuiltinTrainer needs; list_runtimes() shows "
            "which have"
        )
    document = training_from(trainer.config, runtime, initializer, trainer.env)
    if runtime.image:
        document["workload"] = {"kind": "trainer", "image": runtime.image}
    return document


def _job(
    trainer: object,
    runtime: TrainingRuntime,
    initializer: types.Initializer | None,
    initializers: Mapping[str, Mapping[str, Any]],
    shipped: Sequence[str],
) -> dict[str, Any]:
    if trainer is not None and not isinstance(
        trainer, types.CustomTrainer | types.CustomTrainerContainer | types.ScriptTrainer
    ):
        raise ValueError(
            "trainer must be a CustomTrainer, CustomTrainerContainer, BuiltinTrainer or ScriptTrainer, "
            f"not a {type(trainer).__name__}"
        )
    if trainer is not None and runtime.trainer_type is not types.TrainerType.CUSTOM_TRAINER:
        raise ValueError(f"the runtime {runtime.name} trains by itself: it takes a BuiltinTrainer")
    num_nodes = trainer.num_nodes if trainer else None
    resources = trainer.resources_per_node if trainer else None
    try:
        nodes = nodes_from(
            runtime.num_nodes if num_nodes is None else num_nodes,
            (runtime.resources or None) if resources is None else resources,
        )
    except ValueError as error:
        raise error if resources is not None else ValueError(f"{runtime.origin}: {error}") from None
    workload = _workload(trainer, runtime, shipped)
    ranks = runtime.ranks_per_node or nodes.ranks_per_node
    environment = {**runtime.environment, **((trainer.env if trainer else None) or {})}
    if workload["kind"] == "container":
        workload["ranks_per_node"] = 1  # an image starts its own processes
        if runtime.policy == TORCH:
            environment = {**torchrun_variables(ranks), **environment}
    else:
        workload["ranks_per_node"] = ranks
    if environment:
        workload["environment"] = environment
    if initializer is not None and (initializer.dataset or initializer.model):
        workload["initializers"] = _initializers(initializer, initializers)
    return {"workload": workload, "resource_config": nodes.resource_config}


def _workload(trainer: object, runtime: TrainingRuntime, shipped: Sequence[str]) -> dict[str, Any]:
    if isinstance(trainer, types.CustomTrainerContainer):
        if not isinstance(trainer.image, str) or not trainer.image.strip():
            raise ValueError(f"CustomTrainerContainer needs an image, not {trainer.image!r}")
        return {"kind": "container", "image": trainer.image}
    image = getattr(trainer, "image", None) or runtime.image
    in_image = {"image": image} if image else {}
    if isinstance(trainer, types.CustomTrainer):
        source = source_of(trainer.func)
        arguments = check_arguments(trainer.func, trainer.func_args)
        function: dict[str, Any] = {
            "kind": "function",
            "source": source,
            "name": trainer.func.__name__,
            "arguments": arguments,
        }
        if tuples := list(tuple_paths(arguments)):
            function["tuples"] = tuples
        return {**function, **in_image, **_packages(trainer, runtime)}
    if isinstance(trainer, types.ScriptTrainer):
        if MPI_LAUNCHER in runtime.environment:
            raise ValueError(
                f"the runtime {runtime.name} starts functions with MPI, and no scripts: give a CustomTrainer whose "
                "function runs the script, or run mpirun as a command of a job of its own"
            )
        return {"kind": "script", **_script(trainer, shipped), **in_image, **_packages(trainer, runtime)}
    command, args = list(runtime.command), list(runtime.args)
    if image:
        own = {"argv": command, "args": args}
        return {"kind": "container", **in_image, **{name: words for name, words in own.items() if words}}
    if command or args:
        return {"kind": "command", "argv": [*command, *args]}
    raise ValueError(f"there is no trainer, and the runtime {runtime.name} has no command of its own; give a trainer")


def _script(trainer: types.ScriptTrainer, shipped: Sequence[str]) -> dict[str, Any]:
    if not isinstance(trainer.script, str) or not trainer.script.strip():
        raise ValueError(f"ScriptTrainer needs the path of a script, not {trainer.script!r}")
    if not all(isinstance(word, str) for word in trainer.args or ()):
        raise ValueError(f"args of a ScriptTrainer must be a list of text, not {trainer.args!r}")
    if trainer.directory is None:
        path = PurePosixPath(trainer.script).name
        files = [{"source": trainer.script, "path": path}]
    else:
        path = str(PurePosixPath(trainer.script))
        if path not in shipped:
            raise ValueError(f"{path} is not among the files of {trainer.directory} that are sent along")
        files = [{"source": name} for name in shipped]
    return {"path": path, "args": list(trainer.args or ()), "files": files}


def _packages(trainer: types.CustomTrainer | types.ScriptTrainer, runtime: TrainingRuntime) -> dict[str, Any]:
    """What is installed: the trainer's packages, and those of the runtime that it does not name itself."""
    own = trainer.packages_to_install or []
    if not isinstance(own, list | tuple) or not all(isinstance(package, str) for package in own):
        raise ValueError(f"packages_to_install must be a list of text, not {own!r}")
    named = [_canonical(package) for package in own]
    twice = sorted({name for name in named if named.count(name) > 1})
    if twice:
        raise ValueError(f"packages_to_install names {', '.join(twice)} more than once")
    added = [package for package in runtime.packages if _canonical(package) not in named]
    packages, urls = [*added, *own], list(trainer.pip_index_urls or ())
    if not packages:
        return {}
    return {"packages": packages, **({"index_urls": urls} if urls else {})}


def _canonical(package: str) -> str:
    """The name of a requirement, as indexes write it.

    >>> _canonical("Flash_Attn[extra]>=2"), _canonical("./wheels/einops.whl")
    ('flash-attn', './wheels/einops.whl')
    """
    found = _REQUIREMENT.match(package)
    return re.sub(r"[-_.]+", "-", found[1]).lower() if found else package


def _refuse_unused(initializer: types.Initializer | None, initializers: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse settings of initializers that have no effect on a built-in trainer.

    It fetches in the step that prepares its rows, so no image can do it, and no time limit applies to a part of it.
    """
    for part, said in initializers.items():
        if getattr(initializer, part, None) is None:
            continue
        itself = f"a BuiltinTrainer fetches its {part} itself"
        if "image" in said:
            raise ValueError(f"{itself}: use a client without {part}_initializer_image for it")
        if said.get("timeout_s", INITIALIZER_TIMEOUT_S) != INITIALIZER_TIMEOUT_S:
            raise ValueError(
                f"{itself}, without a time limit: use a client without initializer_timeout for it, or limit the whole "
                "job with ActiveDeadlineSeconds"
            )


def _initializers(initializer: types.Initializer, common: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for part in ("dataset", "model"):
        chosen = getattr(initializer, part)
        if chosen is None:
            continue
        kind = _INITIALIZERS.get(type(chosen))
        if kind is None or (part == "model") is not isinstance(
            chosen, types.HuggingFaceModelInitializer | types.S3ModelInitializer
        ):
            raise ValueError(f"a {type(chosen).__name__} cannot be the {part} of an Initializer")
        values = {each.name: getattr(chosen, each.name) for each in fields(chosen)}
        # A pattern list of None means that nothing is left out, where the server has a default of its own.
        keep = {"ignore_patterns"} if part == "model" else set()
        document[part] = {
            "type": kind,
            **{name: value for name, value in values.items() if value is not None or name in keep},
            **common.get(part, {}),
        }
    return document
