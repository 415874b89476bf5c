"""What slurmrestd gets and answers, in the words of its oldest and its newest versions; and its options.

The documents of v0.0.38 were recorded; those of newer versions have the shapes of the published client of Slurm 25.11.
"""

from __future__ import annotations

import doctest
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from slurm_cluster import slurm_launch
from trainmaster.backends.cluster.engine import EngineRefusedError
from trainmaster.backends.slurm import options
from trainmaster.backends.slurm import rest_documents as documents
from trainmaster.backends.slurm.access import Partition, SlurmRefusedError
from trainmaster.backends.slurm.inventory import GpuChoice, as_node
from trainmaster.backends.slurm.listing import engine_job
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.backends.slurm.render import batch_script, comment_of, rest_environment
from trainmaster.backends.slurm.rest import SlurmRest
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.resources import NodeState

REST: dict[str, Any] = {"rest_url": "http://slurm:6820", "rest_user": "tm", "token": "t", "partition": "gpu"}


def test_examples_hold() -> None:
    assert doctest.testmod(options).failed == 0


def described(version: int, **values: Any) -> dict[str, Any]:
    options = SlurmOptions(**{**REST, **values})
    launch = slurm_launch(
        "k3", "exec worker", nodes=2, grace_s=60.0, gpus=4, cpu_cores=8, storage_mb=5, secrets={"TOKEN": "s"},
        capabilities=("ib",), environment={"TEXT": "\n#SBATCH --hold"},
    )  # fmt: skip
    script = batch_script(launch, options, GpuChoice(gres="gpu:h100:4"), ("fast",))
    body = documents.submission(script, comment_of(launch), rest_environment(launch, options), version)
    assert body["script"] == script
    assert isinstance(body["job"], dict)
    return body["job"]


SAME = {
    "name": "tm-k3-job-wk96lltjcfl9-1",
    "partition": "gpu",
    "account": "team",
    "qos": "long",
    "reservation": "week",
    "tasks": 2,
    "tasks_per_node": 1,
    "cpus_per_task": 8,
    "temporary_disk_per_node": 5,
    "constraints": "ib",
    "prefer": "ib&fast",
    "nice": 50,
    "dependency": "singleton",
    "current_working_directory": "/tmp",
    "standard_output": "/tmp/tm-k3-job-wk96lltjcfl9-1.out",
    "comment": "trainmaster k3 job-wk96lltjcfl9.1 default a job",
    "licenses": "solver:1",
}
PATH = "/opt/slurm/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
EVERYTHING: dict[str, Any] = {
    "account": "team", "qos": "long", "reservation": "week", "exclusive": True, "time": "2-00:00:00",
    "extra_args": "--licenses=solver:1 --mail-type=END,FAIL", "bin_dir": "/opt/slurm/bin",
}  # fmt: skip


def test_oldest_version_gets_plain_values() -> None:
    assert described(38, **EVERYTHING) == {
        **SAME,
        "nodes": [2, 2],
        "memory_per_node": 100,
        "gres": "gpu:h100:4",
        "exclusive": "true",
        "time_limit": 2880,
        "signal": "TERM@60",
        "no_requeue": True,
        "mail_type": "END,FAIL",
        "environment": {"PATH": PATH, "TOKEN": "s"},
    }


@pytest.mark.parametrize("version", [41, 44])
def test_newer_versions_get_numbers_that_are_set(version: int) -> None:
    assert described(version, **EVERYTHING) == {
        **SAME,
        "minimum_nodes": 2,
        "maximum_nodes": 2,
        "memory_per_node": {"set": True, "infinite": False, "number": 100},
        "tres_per_node": "gres/gpu:h100:4",
        "shared": ["none"],
        "time_limit": {"set": True, "infinite": False, "number": 2880},
        "kill_warning_signal": "TERM",
        "kill_warning_delay": {"set": True, "infinite": False, "number": 60},
        "requeue": False,
        "mail_type": ["END", "FAIL"],
        "environment": [f"PATH={PATH}", "TOKEN=s"],
    }


def test_no_time_limit_is_none() -> None:
    assert "time_limit" not in described(38, time="UNLIMITED")
    assert described(44, time="UNLIMITED")["time_limit"]["infinite"] is True


