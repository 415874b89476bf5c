"""The outcome of every case with each client: of kubeflow 0.5.0 on its backends and of ours, and why ours differs.

Tests compare the cases of each client with this table; `make docs` writes the page.
No test uses a Kubernetes cluster: that column is what kubeflow was observed to do there, or does by its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surface_differences import BESIDE, SURFACE, Difference

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "kubeflow-differences.md"

NOT_FOUND = "LookupError and ValueError and RuntimeError"
NAME_REFUSED = "ValueError and RuntimeError"
PROGRESS = (
    '[False, True, False], 2 requests, Bearer a-token, {"estimatedRemainingSeconds": 0, "metrics": '
    '[{"name": "loss", "value": "0.5"}, {"name": "step", "value": "3"}, {"name": "note", "value": "x"}], '
    '"progressPercentage": 100}'
)

_ONE_ERROR = "one error for all backends; code that catches either of kubeflow's errors still works"
_EARLY = "refused before anything starts"
_EVERYWHERE = "the same on every backend"
_SERVER = "the server knows all jobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case. A column that is None was not looked at there."""

    case: str
    what: str
    local: str
    """kubeflow's local backend."""
    container: str | None = None
    """kubeflow's container backend."""
    kubernetes: str | None = None
    """kubeflow's Kubernetes backend."""
    ours: str
    in_containers: str | None = None
    """Ours on its container backend; None: as everywhere."""
    facade: str | None = None
    """Our backend behind kubeflow's own client; None: as ours."""
    why: str = ""
    """Where ours is not what kubeflow's local backend does: why not."""


def _same(case: str, what: str, outcome: str) -> Row:
    return Row(case=case, what=what, local=outcome, container=outcome, kubernetes=outcome, ours=outcome)


def _absent(verb: str, method: str) -> Row:
    return Row(
        case=f"unknown_job_{verb}",
        what=f"`{method}`",
        local="ValueError",
        container="ValueError",
        kubernetes="RuntimeError",
        ours=NOT_FOUND,
        why=_ONE_ERROR,
    )


