"""A cluster whose controller forgets, and whose accounting, a real slurmdbd, does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_programs import Programs

from slurm_accounting import accounted_cluster, missing
from slurm_cluster import SlurmCluster, slurm_launch, wait_for, wait_for_phase
from slurm_cluster import missing as no_slurm
from trainmaster.backends.cluster.engine import EnginePhase, EngineRefusedError
from trainmaster.protocol.reasons import Reason

pytestmark = pytest.mark.long
"""A database is started, and the controller forgets once a minute."""

RUNNING, ENDED = EnginePhase.RUNNING, EnginePhase.ENDED


@pytest.fixture(scope="module")
def accounted() -> Iterator[SlurmCluster]:
    if (reason := no_slurm() or missing()) is not None:
        pytest.skip(reason)
    with accounted_cluster() as started:
        yield started


def test_end_that_the_controller_has_forgotten_is_taken_from_the_accounting(
    accounted: SlurmCluster, tmp_path: Path
) -> None:
    engines = {"p": accounted.engine("p"), "r": accounted.rest_engine("r")}
    ends = {"cancelled": Reason.ENGINE_CANCELLED, "refused": Reason.LAUNCH_REFUSED, "timeout": Reason.TIMEOUT}
    ignoring, waiting = "trap '' TERM", f"while [ ! -e {tmp_path}/go ]; do sleep 0.2; done"
    launches = {
        (name, end): slurm_launch(
            name, f"{ignoring}; touch {tmp_path}/{name}.{end}; {waiting}; exit 71", job_id=f"job-{end}"
        )
        for name in engines for end in ends
    }  # fmt: skip
    handles = {key: engines[key[0]].start(launch) for key, launch in launches.items()}
    for (name, end), launch in launches.items():
        wait_for_phase(engines[name], launch.name, RUNNING)
        wait_for((tmp_path / f"{name}.{end}").exists, f"the worker of {launch.name}")
    # Nobody looks while they end.
    for (_, end), handle in handles.items():
        if end == "cancelled":
            accounted.run("scancel", handle)
        elif end == "timeout":
            accounted.scontrol("update", f"JobId={handle}", "TimeLimit=1")
    wait_for(lambda: _known(accounted, handles, "timeout") == 0, "the time limit")
    (tmp_path / "go").touch()
    wait_for(lambda: _known(accounted, handles, *ends) == 0, "the controller to forget")
    for name, engine in engines.items():
        seen = engine.jobs()
        if name == "r":
            ends["refused"] = Reason.WORKER_LOST  # v0.0.38 has no exit codes of jobs that have ended
        for end, reason in ends.items():
            launch, handle = launches[name, end], handles[name, end]
            job = seen[launch.name]
            assert (job.phase, job.handle) == (ENDED, handle)
            assert job.loss is not None
            assert job.loss.reason is reason, (name, job.loss)
            # To a server that was started meanwhile.
            another = accounted.engine(name) if name == "p" else accounted.rest_engine(name)
            found = another.find(launch.name)
            assert found is not None
            assert (found.handle, found.phase) == (handle, ENDED)
            assert found.loss is not None
            assert found.loss.reason is reason
            another.close()
            engine.forget(handle)
        assert engine.jobs() == {}
        engine.close()


def _known(cluster: SlurmCluster, handles: dict[tuple[str, str], str], *ends: str) -> int:
    """How many of the jobs the controller still lists."""
    listed = cluster.run("squeue", "--noheader", "--states=all", "--format=%A").split()
    return sum(handle in listed for (_, end), handle in handles.items() if end in ends)


def test_account_and_quality_of_service_are_charged_and_those_that_are_unknown_refused(
    accounted: SlurmCluster, tmp_path: Path
) -> None:
    programs = Programs(tmp_path, "q")
    for made in (accounted.engine, accounted.rest_engine):
        engine = made("q", account="team", qos="normal")
        handle = engine.start(programs.launch("exit 0", job_id=f"job-{made.__name__}"))
        shown = accounted.run("scontrol", "show", "job", handle)
        assert "Account=team QOS=normal" in shown
        engine.close()
        for option, says in (("account", "option account"), ("qos", "option qos")):
            engine = made("q", **{"account": "team", option: "nobody"})
            with pytest.raises(EngineRefusedError, match=says):
                engine.start(programs.launch("exit 0", job_id=f"job-{option}"))
            engine.close()