def test_what_it_cannot_be_asked_for_is_refused() -> None:
    with pytest.raises(EngineRefusedError, match="--begin"):
        documents.submission("#!/bin/sh\n#SBATCH --begin=now\n", "", {}, 44)


OF_38 = {
    "name": "tm-k3-job-a-1", "job_id": 7, "comment": "trainmaster k3 job-a.1 acc j", "job_state": "RUNNING",
    "state_reason": "None", "nodes": "n[1-2]", "exit_code": 0, "restart_cnt": 0,
}  # fmt: skip
OF_44 = {
    **OF_38,
    "job_state": ["FAILED"],
    "state_reason": "NonZeroExitCode",
    "exit_code": {"status": ["ERROR"], "return_code": {"set": True, "infinite": False, "number": 71}, "signal": {}},
}
ACCOUNTED = {
    "name": "tm-k3-job-a-1", "job_id": 7, "comment": {"job": "trainmaster k3 job-a.1 acc j"}, "nodes": "n1",
    "state": {"current": ["TIMEOUT"], "reason": "None"}, "restart_cnt": 0,
    "exit_code": {
        "status": ["SIGNALED"], "return_code": {"set": False, "infinite": False, "number": 0},
        "signal": {"id": {"set": True, "infinite": False, "number": 15}, "name": "TERM"},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("job", "phase", "reason"),
    [
        (OF_38, "running", None),
        ({**OF_38, "job_state": "PENDING", "nodes": "", "state_reason": "Priority"}, "queued", None),
        ({**OF_38, "job_state": "FAILED", "exit_code": 18176}, "ended", Reason.LAUNCH_REFUSED),
        (OF_44, "ended", Reason.LAUNCH_REFUSED),
        ({**OF_44, "job_state": ["PREEMPTED"]}, "ended", Reason.PREEMPTED),
        ({**OF_44, "job_state": ["CANCELLED", "COMPLETING"]}, "running", None),
        ({**OF_44, "job_state": ["PENDING", "POWER_UP_NODE"]}, "queued", None),
        ({**OF_44, "job_state": ["PENDING"], "restart_cnt": 1}, "ended", Reason.ENGINE_CANCELLED),
        ({**OF_44, "job_state": ["RUNNING"], "restart_cnt": 1}, "running", None),
        (ACCOUNTED, "ended", Reason.TIMEOUT),
    ],
)
def test_listed_job_means_what_squeue_would_say(job: dict[str, Any], phase: str, reason: Reason | None) -> None:
    others = [{**job, "name": "tm-k3-x-job-a-1", "comment": "trainmaster k3-x job-a.1 acc j"}, {"name": None}]
    if job is ACCOUNTED:
        others = []
    (found,) = documents.jobs_in({"jobs": [job, *others]}, "k3")
    seen = engine_job(found, SlurmOptions(), {})
    assert (seen.attempt_id, seen.handle, seen.phase) == ("job-a.1", "7", phase)
    assert (seen.loss.reason if seen.loss else None) is reason


NODE_38 = {
    "name": "n1", "address": "10.0.0.1", "partitions": ["gpu"], "cpus": 64, "real_memory": 64000, "alloc_cpus": 8,
    "alloc_memory": 1000, "temporary_disk": 100, "features": "ib,fast", "gres": "gpu:h100:4",
    "gres_used": "gpu:h100:1(IDX:0)", "state": "mixed", "state_flags": [], "reason": "",
}  # fmt: skip
NODE_44 = {**NODE_38, "features": ["ib", "fast"], "effective_cpus": 62, "specialized_memory": 1000, "state": ["MIXED"]}


@pytest.mark.parametrize(("node", "cpus", "memory_mb"), [(NODE_38, 64, 64000), (NODE_44, 62, 63000)])
def test_node_has_what_slurm_schedules(node: dict[str, Any], cpus: int, memory_mb: int) -> None:
    (found,) = documents.nodes_in({"nodes": [node]})
    seen = as_node(found, "hpc", SlurmOptions())
    assert (seen.cpu_cores, seen.ram_mb, seen.storage_mb, seen.address) == (cpus, memory_mb, 100, "10.0.0.1")
    assert (seen.labels, [gpu.type for gpu in seen.gpus]) == (("ib", "fast"), ["h100"] * 4)
    assert (seen.held_gpus, seen.held_cpu_cores, seen.held_ram_mb, seen.state) == (1, 8, 1000, NodeState.READY)


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ({"state": "down", "state_flags": []}, NodeState.OFFLINE),
        ({"state": "idle", "state_flags": ["DRAIN"]}, NodeState.DRAINED),
        ({"state": "allocated", "state_flags": ["DRAIN"]}, NodeState.DRAINING),
        ({"state": ["IDLE", "NOT_RESPONDING"]}, NodeState.OFFLINE),
        ({"state": ["IDLE", "MAINTENANCE"]}, NodeState.DRAINED),
    ],
)
def test_state_of_a_node_has_flags(states: dict[str, Any], state: NodeState) -> None:
    (found,) = documents.nodes_in({"nodes": [{**NODE_38, **states, "reason": "a broken fan"}]})
    seen = as_node(found, "hpc", SlurmOptions())
    assert (seen.state, seen.drain_reason) == (state, "a broken fan")


