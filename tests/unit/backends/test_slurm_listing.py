"""Lists of jobs from squeue and sacct, host lists, options, and what Slurm's programs say when they fail."""

from __future__ import annotations

import doctest
import os
import pwd
from pathlib import Path
from types import ModuleType

import pytest
from pydantic import ValidationError

from trainmaster.backends.cluster.engine import EngineAwayError, EngineJob, EnginePhase
from trainmaster.backends.slurm import hostlist, inventory, listing, refusals, states
from trainmaster.backends.slurm.client import SlurmEngine
from trainmaster.backends.slurm.commands import SlurmCommands, SlurmRefusedError
from trainmaster.backends.slurm.options import RESERVED, SlurmOptions
from trainmaster.protocol.reasons import Reason


@pytest.mark.parametrize("module", [hostlist, inventory, listing, refusals, states])
def test_examples_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[09-11,2]", ["n09", "n10", "n11", "n2"]),
        ("a[1-2]b[3-4],c", ["a1b3", "a1b4", "a2b3", "a2b4", "c"]),
        ("rack[0-1]-gpu", ["rack0-gpu", "rack1-gpu"]),
    ],
)
def test_host_list_is_expanded(text: str, hosts: list[str]) -> None:
    assert list(hostlist.expanded(text)) == hosts


LISTED = """\
7|tm-k3-job-a-1|0|RUNNING|n[1-2]|None|0|N/A|0:26|UNLIMITED|trainmaster k3 job-a.1 acc it's|
8|tm-k3-job-b-12|18176|FAILED|n1|NonZeroExitCode|0|N/A|0:26|1:00|(null)|
9|tm-k3-x-job-c-1|0|RUNNING|n1|None|0|N/A|0:26|1:00|trainmaster k3-x job-c.1 acc j|
10|somebody's|0|RUNNING|n1|None|0|N/A|0:26|1:00|trainmaster k3 job-d.1 acc j|
11_[1-4]|tm-k3-job-e-1|0|PENDING|(null)|Priority|0|N/A|0:26|1:00|trainmaster k3 job-e.1 acc j|
13|tm-k3-job-g-1|0|COMPLETED|n1|None|0|2026-11-19T20:42:14|1-00:00:26|2-00:00:00|(null)|
12|tm-k3-job-f-3|0|PENDING||ReqNodeNotAvail, UnavailableNodes:n1|0|N/A|0:26|1:00|changed by a plugin|
"""


def test_lines_of_squeue_are_jobs_of_the_instance() -> None:
    jobs = {job.job_id: job for job in listing.jobs_of(LISTED, "k3")}
    assert {job_id: job.attempt_id for job_id, job in jobs.items()} == {
        7: "job-a.1",
        8: "job-b.12",
        12: "job-f.3",
        13: "job-g.1",
    }
    assert [(job.was_preempted, job.elapsed_s, job.limit_s) for job in (jobs[7], jobs[8], jobs[13])] == [
        *((False, 26, None), (False, 26, 60)),
        (True, 86_426, 172_800),
    ]
    assert (jobs[7].hosts, jobs[12].hosts) == (("n1", "n2"), ())
    seen = {number: listing.engine_job(job, SlurmOptions(), {"n1": "10.0.0.1"}) for number, job in jobs.items()}
    assert dict(seen[7].addresses) == {0: "10.0.0.1", 1: "n2"}
    assert [seen[number].phase for number in jobs] == [
        *(EnginePhase.RUNNING, EnginePhase.ENDED),
        *(EnginePhase.ENDED, EnginePhase.QUEUED),
    ]
    assert seen[8].loss is not None
    assert (seen[8].loss.reason, seen[8].message) == (Reason.LAUNCH_REFUSED, seen[8].loss.message)
    assert "Slurm: ReqNodeNotAvail, UnavailableNodes:n1" in seen[12].message


def test_lines_of_sacct_are_jobs_of_the_instance() -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    text = (
        f"7|tm-k3-job-a-1|0:15|CANCELLED by {os.getuid()}|n[1-2]|None\n8|tm-k3-job-b-1|0:0|CANCELLED by 4000000|n1|\n"
    )
    jobs = [listing.engine_job(job, SlurmOptions(), {}) for job in listing.jobs_of(text, "k3")]
    assert [job.attempt_id for job in jobs] == ["job-a.1", "job-b.1"]
    assert f"cancelled on Slurm by {me}" in jobs[0].message
    assert "cancelled on Slurm by user 4000000" in jobs[1].message


