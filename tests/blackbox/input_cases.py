"""What a client says to arguments: those that it refuses, and those that it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import trained_functions
from blackbox_world import RUNTIME, World, outcome_of

ABSENT = "no-such-name"


def _train(world: World, *options: Any, keep: bool = False, **arguments: Any) -> str:
    """Whether a job is accepted. It is deleted at once, unless it is to be looked at."""
    arguments.setdefault("runtime", RUNTIME)
    arguments.setdefault("trainer", world.api.CustomTrainer(func=trained_functions.nothing))

    def accepted(name: str) -> str:
        if not keep:
            outcome_of(lambda: world.client.delete_job(name))
        return "accepted"

    return outcome_of(lambda: world.client.train(options=[*options, *world.place.options], **arguments), accepted)


def runtime_omitted(world: World) -> str:
    def call() -> Any:
        trainer = world.api.CustomTrainer(func=trained_functions.nothing)
        name = world.client.train(trainer=trainer, options=list(world.place.options))
        runtime = world.client.get_job(name).runtime.name
        world.client.delete_job(name)
        return runtime

    return outcome_of(call, str)


def unknown_runtime(world: World) -> str:
    return _train(world, runtime=ABSENT)


def unknown_runtime_asked_for(world: World) -> str:
    return outcome_of(lambda: world.client.get_runtime(ABSENT))


def unknown_job_get(world: World) -> str:
    return outcome_of(lambda: world.client.get_job(ABSENT))


def unknown_job_logs(world: World) -> str:
    return outcome_of(lambda: list(world.client.get_job_logs(ABSENT)))


def unknown_job_events(world: World) -> str:
    return outcome_of(lambda: world.client.get_job_events(ABSENT))


def unknown_job_wait(world: World) -> str:
    return outcome_of(lambda: world.client.wait_for_job_status(ABSENT, timeout=2, polling_interval=1))


def unknown_job_delete(world: World) -> str:
    return outcome_of(lambda: world.client.delete_job(ABSENT))


def builtin_trainer_on_torch(world: World) -> str:
    return _train(world, trainer=world.api.BuiltinTrainer(config=world.api.TorchTuneConfig()))


def container_trainer(world: World) -> str:
    return _train(world, trainer=world.api.CustomTrainerContainer(image="localhost/none:1"))


def other_trainer(world: World) -> str:
    return _train(world, trainer=object())


def no_trainer(world: World) -> str:
    return _train(world, trainer=None)


def func_not_callable(world: World) -> str:
    return _train(world, trainer=world.api.CustomTrainer(func="train"))


def duplicate_package(world: World) -> str:
    packages = ["greeting", "Greeting==9.0"]
    trainer = world.api.CustomTrainer(
        func=trained_functions.nothing, packages_to_install=packages, pip_index_urls=[world.index_url]
    )
    return _train(world, trainer=trainer)


def duplicate_name(world: World) -> str:
    name = f"{world.chosen_name}-again"
    assert _train(world, world.options.Name(name), keep=True) == "accepted"
    found = _train(world, world.options.Name(name), keep=True)
    known = [job.name for job in world.client.list_jobs()].count(name)
    outcome_of(lambda: world.client.delete_job(name))
    return f"{found}, {known} known"


def illegal_name(world: World) -> str:
    return _train(world, world.options.Name("Not A Name!"))


def negative_num_nodes(world: World) -> str:
    return _train(world, trainer=world.api.CustomTrainer(func=trained_functions.nothing, num_nodes=-1))


def gpu_beside_mig(world: World) -> str:
    resources = {"gpu": 1, "mig-1g.5gb": 1}
    return _train(world, trainer=world.api.CustomTrainer(func=trained_functions.nothing, resources_per_node=resources))


def wait_arguments(world: World) -> str:
    wrong: list[dict[str, float]] = [
        {"timeout": 0},
        {"timeout": -1},
        {"polling_interval": 0},
        {"timeout": 2, "polling_interval": 2},
    ]
    found = {
        outcome_of(lambda given=given: world.client.wait_for_job_status(ABSENT, **given))  # type: ignore[misc]
        for given in wrong
    }
    return ", ".join(sorted(found))


def wait_for_a_status_that_is_none(world: World) -> str:
    name = world.names["tell"]
    return outcome_of(
        lambda: world.client.wait_for_job_status(name, status={"Paused"}, timeout=0.4, polling_interval=0.2)
    )


def generated_name(world: World) -> str:
    return "a letter and 11 hex digits" if re.fullmatch("[a-z][0-9a-f]{11}", world.names["fail"]) else "another"


def chosen_name(world: World) -> str:
    return "as chosen" if world.names["tell"] == world.chosen_name else "another"


def option_labels(world: World) -> str:
    return _train(world, world.options.Labels({"team": "a"}))


def option_annotations(world: World) -> str:
    return _train(world, world.options.Annotations({"note": "b"}))


def option_deadline(world: World) -> str:
    return _train(world, world.options.ActiveDeadlineSeconds(60))


def option_command_with_a_function(world: World) -> str:
    return _train(world, world.options.TrainerCommand(["true"]))


def option_arguments_with_a_function(world: World) -> str:
    return _train(world, world.options.TrainerArgs(["x"]))


def option_runtime_patch(world: World) -> str:
    patch = world.options.TrainingRuntimeSpecPatch(
        template=world.options.JobSetTemplatePatch(metadata={"labels": {"team": "a"}})
    )
    return _train(world, world.options.RuntimePatch(training_runtime_spec=patch))


CASES: tuple[Callable[[World], str], ...] = (
    runtime_omitted,
    unknown_runtime,
    unknown_runtime_asked_for,
    unknown_job_get,
    unknown_job_logs,
    unknown_job_events,
    unknown_job_wait,
    unknown_job_delete,
    builtin_trainer_on_torch,
    container_trainer,
    other_trainer,
    no_trainer,
    func_not_callable,
    duplicate_package,
    duplicate_name,
    illegal_name,
    negative_num_nodes,
    gpu_beside_mig,
    wait_arguments,
    wait_for_a_status_that_is_none,
    generated_name,
    chosen_name,
    option_labels,
    option_annotations,
    option_deadline,
    option_command_with_a_function,
    option_arguments_with_a_function,
    option_runtime_patch,
)