SECTIONS: dict[str, tuple[Row, ...]] = {
    "Arguments of `train`": (
        Row(
            case="runtime_omitted",
            what="no runtime",
            local="ValueError",
            container="torch-distributed",
            kubernetes="torch-distributed",
            ours="torch-distributed",
            why="as the SDK documents it",
        ),
        Row(
            case="unknown_runtime",
            what="an unknown runtime",
            local="ValueError",
            container="ValueError",
            kubernetes="RuntimeError",
            ours=NOT_FOUND,
            why=_ONE_ERROR,
        ),
        Row(
            case="builtin_trainer_on_torch",
            what="a `BuiltinTrainer` on torch-distributed",
            local="ValueError",
            container="ValueError",
            kubernetes="ValueError",
            ours="ValueError",
        ),
        Row(
            case="container_trainer",
            what="a `CustomTrainerContainer` on torch-distributed",
            local="ValueError",
            container="ValueError",
            kubernetes="accepted",
            ours="ValueError",
            in_containers="accepted",
        ),
        _same("other_trainer", "a trainer of another type", "ValueError"),
        Row(
            case="no_trainer",
            what="no trainer: the command of the runtime or its image",
            local="ValueError",
            container="ValueError",
            kubernetes="accepted",
            ours="ValueError",
            in_containers="accepted",
        ),
        Row(
            case="func_not_callable",
            what="a function that is not callable",
            local="ValueError",
            container="TypeError",
            kubernetes="ValueError",
            ours="ValueError",
        ),
        Row(
            case="duplicate_package",
            what="the same package twice",
            local="ValueError",
            container="accepted",
            ours="ValueError",
        ),
        Row(
            case="duplicate_name",
            what="the name of an existing job",
            local="accepted, 1 known",
            container="OSError, 0 known",
            kubernetes="RuntimeError, 1 known",
            ours=f"{NAME_REFUSED}, 1 known",
            why="kubeflow starts a second, invisible process, or loses the first job; " + _EARLY,
        ),
        Row(
            case="illegal_name",
            what="a name with spaces and capitals",
            local="accepted",
            container="OSError",
            kubernetes="RuntimeError",
            ours=NAME_REFUSED,
            why="the same rules for names on every backend; " + _EARLY,
        ),
        Row(
            case="negative_num_nodes",
            what="`num_nodes=-1`",
            local="accepted",
            container="accepted",
            kubernetes="accepted",
            ours="ValueError",
            why=_EARLY,
        ),
        Row(
            case="number_of_nodes",
            what="`num_nodes=2`",
            local="1",
            container="2",
            kubernetes="2",
            ours="2",
            why=_EVERYWHERE,
        ),
        Row(
            case="gpu_beside_mig",
            what="`gpu` and `mig-1g.5gb` in one `resources_per_node`",
            local="accepted",
            container="accepted",
            kubernetes="ValueError",
            ours="ValueError",
            why="resources matter on every backend; " + _EARLY,
        ),
        _same("generated_name", "the generated name of a job", "a letter and 11 hex digits"),
        _same("chosen_name", "the option `Name`", "as chosen"),
    ),
    "Options": (
        Row(
            case="option_labels",
            what="`Labels`",
            local="ValueError",
            container="ValueError",
            kubernetes="accepted",
            ours="accepted",
            why=_EVERYWHERE,
        ),
        Row(
            case="option_annotations",
            what="`Annotations`",
            local="ValueError",
            container="ValueError",
            kubernetes="accepted",
            ours="accepted",
            why=_EVERYWHERE,
        ),
        Row(
            case="option_deadline",
            what="`ActiveDeadlineSeconds`",
            local="ValueError",
            container="ValueError",
            kubernetes="accepted",
            ours="accepted",
            why=_EVERYWHERE,
        ),
        _same("option_command_with_a_function", "`TrainerCommand` with a function", "ValueError"),
        _same("option_arguments_with_a_function", "`TrainerArgs` with a function", "ValueError"),
        Row(
            case="option_runtime_patch",
            what="`RuntimePatch`",
            local="ValueError",
            container="ValueError",
            kubernetes="accepted",
            ours="ValueError",
        ),
        _same("deadline_of_wrong_values", "`ActiveDeadlineSeconds` with 0, -1, True, 1.5 or text", "ValueError"),
        _same("patch_of_wrong_values", "`ContainerPatch` without a name, a value or an absolute path", "ValueError"),
    ),
    "Configurations and initializers": (
        _same("client_of_something_else", "a client with something other than a configuration", "ValueError"),
        _same("config_of_wrong_values", "a configuration with values of the wrong type", "ValueError"),
        _same("s3_uri_of_another_kind", "an S3 initializer without `s3://`", "ValueError"),
        Row(
            case="hub_uri_of_another_kind",
            what="a Hugging Face initializer without `hf://`",
            local="accepted",
            container="accepted",
            kubernetes="accepted",
            ours="ValueError",
            facade="accepted",
            why="as the SDK documents it",
        ),
        _same("cache_of_wrong_values", "a data cache with one node, or without `cache://SCHEMA/TABLE`", "ValueError"),
        _same("model_initializer_ignores", "files that model initializers skip", "*.msgpack *.h5 *.bin *.pt *.pth"),
        _same(
            "template_expands_into_train", "keys of `train(**TrainJobTemplate(...))`", "initializer, runtime, trainer"
        ),
    ),
    "Runtimes": (
        Row(
            case="listed_runtimes",
            what="`list_runtimes`",
            local="torch-distributed",
            container="torch-distributed",
            kubernetes="those of the cluster",
            ours="deepspeed-distributed, jax-distributed, mlx-distributed, mpi, python, torch-distributed, "
            "torch-distributed-with-cache, torchtune-llama3.2-1b, torchtune-llama3.2-3b, torchtune-qwen2.5-1.5b, "
            "trainmaster-continued-pretrain, trainmaster-dpo, trainmaster-full-finetune, trainmaster-lora, "
            "trainmaster-sft, xgboost-distributed",
            why="the same runtimes on every backend",
        ),
        _same("runtime_shape", "`get_runtime`", "torch-distributed, torch, CustomTrainer, 1 node"),
        Row(
            case="runtime_command",
            what="`runtime.trainer.command`",
            local="AttributeError",
            container="AttributeError",
            kubernetes="a command",
            ours="nothing",
            why="reading a property should not fail",
        ),
        Row(
            case="runtime_packages",
            what="`get_runtime_packages`",
            local="a list",
            container="printed",
            kubernetes="printed",
            ours="a list",
        ),
        Row(
            case="unknown_runtime_asked_for",
            what="`get_runtime` with an unknown runtime",
            local="ValueError",
            container="ValueError",
            kubernetes="RuntimeError",
            ours=NOT_FOUND,
            why=_ONE_ERROR,
        ),
        Row(
            case="packages_of_an_unknown_runtime",
            what="`get_runtime_packages` with an unknown runtime",
            local="ValueError",
            container="accepted",
            ours=NOT_FOUND,
            why=_ONE_ERROR,
        ),
    ),
    "Unknown jobs": (
        _absent("get", "get_job"),
        _absent("logs", "get_job_logs"),
        _absent("wait", "wait_for_job_status"),
        _absent("delete", "delete_job"),
        Row(
            case="unknown_job_events",
            what="`get_job_events`",
            local="NotImplementedError",
            container="NotImplementedError",
            kubernetes="RuntimeError",
            ours=NOT_FOUND,
            why=_ONE_ERROR,
        ),
    ),
    "Waiting": (
        _same(
            "wait_arguments",
            "a timeout or interval that is not positive, or an interval longer than the timeout",
            "ValueError",
        ),
        Row(
            case="wait_for_a_status_that_is_none",
            what="an unknown status",
            local="TimeoutError",
            container="TimeoutError",
            kubernetes="ValueError",
            ours="ValueError",
            why="the wait could never succeed",
        ),
        _same("timeout_while_running", "the timeout passes", "TimeoutError"),
        Row(
            case="failed_while_waiting",
            what="the job fails while the client waits for Complete",
            local="TimeoutError",
            container="RuntimeError",
            kubernetes="RuntimeError",
            ours="RuntimeError",
            why="as the SDK documents it: at once, with the reason and the last lines",
        ),
        _same("waiting_for_a_failure", "the job fails while the client waits for Failed, too", "Failed"),
        _same("callbacks_of_a_wait", "callbacks", "each poll, Running"),
    ),
    "Running jobs": (
        _same("status_while_running", "its status", "Running"),
        Row(
            case="directory_of_the_caller",
            what="the working directory of the process that called `train`",
            local="changed",
            container="kept",
            kubernetes="kept",
            ours="kept",
            why="the server starts jobs, not the caller's process",
        ),
        Row(
            case="logs_while_running",
            what="the output so far",
            local="there",
            container="there",
            kubernetes="there",
            ours="there",
        ),
        Row(
            case="follow",
            what="when `get_job_logs(follow=True)` returns a line",
            local="when the job has ended, to the end",
            container="as it is written, to the end",
            kubernetes="as it is written, to the end",
            ours="as it is written, to the end",
            why="following means reading lines as they are written",
        ),
        Row(
            case="function_arguments",
            what="`func_args` of a function that takes keywords or a dict",
            local="one dict",
            container="keywords",
            kubernetes="keywords",
            ours="keywords",
            why="as on kubeflow's other backends",
        ),
        Row(
            case="function_of_one_dict",
            what="`func_args` of a function with one parameter, a dict",
            local="called with the dict",
            container="not called",
            kubernetes="not called",
            ours="called with the dict",
        ),
        Row(
            case="installed_package",
            what="`packages_to_install` and `pip_index_urls`",
            local="installed",
            kubernetes="installed",
            ours="installed",
        ),
        _same("environment_given", "`env`", "yes"),
        Row(
            case="environment_merged",
            what="the rest of the environment",
            local="replaced",
            container="merged",
            kubernetes="merged",
            ours="merged",
            why="programs need PATH and HOME",
        ),
    ),
    "Ended jobs": (
        _same("status_when_complete", "its status after success", "Complete"),
        _same("status_when_failed", "its status after a failure", "Failed"),
        Row(
            case="steps",
            what="its steps",
            local="train Complete",
            container="node-0 Complete",
            ours="environment Complete, node-0 Complete",
            why="named as on kubeflow's other backends; the installation of packages has a separate log",
        ),
        _same("job_shape", "its runtime, nodes and time", "torch-distributed, 1 node, created at a datetime"),
        Row(
            case="log_lines",
            what="what `get_job_logs` returns",
            local="a line each",
            container="chunks",
            kubernetes="a line each",
            ours="a line each",
        ),
        Row(
            case="log_after_the_last_line",
            what="after the last line of the log",
            local="a line of the client's own",
            container="nothing",
            kubernetes="nothing",
            ours="nothing",
            why="a log contains only what the job wrote",
        ),
        Row(
            case="logs_of_an_unknown_step",
            what="logs of an unknown step",
            local="[]",
            container="[]",
            kubernetes="[]",
            ours="ValueError",
            why="a misspelt step should not look like a step without output",
        ),
        Row(
            case="logs_of_another_node",
            what="logs of `node-1` of two nodes",
            local="none",
            container="its own",
            kubernetes="its own",
            ours="its own",
            why=_EVERYWHERE,
        ),
        Row(
            case="events",
            what="`get_job_events`",
            local="NotImplementedError",
            container="NotImplementedError",
            kubernetes="some",
            ours="some",
            why=_EVERYWHERE,
        ),
        Row(
            case="files_of_a_failed_job",
            what="the files of a failed job",
            local="stay in the temporary directory",
            container="none in the temporary directory",
            ours="none in the temporary directory",
            why="environments are cached by their packages and shared by jobs",
        ),
    ),
    "Lists": (
        Row(
            case="listed_status",
            what="the status of a Complete job in a list",
            local="Unknown",
            container="Complete",
            kubernetes="Complete",
            ours="Complete",
            why="lists show what `get_job` shows",
        ),
        _same("listed_by_runtime", "the jobs of one runtime", "its jobs, no others"),
        Row(
            case="seen_by_another_client",
            what="a job in the list of another client",
            local="not listed",
            container="listed",
            kubernetes="listed",
            ours="listed",
            why=_SERVER,
        ),
    ),
    "Deleting": (
        Row(
            case="deleted_while_silent",
            what="a running job without output that has started a process",
            local="its processes run on",
            container="its processes are gone",
            kubernetes="its processes are gone",
            ours="its processes are gone",
            why="a deleted job must not keep running",
        ),
        Row(
            case="deleted_twice",
            what="deleting a second time",
            local="ValueError",
            container="ValueError",
            kubernetes="RuntimeError",
            ours=NOT_FOUND,
            why=_ONE_ERROR,
        ),
        Row(
            case="deleted_and_asked_for",
            what="using a deleted job",
            local="not listed, ValueError",
            container="not listed, ValueError",
            kubernetes="not listed, RuntimeError",
            ours=f"not listed, {NOT_FOUND}",
            why=_ONE_ERROR,
        ),
    ),
    "Separate functions": (
        _same("tpu_nodes", "`get_tpu_num_nodes`", "[2, 8, 2], else ValueError"),
        _same("progress_outside_of_a_job", "`update_trainjob_status` outside a job", "False"),
        _same("progress_sent", "`update_trainjob_status`: refused, accepted, too early; and the request", PROGRESS),
    ),
}

