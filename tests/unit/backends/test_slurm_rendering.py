"""The batch scripts of Slurm: their text, and that nothing of a user gets into them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_cluster import slurm_launch
from trainmaster.backends.cluster.engine import EngineLaunch, EngineRefusedError
from trainmaster.backends.slurm.inventory import GpuChoice
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.backends.slurm.render import batch_script, comment_of, sbatch_arguments, sbatch_environment

PLAIN = """\
#!/bin/sh
#SBATCH --job-name=tm-k3f9-job-wk96lltjcfl9-1
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --ntasks-per-node=1
#SBATCH --mem=100M
#SBATCH --signal=TERM@20
#SBATCH --nice=50
#SBATCH --no-requeue
#SBATCH --dependency=singleton
#SBATCH --chdir=/tmp
#SBATCH --output=/tmp/tm-k3f9-job-wk96lltjcfl9-1.out
#SBATCH --export=ALL
#SBATCH --propagate=NONE

# Variables of the request, the only ones of the server: PATH HOME USER LOGNAME LANG
# Slurm's signals reach the workers directly, and their ranks; this script waits for them.
trap '' TERM
export TRAINMASTER_ENGINE_SIGNALS_RANKS=1
srun --mpi=none --export=ALL --kill-on-bad-exit=1 --wait=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 \\
    sh -c 'exec worker'
code=$?
if [ "$code" -eq 0 ]; then rm -f /tmp/tm-k3f9-job-wk96lltjcfl9-1.out; fi
exit "$code"
"""

FULL = """\
#!/bin/sh
#SBATCH --job-name=tm-k3f9-job-wk96lltjcfl9-1
#SBATCH --partition=gpu
#SBATCH --account=team
#SBATCH --qos=long
#SBATCH --reservation=week
#SBATCH --nodes=4
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64000M
#SBATCH --tmp=500000M
#SBATCH --gres=gpu:h100:8
#SBATCH --constraint=(ib|roce)&nvlink&h100
#SBATCH --prefer=(ib|roce)&nvlink&h100&fast
#SBATCH --exclusive
#SBATCH --time=73
#SBATCH --signal=TERM@90
#SBATCH --no-requeue
#SBATCH --dependency=singleton
#SBATCH --chdir=/tmp
#SBATCH --output=/dev/null
#SBATCH --export=ALL
#SBATCH --propagate=NONE
#SBATCH --mail-type=END
#SBATCH --licenses=solver:1

# Variables of the request, the only ones of the server: PATH HOME USER LOGNAME LANG TRAINMASTER_WORKER_TOKEN
export SPEC='{"a": "b"}'
# Slurm's signals reach the workers directly, and their ranks; this script waits for them.
trap '' TERM
export TRAINMASTER_ENGINE_SIGNALS_RANKS=1
srun --mpi=none --export=ALL --kill-on-bad-exit=1 --wait=0 --nodes=4 --ntasks=4 --ntasks-per-node=1 \
--cpus-per-task=16 \\
    sh -c 'exec worker'
