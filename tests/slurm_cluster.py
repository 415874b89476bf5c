"""A real Slurm cluster for tests: a controller and two nodes with simulated GPUs, on free ports of this machine.

Nothing is configured outside of a temporary directory, and nothing outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import PATIENCE_S
from process_signals import pids
from trainmaster.backends.cluster.engine import EngineJob, EngineLaunch, EnginePhase, engine_name
from trainmaster.backends.slurm.client import SlurmEngine
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.protocol.processes import signal_if
from trainmaster.protocol.request import AttemptRequest, EngineNeeds, NodeAssignment

REQUIRED = "REQUIRE_SLURM"
"""The variable with which CI says that nothing may be skipped for want of Slurm."""
NODES = ("n1", "n2")
GPUS: Mapping[str, tuple[str, ...]] = {"n1": ("h100",) * 4, "n2": ("h100", "h100", "a100", "a100")}
CPUS, MEMORY_MB = 64, 64_000
_PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmrestd", "sbatch", "squeue", "scancel", "scontrol")
SEARCHED = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

_WATCHER = """
import os, shutil, signal, sys
sys.stdin.buffer.read()  # until the test run has ended, however it did
place = sys.argv[1]
mark = f"SLURM_CONF={place}/slurm.conf".encode()
for _ in range(3):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid():
                pidfd = os.pidfd_open(int(pid))
                if mark in open(f"/proc/{pid}/environ", "rb").read().split(b"\\0"):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
        except OSError:
            pass