ROWS = {row.case: row for rows in SECTIONS.values() for row in rows}

INTRODUCTION = """\
# Differences from Kubeflow's client

This page compares Trainmaster's `TrainerClient` with that of kubeflow 0.5.0, case by case, and says why they differ.

Tests run every case with both packages, as local processes and in containers, and compare the outcome with this page,
which `make docs` writes. The column "kubeflow Kubernetes" is what that backend was observed to do, or does by its
source code; "–" was not tested. Errors are given by the built-in exceptions that they derive from.

The same cases also run with Trainmaster as the backend of kubeflow's own client
(`client.backend = trainmaster.trainer.kubeflow.KubeflowBackend()`). The outcomes are those of the column "Trainmaster",
with one exception: kubeflow's own Hugging Face initializers accept any URI, and `train` then refuses it.
"""


def page() -> str:
    """The page, as it should be."""
    parts = [INTRODUCTION]
    for title, rows in SECTIONS.items():
        parts.append(f"\n## {title}\n\n")
        parts.append("| | kubeflow local | kubeflow container | kubeflow Kubernetes | Trainmaster | why |\n")
        parts.append("|---|---|---|---|---|---|\n")
        for row in rows:
            ours = f"{row.ours}; in containers {row.in_containers}" if row.in_containers else row.ours
            cells = (row.what, row.local, row.container, row.kubernetes, ours, row.why)
            parts.append("".join(f"| {'–' if cell is None else cell} " for cell in cells) + "|\n")
    parts += _table("Names, defaults and values", SURFACE)
    parts += _table("Other differences", BESIDE)
    return "".join(parts)


def _table(title: str, differences: tuple[Difference, ...]) -> list[str]:
    head = [f"\n## {title}\n\n", "| | kubeflow | Trainmaster | why |\n", "|---|---|---|---|\n"]
    return head + [f"| {each.what} | {each.theirs} | {each.ours} | {each.why} |\n" for each in differences]


if __name__ == "__main__":
    PAGE.write_text(page())