def test_partitions_release_and_errors_are_read_from_either_version() -> None:
    old = {"meta": {"Slurm": {"release": "22.05.8"}}, "partitions": [{"name": "low", "state": "UP"}]}
    new = {
        "meta": {"slurm": {"release": "25.11.1", "cluster": "hpc"}},
        "partitions": [{"name": "low", "partition": {"state": ["DOWN"]}}],
        "errors": [{"description": "Nothing here", "error_number": 2017, "error": "Invalid job id specified"}],
    }
    assert (documents.release_of(old), documents.release_of(new)) == (("22.05.8", ""), ("25.11.1", "hpc"))
    assert documents.partitions_in(old) == {"low": Partition("UP")}
    assert documents.partitions_in(new) == {"low": Partition("DOWN")}
    assert (documents.problems_in(old), documents.problems_in(new)) == ("", "Invalid job id specified")


@pytest.mark.parametrize(
    ("partition", "minutes"),
    [
        ({"max_time_limit": 60}, 60),
        ({"max_time_limit": -1}, None),
        ({"max_time_limit": 0xFFFF_FFFF}, None),
        ({"maximums": {"time": {"set": True, "infinite": False, "number": 1440}}}, 1440),
        ({"maximums": {"time": {"set": False, "infinite": True, "number": 0}}}, None),
        ({}, None),
    ],
)
def test_partition_has_a_time_limit_or_none(partition: dict[str, Any], minutes: int | None) -> None:
    (found,) = documents.partitions_in({"partitions": [{"name": "low", **partition}]}).values()
    assert found.max_minutes == minutes


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rest_url": ""}, "rest_user and token: these belong to the option rest_url"),
        ({"token": ""}, "token: with rest_url"),
        ({"partition": ""}, "partition: with rest_url"),
        ({"account_users": True}, "slurmrestd submits all jobs as rest_user"),
        ({"conf": "/etc/slurm.conf"}, "conf: it is for Slurm's programs"),
        ({"extra_args": "--begin=now"}, "cannot be asked for --begin"),
        ({"rest_url": "slurm:6820"}, "rest_url"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SlurmOptions(**{**REST, **changes})


@pytest.mark.parametrize("job_id", [7, 0])
def test_job_that_slurm_takes_and_cannot_start_yet_is_submitted(job_id: int) -> None:
    """As while a node is down for a moment: Slurm answers with the job's id, and with an error."""
    words = "Required node not available (down, drained or reserved)"

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"paths": {"/slurm/v0.0.38/jobs": {}}})
        return httpx.Response(200, json={"job_id": job_id, "errors": [{"error": words, "error_code": 2016}]})

    rest = SlurmRest("k3", SlurmOptions(**REST), timeout_s=1.0)
    rest._http = httpx.Client(base_url="http://slurm:6820", transport=httpx.MockTransport(answer))
    launch = slurm_launch("k3", "exec worker")
    if job_id:
        assert rest.submit(launch, "#!/bin/sh") == "7"
    else:
        with pytest.raises(SlurmRefusedError, match="Required node not available"):
            rest.submit(launch, "#!/bin/sh")
    rest.close()