shutil.rmtree(place, ignore_errors=True)
"""


def missing() -> str | None:
    """Why there is no Slurm here; None where there is.

    Raises:
        AssertionError: there is none where it is required.
    """
    absent = [name for name in _PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    reason = f"{', '.join(absent)} is not installed; scripts/slurm.sh does that" if absent else None
    if os.geteuid() != 0:
        reason = "Slurm is tested as root"
    assert reason is None or not os.environ.get(REQUIRED), reason
    return reason


@dataclass(slots=True, kw_only=True)
class SlurmCluster:
    """Its daemons are children of the tests, each restarted by its own method."""

    directory: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    rest_port: int = 0

    @property
    def conf(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": SEARCHED}

    @property
    def _mark(self) -> str:
        """A variable of every process of the cluster."""
        return f"SLURM_CONF={self.conf}"

    def start(self, begin: Callable[[SlurmCluster], None]) -> None:
        self.start_daemon("munged", "munged", "--foreground", "--force", *_munge_options(self.directory))
        wait_for(lambda: (self.directory / "munge.socket").exists(), "munged")
        begin(self)
        self.start_controller()
        for node in NODES:
            self.start_node(node)

    def start_controller(self) -> None:
        self.start_daemon("slurmctld", "slurmctld", "-D")
        wait_for(self._answers, "slurmctld")

    def kill_controller(self, *handles: str) -> None:
        """These jobs are known again when it is back: it writes its state every few seconds only."""
        for handle in handles:
            self.scontrol("update", f"JobId={handle}", f"AdminComment=saved-{handle}-here")
        state = self.directory / "state" / "job_state"
        marks = [f"saved-{handle}-here".encode() for handle in handles]
        wait_for(lambda: not marks or (state.exists() and all(mark in state.read_bytes() for mark in marks)), "saving")
        self._kill("slurmctld")

    def pause_controller(self) -> None:
        """Have it hang: connections are made, and nobody answers."""
        self.daemons["slurmctld"].send_signal(signal.SIGSTOP)

    def resume_controller(self) -> None:
        self.daemons["slurmctld"].send_signal(signal.SIGCONT)
        wait_for(self._answers, "slurmctld")

    def start_node(self, node: str) -> None:
        """Have a node take jobs."""
        self.start_daemon(node, "slurmd", "-D", "-N", node)
        wait_for(lambda: self._is_idle(node), f"slurmd of {node}")

    def kill_node(self, node: str) -> None:
        """Kill all that runs on a node, and have the controller know of it, as a health check would."""
        self._kill(node)
        _kill_all_with(self._mark, f"SLURMD_NODENAME={node}")
        self.scontrol("update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def kill_munge(self) -> None:
        self._kill("munged")
        (self.directory / "munge.socket").unlink(missing_ok=True)

    def start_munge(self) -> None:
        self.start_daemon("munged", "munged", "--foreground", "--force", *_munge_options(self.directory))
        wait_for(lambda: (self.directory / "munge.socket").exists() and self._answers(), "munged")

    def start_rest(self) -> None:
        """Start slurmrestd, unless it runs; it refuses to be root, and has no key of munge."""
        if "slurmrestd" in self.daemons:
            return
        self.rest_port = self.rest_port or free_ports(1)[0]
        plugins = "openapi/v0.0.38"
        if "AccountingStorageType" in self.conf.read_text():
            plugins += ",openapi/dbv0.0.38"
        command = ("slurmrestd", "-a", "rest_auth/jwt", "-s", plugins, f"127.0.0.1:{self.rest_port}")
        self.start_daemon("slurmrestd", *command, user="nobody", SLURM_JWT="daemon")
        wait_for(self._rest_listens, "slurmrestd")

    def kill_rest(self) -> None:
        self._kill("slurmrestd")

    def token(self, lifespan_s: int = 86_400) -> str:
        return self.scontrol("token", "username=root", f"lifespan={lifespan_s}").strip().partition("=")[2]

    def rest_options(self, **values: Any) -> dict[str, Any]:
        """Options of a cluster that is reached by slurmrestd alone."""
        self.start_rest()
        access = {"rest_url": f"http://127.0.0.1:{self.rest_port}", "rest_user": "root", "token": self.token()}
        return {"partition": "low", "output_dir": str(self.directory / "out"), **access, **values}

    def scontrol(self, *arguments: str) -> str:
        return self.run("scontrol", *arguments)

    def run(self, program: str, *arguments: str) -> str:
        """What a program of an administrator prints."""
        command = [program, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def options(self, **values: Any) -> SlurmOptions:
        return SlurmOptions(**{"conf": str(self.conf), "output_dir": str(self.directory / "out"), **values})

    def engine(self, instance: str, **values: Any) -> SlurmEngine:
        return SlurmEngine("hpc", instance, self.options(**values))

    def rest_engine(self, instance: str, **values: Any) -> SlurmEngine:
        return SlurmEngine("hpc", instance, SlurmOptions(**self.rest_options(**values)))

    def end_all_jobs(self) -> None:
        user = f"--user={os.geteuid()}"
        self.run("scancel", user, "--state=PENDING")
        self.run("scancel", user, "--signal=KILL", "--full")
        wait_for(lambda: not self.run("squeue", "--noheader"), "the end of all jobs")

    def stop(self) -> None:
        for name in reversed(list(self.daemons)):
            self._kill(name)

    def start_daemon(self, name: str, *command: str, user: str | None = None, **environment: str) -> None:
        log = self.directory / f"{name}.out"
        program = shutil.which(command[0], path=SEARCHED)
        assert program is not None, command[0]
        with open(log, "ab") as output:
            self.daemons[name] = subprocess.Popen(
                [program, *command[1:]],
                env={**self.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                start_new_session=True,
                user=user,
                group=user and pwd.getpwnam(user).pw_gid,
                extra_groups=None if user is None else [],
            )

    def _kill(self, name: str) -> None:
        if (daemon := self.daemons.pop(name, None)) is not None:
            daemon.kill()
            daemon.wait()

    def _answers(self) -> bool:
        daemon = self.daemons["slurmctld"]
        assert daemon.poll() is None, (self.directory / "slurmctld.out").read_text()[-2000:]
        command = ["scontrol", "ping"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return done.returncode == 0 and "is UP" in done.stdout

    def _rest_listens(self) -> bool:
        log = self.directory / "slurmrestd.out"
        assert self.daemons["slurmrestd"].poll() is None, log.read_text()[-2000:]
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.rest_port)) == 0

    def _is_idle(self, node: str) -> bool:
        assert self.daemons[node].poll() is None, (self.directory / f"{node}.out").read_text()[-2000:]
        state = self.run("sinfo", "--noheader", f"--nodes={node}", "--format=%T").split()
        if "down" in state:
            with contextlib.suppress(AssertionError):  # it has registered meanwhile
                self.scontrol("update", f"NodeName={node}", "State=RESUME")
        return set(state) == {"idle"}


@contextlib.contextmanager
def running_cluster(begin: Callable[[SlurmCluster], None] = lambda _: None) -> Iterator[SlurmCluster]:
    """A cluster, for the length of a block. `begin`: what is done between munge and the controller."""
    # Short, because a socket's path must be.
    place = tempfile.mkdtemp(prefix="tm-slurm-", dir="/tmp")
    directory = Path(place)
    directory.chmod(0o755)
    watcher = subprocess.Popen(
        [sys.executable, "-c", _WATCHER, place],
        stdin=subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    try:
        _configure(directory)
        cluster = SlurmCluster(directory=directory)
        try:
            cluster.start(begin)
            yield cluster
        finally:
            cluster.stop()
            _kill_all_with(cluster._mark)
    finally:
        watcher.communicate()


def _configure(directory: Path) -> None:
    for name in ("state", "dev", "out", *(f"spool/{node}" for node in NODES)):
        (directory / name).mkdir(parents=True)
    (directory / "munge.key").write_bytes(os.urandom(1024))
    (directory / "munge.key").chmod(0o400)
    (directory / "jwt.key").write_bytes(os.urandom(32))
    (directory / "jwt.key").chmod(0o600)
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    gres, nodes = [], []
    host = socket.gethostname().partition(".")[0]
    controller, *ports = free_ports(1 + len(NODES))
    for node, port in zip(NODES, ports, strict=True):
        for index, kind in enumerate(GPUS[node]):
            device = directory / "dev" / f"{node}-gpu{index}"
            os.mknod(device, 0o020666, os.makedev(1, 3))
            gres.append(f"NodeName={node} Name=gpu Type={kind} File={device}\n")
        kinds = ",".join(f"gpu:{kind}:{GPUS[node].count(kind)}" for kind in dict.fromkeys(GPUS[node]))
        nodes.append(
            f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={CPUS} RealMemory={MEMORY_MB} "
            f"TmpDisk=100000 Gres={kinds} Feature={node}-only,everywhere\n"
        )
    (directory / "gres.conf").write_text("".join(gres))
    general = _CONF.format(d=directory, host=host, port=controller)
    (directory / "slurm.conf").write_text(general + "".join(nodes) + _PARTITIONS)


_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={d}/munge.socket,cred_expire=5
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={d}/jwt.key
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldPidFile={d}/slurmctld.pid
SlurmdPidFile={d}/%n.pid
SlurmctldLogFile={d}/slurmctld.log
SlurmdLogFile={d}/%n.log
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
TaskPlugin=task/none
MailProg=/bin/true
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
MinJobAge=86400
KillWait=10
MessageTimeout=10
SlurmctldTimeout=60
SlurmdTimeout=300
"""
_PARTITIONS = """
PartitionName=low Nodes=ALL Default=YES PriorityTier=1
PartitionName=graced Nodes=ALL PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
PartitionName=brief Nodes=ALL MaxTime=5
PartitionName=short Nodes=ALL DefaultTime=1
PartitionName=closed Nodes=n1 State=DOWN
"""


