"""The client of Slurm against a real cluster: starting, listing, finding, cancelling; nodes and facts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from slurm_programs import Programs

from process_signals import pids
from slurm_cluster import CPUS, GPUS, NODES, SlurmCluster, slurm_launch, wait_for, wait_for_phase
from trainmaster.backends.cluster.engine import EnginePhase, EngineRefusedError
from trainmaster.backends.slurm.client import SlurmEngine
from trainmaster.backends.slurm.programs import SlurmPrograms
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.resources import NodeState

QUEUED, RUNNING, ENDED = EnginePhase.QUEUED, EnginePhase.RUNNING, EnginePhase.ENDED


def test_job_runs_on_two_nodes_which_know_their_numbers(engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.waiting(nodes=2)
    handle = engine.start(launch)
    programs.wait_for_note("up", nodes=2)
    job = wait_for_phase(engine, launch.name, RUNNING)
    assert (job.handle, job.attempt_id) == (handle, launch.request.attempt_id)
    assert dict(job.addresses) == {0: "127.0.0.1", 1: "127.0.0.1"}
    programs.go()
    ended = wait_for_phase(engine, launch.name, ENDED)
    assert ended.loss is not None
    assert ended.loss.reason is Reason.WORKER_LOST
    assert not list(Path(engine._options.output_dir).glob(f"{launch.name}*"))


@pytest.mark.parametrize(
    ("script", "reason", "says"),
    [
        ("exit 7", Reason.WORKER_LOST, "exit code 7"),
        ("exit 71", Reason.LAUNCH_REFUSED, "`python`"),
        ("exit 72", Reason.ENGINE_UNAVAILABLE, "server_url"),
        ("exec no-such-python", Reason.LAUNCH_REFUSED, "`python`"),
        ("kill -KILL $$", Reason.WORKER_LOST, "SIGKILL"),
    ],
)
def test_end_of_bad_program_says_why(
    engine: SlurmEngine, programs: Programs, script: str, reason: Reason, says: str
) -> None:
    launch = programs.launch(script)
    engine.start(launch)
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert loss.reason is reason
    assert says in loss.message
    assert f"{launch.name}.out on n" in loss.message


def test_output_of_worker_that_never_starts_is_kept_on_the_node(engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.launch("echo trainmaster: no server here >&2; exit 72")
    engine.start(launch)
    wait_for_phase(engine, launch.name, ENDED)
    assert "no server here" in (Path(engine._options.output_dir) / f"{launch.name}.out").read_text()


def test_first_exit_of_a_worker_ends_no_other(engine: SlurmEngine, programs: Programs) -> None:
    script = "echo up >> notes.$SLURM_NODEID; [ $SLURM_NODEID = 0 ] && exit 0; while [ ! -e go ]; do sleep 0.2; done"
    launch = programs.launch(f"{script}; echo done >> notes.$SLURM_NODEID", nodes=2)
    engine.start(launch)
    programs.wait_for_note("up", nodes=2)
    assert wait_for_phase(engine, launch.name, RUNNING).loss is None
    programs.go()
    wait_for_phase(engine, launch.name, ENDED)
    assert programs.notes(1) == ["up", "done"]


def test_a_worker_that_fails_takes_the_others_with_it(engine: SlurmEngine, programs: Programs) -> None:
    script = "echo up >> notes.$SLURM_NODEID; while [ ! -e go ]; do sleep 0.2; done; [ $SLURM_NODEID = 1 ] || exit 3"
    launch = programs.launch(f"{script}; exec sleep 600", nodes=2)
    engine.start(launch)
    programs.wait_for_note("up", nodes=2)
    programs.go()
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.WORKER_LOST


def test_gpus_of_two_jobs_are_disjoint_and_of_the_wanted_type(engine: SlurmEngine, programs: Programs) -> None:
    script = "echo $CUDA_VISIBLE_DEVICES >> gpus.{0}; while [ ! -e go ]; do sleep 0.2; done"
    asked = {"gpus": 2, "gpu_type": "H100", "capabilities": ("n1-only",)}
    for name in ("one", "two"):
        engine.start(programs.launch(script.format(name), job_id=f"job-{name}", **asked))
    files = [programs.directory / f"gpus.{name}" for name in ("one", "two")]
    wait_for(lambda: all(file.exists() and file.read_text().strip() for file in files), "both jobs")
    devices = [set(file.read_text().strip().split(",")) for file in files]
    assert [len(each) for each in devices] == [2, 2]
    assert devices[0].isdisjoint(devices[1])
    held = {node.hostname: node.held_gpus for node in engine.nodes()}
    assert held == {"n1": 4, "n2": 0}


def test_preference_that_too_few_nodes_meet_does_not_hold_a_job_up(engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.launch("exit 0", nodes=2, affinity=("n2-only", "everywhere"))
    engine.start(launch)
    wait_for_phase(engine, launch.name, ENDED)
    assert "--prefer=everywhere\n" in engine.document(launch)


def test_gpu_type_that_no_node_has_is_refused(engine: SlurmEngine, programs: Programs) -> None:
    with pytest.raises(EngineRefusedError, match=r"of type b200; it has a100 .*h100"):
        engine.start(programs.waiting(gpus=1, gpu_type="B200"))


@pytest.mark.parametrize(
    ("options", "needs", "says"),
    [
        ({"partition": "nowhere"}, {}, "option partition"),
        ({"constraint": "no-such-feature"}, {}, "feature"),
        ({"gres": "tpu"}, {"gpus": 1}, "Gres named tpu"),
        ({}, {"memory_mb": 10_000_000}, "less memory"),
        ({}, {"capabilities": ("nobody-has-this",)}, "feature"),
        ({"extra_args": "--no-such-option=1"}, {}, "extra_args"),
    ],
)
def test_what_slurm_refuses_is_refused_with_a_remedy(
    cluster: SlurmCluster,
    instance: str,
    programs: Programs,
    options: dict[str, str],
    needs: dict[str, object],
    says: str,
) -> None:
    with pytest.raises(EngineRefusedError, match=says):
        cluster.engine(instance, **options).start(programs.waiting(**needs))


def test_job_that_may_run_for_longer_than_its_partition_allows_is_refused(
    cluster: SlurmCluster, instance: str, programs: Programs
) -> None:
    engine = cluster.engine(instance, partition="brief")
    assert {node.time_limit_s for node in engine.nodes()} == {300.0}
    with pytest.raises(EngineRefusedError, match="exceed the time limit of the partition, 300 s"):
        engine.start(programs.waiting(max_runtime_s=301.0))
    launch = programs.waiting(max_runtime_s=300.0)
    engine.start(launch)
    wait_for_phase(engine, launch.name, RUNNING)


def test_time_limit_that_a_quality_of_service_may_exceed_is_left_to_slurm(cluster: SlurmCluster, instance: str) -> None:
    engine = cluster.engine(instance, partition="brief", qos="long")
    assert {node.time_limit_s for node in engine.nodes()} == {None}


def test_job_that_can_never_start_says_so(cluster: SlurmCluster, instance: str, programs: Programs) -> None:
    engine = cluster.engine(instance, partition="brief")
    launch = programs.waiting(max_runtime_s=240.0)
    cluster.scontrol("update", "PartitionName=brief", "State=DOWN")
    try:
        engine.start(launch)
        cluster.scontrol("update", "PartitionName=brief", "State=UP", "MaxTime=1")
        wait_for(lambda: "PartitionTimeLimit" in engine.jobs()[launch.name].message, "the reason")
        job = engine.jobs()[launch.name]
    finally:
        cluster.scontrol("update", "PartitionName=brief", "State=UP", "MaxTime=5")
    assert job.phase is QUEUED
    assert job.message.startswith("cannot start as it is: its time limit exceeds the partition's; submit it with")
    engine.cancel(job.handle)


def test_secret_reaches_the_worker_and_no_listing(
    engine: SlurmEngine, programs: Programs, cluster: SlurmCluster
) -> None:
    secret = "s3cr3t-of-the-worker"
    script = 'echo "$TOKEN" > token; echo "$PLAIN" > plain; while [ ! -e go ]; do sleep 0.2; done'
    environment = {"PLAIN": "it's $HOME\n#SBATCH --hold\n`x`"}
    launch = programs.launch(script, secrets={"TOKEN": secret}, environment=environment)
    handle = engine.start(launch)
    wait_for(lambda: (programs.directory / "plain").exists(), "the worker")
    shown = [cluster.scontrol("show", "job", "-dd", handle), cluster.run("squeue", "--Format=ALL")]
    shown += [cluster.scontrol("write", "batch_script", handle, "-"), engine.document(launch), repr(launch)]
    for pid in pids():
        try:
            shown.append(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
        except OSError:
            continue
    programs.go()
    wait_for_phase(engine, launch.name, ENDED)
    assert (programs.directory / "token").read_text().strip() == secret
    assert (programs.directory / "plain").read_text().rstrip("\n") == environment["PLAIN"]
    assert not [text for text in shown if secret in text]


def test_environment_of_the_server_stays_with_it(
    engine: SlurmEngine, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SERVER", "private")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SLURM_JOB_NAME", "other")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    launch = programs.launch("env > seen")
    engine.start(launch)
    wait_for_phase(engine, launch.name, ENDED)
    assert "OF_THE_SERVER" not in (programs.directory / "seen").read_text()


def test_queued_job_says_why_it_waits_and_is_cancelled(engine: SlurmEngine, programs: Programs) -> None:
    holder = programs.waiting(job_id="job-holder", nodes=2, cpu_cores=CPUS)
    engine.start(holder)
    programs.wait_for_note("up", nodes=2)
    launch = programs.waiting(cpu_cores=CPUS)
    handle = engine.start(launch)
    wait_for(lambda: "Slurm: Resources" in engine.jobs()[launch.name].message, "a reason")
    assert engine.jobs()[launch.name].phase is QUEUED
    engine.cancel(handle)
    loss = wait_for_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.ENGINE_CANCELLED
    engine.cancel(handle)  # again
    engine.cancel("4000000")
    assert wait_for_phase(engine, holder.name, RUNNING)


def test_cancelled_worker_gets_sigterm_and_is_waited_for(engine: SlurmEngine, programs: Programs) -> None:
    script = "trap 'echo TERM >> notes.$SLURM_NODEID; sleep 1; echo saved >> notes.$SLURM_NODEID; exit 0' TERM"
    launch = programs.launch(f"{script}; echo up >> notes.$SLURM_NODEID; while :; do sleep 0.2; done", nodes=2)
    handle = engine.start(launch)
    programs.wait_for_note("up", nodes=2)
    engine.cancel(handle)
    wait_for_phase(engine, launch.name, ENDED)
    assert [programs.notes(node) for node in (0, 1)] == [["up", "TERM", "saved"]] * 2


def test_start_is_repeated_without_effect(
    engine: SlurmEngine, cluster: SlurmCluster, instance: str, programs: Programs
) -> None:
    launch = programs.waiting()
    handle = engine.start(launch)
    assert engine.start(launch) == handle
    assert cluster.engine(instance).start(launch) == handle  # a server that lost the answer
    found = cluster.engine(instance).find(launch.name)
    assert found is not None
    assert (found.handle, found.attempt_id) == (handle, launch.request.attempt_id)
    assert engine.find("tm-other-job-1") is None


def test_job_that_was_submitted_twice_runs_once(
    engine: SlurmEngine, cluster: SlurmCluster, instance: str, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = programs.waiting()
    first = engine.start(launch)
    programs.wait_for_note("up")
    unsure = cluster.engine(instance)
    monkeypatch.setattr(unsure, "find", lambda _: None)  # the controller had not taken the first submission in
    second = unsure.start(launch)
    assert int(second) > int(first)
    assert engine.jobs()[launch.name].handle == first
    wait_for(lambda: "CANCELLED" in cluster.scontrol("show", "job", second), "the end of the second")
    programs.go()
    wait_for_phase(engine, launch.name, ENDED)
    assert programs.notes() == ["up"]


def test_instances_do_not_see_each_other(cluster: SlurmCluster, programs: Programs, tmp_path: Path) -> None:
    one, two = cluster.engine("a"), cluster.engine("a-b")
    launches = [slurm_launch(name, "sleep 600") for name in ("a", "a-b")]
    for engine, launch in zip((one, two), launches, strict=True):
        engine.start(launch)
    assert [set(one.jobs()), set(two.jobs())] == [{launches[0].name}, {launches[1].name}]


def test_ended_job_is_listed_until_it_is_forgotten(engine: SlurmEngine, programs: Programs) -> None:
    launch = programs.launch("exit 0")
    handle = engine.start(launch)
    wait_for_phase(engine, launch.name, ENDED)
    assert launch.name in engine.jobs()
    engine.forget(handle)
    assert launch.name not in engine.jobs()
    assert engine.find(launch.name) is not None


def test_three_hundred_jobs_are_listed_in_one_call(
    cluster: SlurmCluster, instance: str, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = cluster.engine(instance, nice=0)
    launches = [programs.waiting(job_id=f"job-{number:012}", cpu_cores=CPUS, nodes=2) for number in range(300)]
    engine.start(launches[0])
    # The same text but for the name, by one shell: so many starts would take long on a busy machine.
    template, names = programs.directory / "template", programs.directory / "names"
    template.write_text(engine.document(launches[0]).replace(launches[0].name, "@NAME@"))
    names.write_text("".join(f"{launch.name}\n" for launch in launches[1:]))
    submit = f'sed "s/@NAME@/$name/" {template} | sbatch --parsable >/dev/null'
    cluster.run("sh", "-ec", f"while read -r name; do {submit}; done < {names}")
    calls: list[str] = []
    access = engine._access
    assert isinstance(access, SlurmPrograms)
    run = access._commands.run

    def counted(program: str, *arguments: str, **values: object) -> str:
        calls.append(program)
        return run(program, *arguments, **values)  # type: ignore[arg-type]

    engine.nodes()
    monkeypatch.setattr(access._commands, "run", counted)
    jobs = engine.jobs()
    assert calls == ["squeue"]
    wanted = {launch.name: launch.request.attempt_id for launch in launches}
    assert {name: job.attempt_id for name, job in jobs.items()} == wanted


def test_nodes_are_those_of_the_partition(cluster: SlurmCluster, engine: SlurmEngine) -> None:
    nodes = {node.hostname: node for node in engine.nodes()}
    assert set(nodes) == set(NODES)
    for name, node in nodes.items():
        assert (node.node_id, node.backend, node.cpu_cores, node.ram_mb) == (f"hpc:{name}", "hpc", CPUS, 64_000)
        assert node.storage_mb == 100_000
        assert tuple(gpu.type for gpu in node.gpus) == GPUS[name]
        assert [gpu.index for gpu in node.gpus] == [0, 1, 2, 3]
        assert node.labels == node.capabilities == (f"{name}-only", "everywhere")
        assert (node.state, node.address) == (NodeState.READY, "127.0.0.1")
    assert [node.hostname for node in cluster.engine("x", partition="closed").nodes()] == ["n1"]


def test_drained_node_is_reported_with_its_reason(cluster: SlurmCluster, engine: SlurmEngine) -> None:
    cluster.scontrol("update", "NodeName=n2", "State=DRAIN", "Reason=a broken fan")
    try:
        node = next(node for node in engine.nodes() if node.hostname == "n2")
        assert node.state is NodeState.DRAINED
        assert node.drain_reason.startswith("a broken fan")
    finally:
        cluster.scontrol("update", "NodeName=n2", "State=RESUME")
    wait_for(lambda: all(node.state is NodeState.READY for node in engine.nodes()), "the node")


def test_facts_name_version_cluster_and_partition(engine: SlurmEngine) -> None:
    facts = engine.facts()
    assert facts.name.startswith("Slurm 2")
    assert facts.host == f"{engine._options.rest_url or 'test'}, partition low"
    assert facts.problem == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "nowhere"}, "there are: brief, closed, graced, high, low"),
        ({"partition": "closed"}, "closed is DOWN"),
        ({"conf": "/nonexistent/slurm.conf"}, "option conf"),
        ({"bin_dir": "/nonexistent"}, "option bin_dir"),
    ],
)
def test_facts_have_every_problem_with_its_remedy(cluster: SlurmCluster, options: dict[str, str], says: str) -> None:
    assert says in cluster.engine("x", **options).facts().problem


def test_wait_ends_with_the_client(cluster: SlurmCluster) -> None:
    engine = cluster.engine("x")
    waiting = threading.Thread(target=engine.wait, args=(3600.0,))
    waiting.start()
    engine.close()
    waiting.join()