_PROGRAM = """#!/bin/sh
echo "$0 $*" >> {place}/calls
case "$0" in
*/squeue) cat {place}/squeue ;;
*/sacct) cat {place}/sacct ;;
*/scontrol) case "$*" in *config*) echo "AccountingStorageType   = accounting_storage/slurmdbd" ;; esac ;;
esac
"""


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A directory with programs that print recorded texts: no accounting runs in the tests of the real Slurm."""
    for name in ("squeue", "sacct", "scontrol", "scancel", "sbatch"):
        (tmp_path / name).write_text(_PROGRAM.format(place=tmp_path))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def _recorded_engine(place: Path, *, squeue: str, sacct: str) -> SlurmEngine:
    for name, text in (("squeue", squeue), ("sacct", sacct)):
        (place / "texts").mkdir(exist_ok=True)
        (place / "texts" / name).write_text(text)
        (place / name).write_text(_PROGRAM.format(place=place).replace(f"cat {place}/", f"cat {place}/texts/"))
    return SlurmEngine("hpc", "k3", SlurmOptions(bin_dir=str(place)))


def test_accounting_says_how_jobs_ended_that_the_controller_forgot(recorded: Path) -> None:
    engine = _recorded_engine(recorded, squeue=LISTED, sacct="7|tm-k3-job-a-1|0:0|PREEMPTED|n[1-2]|None\n")
    assert engine.jobs()["tm-k3-job-a-1"].phase is EnginePhase.RUNNING
    (recorded / "texts/squeue").write_text("")
    job = engine.jobs()["tm-k3-job-a-1"]
    assert (job.phase, job.handle) == (EnginePhase.ENDED, "7")
    assert job.loss is not None
    assert job.loss.reason is Reason.PREEMPTED
    asked = [line for line in (recorded / "calls").read_text().splitlines() if "sacct" in line]
    assert len(asked) == 1
    assert "--jobs=7,12" in asked[0]
    assert engine.jobs()["tm-k3-job-a-1"] == job
    engine.forget("7")
    assert "tm-k3-job-a-1" not in engine.jobs()


def test_accounting_finds_a_job_by_its_name(recorded: Path) -> None:
    engine = _recorded_engine(recorded, squeue="", sacct="7|tm-k3-job-a-1|0:0|TIMEOUT|n1|None\n")
    job = engine.find("tm-k3-job-a-1")
    assert job is not None
    assert (job.loss.reason if job.loss else None) is Reason.TIMEOUT
    assert engine.find("tm-k3-job-z-1") is None


def test_accounting_that_fails_delays_nothing(recorded: Path) -> None:
    engine = _recorded_engine(recorded, squeue=LISTED, sacct="")
    engine.jobs()
    (recorded / "sacct").write_text("#!/bin/sh\necho sacct: error: Problem talking to the database >&2; exit 1\n")
    (recorded / "texts/squeue").write_text("")
    jobs: dict[str, EngineJob] = dict(engine.jobs())
    assert {job.phase for job in jobs.values()} == {EnginePhase.ENDED}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("error: slurm_receive_msg: Socket timed out on send/recv operation", "scontrol ping"),
        ("error: Munge encode failed: Failed to access", "start munged"),
        ("fatal: Could not establish a configuration source", "option conf"),
        (
            "error: Job violates policy (job submit limit, ...)",
            "no more jobs",
        ),
        ("error: Slurm temporarily unable to accept job, sleeping and retrying", "no more jobs"),
    ],
)
def test_what_may_pass_is_away(recorded: Path, words: str, error: str) -> None:
    (recorded / "squeue").write_text(f"#!/bin/sh\necho 'squeue: {words}' >&2; exit 1\n")
    with pytest.raises(EngineAwayError, match=error):
        SlurmCommands(SlurmOptions(bin_dir=str(recorded))).run("squeue")


@pytest.mark.parametrize(("program", "answers"), [("squeue", True), ("scancel", True), ("sbatch", False)])
def test_program_asks_again_unless_it_submits_a_job(recorded: Path, program: str, answers: bool) -> None:
    refusal = "error: Slurm temporarily unable to accept job, sleeping and retrying"
    script = (
        f"#!/bin/sh\n[ -e {recorded}/asked ] && exec echo fine; touch {recorded}/asked; echo '{refusal}' >&2; exit 1\n"
    )
    (recorded / program).write_text(script)
    (recorded / program).chmod(0o755)
    commands = SlurmCommands(SlurmOptions(bin_dir=str(recorded)))
    if answers:
        assert commands.run(program) == "fine\n"
    else:
        with pytest.raises(EngineAwayError, match="no more jobs"):
            commands.run(program)


def test_other_failures_are_refusals(recorded: Path) -> None:
    (recorded / "sbatch").write_text("#!/bin/sh\nprintf 'sbatch: error: one\\nsbatch: error: one\\ntwo' >&2; exit 1\n")
    with pytest.raises(SlurmRefusedError, match=r"^one; two$"):
        SlurmCommands(SlurmOptions(bin_dir=str(recorded))).run("sbatch")


def test_program_that_hangs_is_ended_with_its_children(recorded: Path) -> None:
    (recorded / "squeue").write_text(f"#!/bin/sh\nsleep 3600 & echo $! > {recorded}/child; wait\n")
    with pytest.raises(EngineAwayError, match="has not answered after 1 s"):
        SlurmCommands(SlurmOptions(bin_dir=str(recorded)), timeout_s=1.0).run("squeue")


@pytest.mark.parametrize(
    "values",
    [
        {"partition": "a b"},
        {"partition": "a\n#SBATCH --hold"},
        {"constraint": "a;b"},
        {"constraint": "a b"},
        {"conf": "etc/slurm.conf"},
        {"output_dir": "/tmp/x y"},
        {"time": "soon"},
        {"nice": -1},
        {"unknown": "x"},
        {"extra_args": "-x"},
        {"extra_args": "word"},
        {"extra_args": "'--comment=a b'"},
        *({"extra_args": f"--{name}=1"} for name in sorted(RESERVED)),
    ],
)
def test_wrong_option_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SlurmOptions.model_validate(values)