def _munge_options(directory: Path) -> tuple[str, ...]:
    names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    return tuple(f"--{option}={directory / name}" for option, name in {**names, "seed-file": "munge.seed"}.items())


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _kill_all_with(*variables: str) -> None:
    """Kill every process that has all of these variables."""
    marks = {variable.encode() for variable in variables}
    for pid in pids():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{pid}/environ")
            signal_if(pid, lambda file=environment: marks <= set(file.read_bytes().split(b"\0")), signal.SIGKILL)  # type: ignore[misc]


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """What a condition returns once it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.1)
    return found


def wait_for_phase(engine: SlurmEngine, name: str, phase: EnginePhase) -> EngineJob:

    def reached() -> EngineJob | None:
        job = engine.jobs().get(name)
        assert job is None or job.phase is not EnginePhase.ENDED or phase is EnginePhase.ENDED, job
        return job if job is not None and job.phase is phase else None

    found: EngineJob = wait_for(reached, f"{name} {phase}")
    return found


def slurm_launch(
    instance: str,
    script: str,
    *,
    job_id: str = "job-wk96lltjcfl9",
    nodes: int = 1,
    grace_s: float = 20.0,
    max_runtime_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    **needs: Any,
) -> EngineLaunch:
    """An attempt whose worker is a shell script."""
    asked = {"account": "default", "job_name": "a job", "memory_mb": 100, **needs}
    request = AttemptRequest(
        job_id=job_id,
        attempt=1,
        token="",
        rank_token="",
        launch=Launch(kind="command", steps=(LaunchStep(name="main", argv=("true",)),)),
        nodes=tuple(NodeAssignment(node_id="") for _ in range(nodes)),
        checkpoint_dir="",
        output_dir="",
        owner_file="",
        max_runtime_s=max_runtime_s,
        engine_needs=EngineNeeds(**asked),
    )
    return EngineLaunch(
        name=engine_name(instance, request.attempt_id),
        instance=instance,
        request=request,
        grace_s=grace_s,
        command=("sh", "-c", script),
        environment=environment or {},
        secrets=secrets or {},
    )