code=$?
exit "$code"
"""


def launch_of(**values: Any) -> EngineLaunch:
    return slurm_launch("k3f9", "exec worker", **values)


def lines_of(options: Mapping[str, Any], *, gpus: GpuChoice | None = None, **values: Any) -> list[str]:
    return batch_script(launch_of(**values), SlurmOptions(**options), gpus or GpuChoice()).splitlines()


def test_plain_job_is_one_short_script() -> None:
    assert batch_script(launch_of(), SlurmOptions(), GpuChoice()) == PLAIN


def test_job_with_everything_names_every_need_and_option() -> None:
    options = SlurmOptions(
        partition="gpu",
        account="team",
        qos="long",
        reservation="week",
        constraint="ib|roce",
        exclusive=True,
        nice=0,
        output_dir="",
        extra_args="--mail-type=END --licenses=solver:1",  # type: ignore[arg-type]
    )
    launch = launch_of(
        nodes=4,
        grace_s=89.5,
        max_runtime_s=3600.0,
        environment={"SPEC": '{"a": "b"}'},
        secrets={"TRAINMASTER_WORKER_TOKEN": "secret"},
        gpus=8,
        cpu_cores=16,
        memory_mb=64_000,
        storage_mb=500_000,
        capabilities=("nvlink",),
        affinity=("fast",),
        priority=10,
    )
    gpus = GpuChoice(gres="gpu:h100:8", feature="h100")
    assert batch_script(launch, options, gpus, ("fast", "it's")) == FULL
    assert "secret" not in "".join([FULL, *sbatch_arguments(launch)])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"partition": "gpu"}, "--partition=gpu"),
        ({"account": "team"}, "--account=team"),
        ({"qos": "long"}, "--qos=long"),
        ({"constraint": "ib&h100"}, "--constraint=ib&h100"),
        ({"reservation": "week"}, "--reservation=week"),
        ({"exclusive": "true"}, "--exclusive"),
        ({"time": "2-00:00:00"}, "--time=2-00:00:00"),
        ({"nice": "3"}, "--nice=15"),
        ({"output_dir": "/scratch/logs/"}, "--output=/scratch/logs/tm-k3f9-job-wk96lltjcfl9-1.out"),
        ({"extra_args": "--mail-type=END"}, "--mail-type=END"),
        ({"extra_args": ["--licenses=a:1", "--spread-job"]}, "--spread-job"),
    ],
)
def test_option_is_a_line_of_the_script(options: dict[str, Any], line: str) -> None:
    assert f"#SBATCH {line}" in lines_of(options)
    assert f"#SBATCH {line}" not in lines_of({})


def test_runtime_of_the_job_counts_before_the_option_time() -> None:
    lines = lines_of({"time": "5"}, max_runtime_s=1.0, grace_s=0.0)
    assert "#SBATCH --time=12" in lines
    assert "#SBATCH --signal=TERM@1" in lines


@pytest.mark.parametrize(
    ("time", "max_runtime_s", "expected"),
    [
        ("2-00:00:00", None, "--time=60"),
        ("UNLIMITED", None, "--time=60"),
        ("0:30:00", None, "--time=0:30:00"),
        ("", 3600.0, "--time=60"),
        ("", 60.0, "--time=12"),
    ],
)
def test_time_limit_is_no_longer_than_the_partition_allows(
    time: str, max_runtime_s: float | None, expected: str
) -> None:
    launch = launch_of(max_runtime_s=max_runtime_s, grace_s=0.0)
    script = batch_script(launch, SlurmOptions(time=time), GpuChoice(), max_minutes=60)
    assert f"#SBATCH {expected}" in script.splitlines()


def test_job_without_a_time_limit_gets_that_of_the_partition() -> None:
    script = batch_script(launch_of(), SlurmOptions(), GpuChoice(), max_minutes=60)
    assert "--time" not in script


def test_higher_priority_is_nicer_to_nobody() -> None:
    nice = {priority: [line for line in lines_of({}, priority=priority) if "nice" in line] for priority in (0, 9, 10)}
    assert nice == {0: ["#SBATCH --nice=100"], 9: ["#SBATCH --nice=10"], 10: []}


@pytest.mark.parametrize("name", ["two words", "a;b", "$(x)", "a\nb", "a&b", "region=eu"])
def test_capability_that_is_no_feature_is_refused(name: str) -> None:
    with pytest.raises(EngineRefusedError, match="cannot be a feature"):
        lines_of({}, capabilities=(name,))


def test_name_of_a_variable_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no name of a variable"):
        lines_of({}, environment={"A;B": "x"})
    with pytest.raises(ValueError, match="no name of a variable"):
        sbatch_environment(launch_of(secrets={"A=B": "x"}), {})


def test_sbatch_runs_with_few_variables() -> None:
    environment = {"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "SLURM_CONF": "/etc/slurm.conf", "LC_ALL": "C"}
    wanted = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "TOKEN": "t"}
    assert sbatch_environment(launch_of(secrets={"TOKEN": "t"}), environment) == wanted


ANY_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), min_size=1)


@given(text=ANY_TEXT, value=ANY_TEXT)
def test_text_of_users_is_not_in_the_script(text: str, value: str) -> None:
    mark = "user-text"
    needs = {"job_name": mark + text, "account": mark, "affinity": (mark + text,), "anti_affinity": (mark + text,)}
    launch = launch_of(**needs)
    assert batch_script(launch, SlurmOptions(), GpuChoice()) == PLAIN
    comment = comment_of(launch)
    assert comment.isprintable()
    assert "|" not in comment
    assert comment.startswith("trainmaster k3f9 job-wk96lltjcfl9.1 ")


@given(value=ANY_TEXT)
def test_variables_are_quoted(value: str) -> None:
    script = batch_script(launch_of(environment={"VALUE": value}), SlurmOptions(), GpuChoice())
    head, _, rest = script.partition("export VALUE=")
    quoted, mark, _ = rest.partition("\n# Slurm's signals")
    assert mark
    assert shlex.split(quoted) == [value]
    assert "\n#SBATCH" not in script.removeprefix(head).partition("export")[0]


def test_shell_gives_the_worker_what_was_quoted() -> None:
    value = 'it\'s $HOME `x` "y" \\ \n#SBATCH --hold\n'
    script = batch_script(launch_of(environment={"VALUE": value}), SlurmOptions(output_dir=""), GpuChoice())
    script = script.replace("srun --mpi=none", 'printf %s "$VALUE"; true')
    assert subprocess.run(["sh"], input=script, capture_output=True, text=True, check=True).stdout == value


@pytest.mark.parametrize(
    ("container", "started"),
    [
        ("--container-image={image} --no-container-mount-home", "--container-image=team/a:1 --no-container-mount-home"),
        ("apptainer exec --bind '/my data' docker://{image}", "apptainer exec --bind '/my data' docker://team/a:1"),
    ],
)
def test_image_is_started_as_the_option_says(container: str, started: str) -> None:
    options = SlurmOptions(container=container)
    named = with_image(launch_of(), "team/a:1")
    assert f" --ntasks-per-node=1 {started} \\\n    sh -c" in batch_script(named, options, GpuChoice())
    assert started not in batch_script(launch_of(), options, GpuChoice())
    by_default = SlurmOptions(container=container, image="team/a:1")
    assert started in batch_script(launch_of(), by_default, GpuChoice())


def test_image_is_refused_once_the_option_is_gone() -> None:
    with pytest.raises(EngineRefusedError, match="option container"):
        batch_script(with_image(launch_of(), "team/a:1"), SlurmOptions(), GpuChoice())


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"container": "apptainer exec"}, "say where the image goes"),
        ({"container": "apptainer 'exec {image}"}, "cannot be split into words"),
        ({"image": "team/a:1"}, "the option container has to say how images run"),
    ],
)
def test_options_for_images_are_checked(values: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SlurmOptions(**values)


def with_image(launch: EngineLaunch, image: str) -> EngineLaunch:
    request = launch.request
    return replace(launch, request=replace(request, launch=replace(request.launch, image=image)))
