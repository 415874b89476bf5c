"""Starting the processes of a node: their environment, their output, and what happens between fork and exec."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping

from trainmaster.protocol import environment as names
from trainmaster.protocol.account_files import User
from trainmaster.protocol.documents import in_memory, read_document
from trainmaster.protocol.launch import ENVIRONMENT_FILE, LaunchStep
from trainmaster.protocol.processes import KILL_LED
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import PREPARED, RENDEZVOUS, RunDirectory
from trainmaster.protocol.secrets import Secrets, secret_named
from trainmaster.worker.processes import die_with_parent, set_no_new_privs
from trainmaster.worker.staging import INPUTS, NodeContext, free_port
from trainmaster.worker.users import PRIVATE_UMASK, acting_as, open_own, without_session
from trainmaster.worker.verdict import ProcessEnd, Verdict

_REFERENCE = re.compile(rf"\$(\$?)\(({'|'.join(names.REFERABLE)})\)")
_EXIT_NOT_FOUND = 127
_EXIT_NOT_EXECUTABLE = 126
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


class StartError(Exception):
    """A process could not be started; `verdict` says why."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


def rank_environment(
    context: NodeContext,
    rank: int,
    *,
    base: Mapping[str, str],
    rendezvous: tuple[str, int] | None,
    guarded: bool = False,
) -> dict[str, str]:
    """The environment of one rank: the worker's own (`base`), then the job's, then what we promise.

    A preparing step has no `rendezvous`. One that is `guarded` holds tokens, and gets only those of the job's variables
    that say how to fetch.
    """
    request, launch = context.request, context.request.launch
    inherited = {name: value for name, value in base.items() if not name.startswith(names.RESERVED_PREFIX)}
    if context.user is not None:
        inherited = {**without_session(inherited), **context.user.variables(context.working_directory)}
    local_world_size = launch.ranks_per_node
    chosen = {**launch.environment, **context.secrets}
    if guarded:
        chosen = {name: value for name, value in chosen.items() if name in names.FETCHING}
        # A new directory: libraries read settings and import modules from there.
        home = context.home / PREPARED / f".home-{os.urandom(8).hex()}"
        chosen["HF_MODULES_CACHE"] = os.fspath(home / "modules")
        if context.user is not None and context.user.home is None:
            chosen["HOME"] = os.fspath(home)  # otherwise the working directory, with what the job ships
    variables = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a Python that crashes says where
        **inherited,
        **request.environment,
        **chosen,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - context.first_rank),
        "WORLD_SIZE": str(request.world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "NODE_RANK": str(context.node),
        "GROUP_RANK": str(context.node),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which the driver numbers GPUs
        "CUDA_VISIBLE_DEVICES": ",".join(request.nodes[context.node].gpus),
        names.JOB_ID: request.job_id,
        names.ATTEMPT: str(request.attempt),
        names.ATTEMPT_ID: request.attempt_id,
        names.NODE: str(context.node),
        names.EVENTS_FILE: context.events(rank),
        names.METRICS_FILE: context.metrics(rank),
        names.CONTROL_FILE: context.control_file,
        names.TOKEN_FILE: context.token_file,
        names.CHECKPOINT_DIR: request.checkpoint_dir,
        names.OUTPUT_DIR: request.output_dir,
        names.INPUTS_DIR: os.fspath(context.home / INPUTS),
        names.PREPARED_DIR: os.fspath(context.home / PREPARED),
        **{name: os.fspath(context.home / PREPARED / path) for name, path in launch.prepared.items()},
        # The client needs no CA certificate for plain HTTP on the loopback interface.
        names.KUBEFLOW_URL: context.kubeflow_url,
        names.KUBEFLOW_TOKEN: context.token_file,
    }
    if cores := request.nodes[context.node].cpu_cores:
        # A preparing step has the node for itself; ranks share what is booked.
        processes = 1 if rendezvous is None else local_world_size
        variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    elif local_world_size > 1:
        # As torchrun does: every rank would otherwise start one thread per core.
        variables.setdefault("OMP_NUM_THREADS", "1")
    if rendezvous is not None:
        variables["MASTER_ADDR"], variables["MASTER_PORT"] = rendezvous[0], str(rendezvous[1])
    if request.server_url is None:
        variables[names.OWNER_FILE] = request.owner_file
    else:
        server = request.server_url.rstrip("/")
        variables[names.OWNER_URL] = f"{server}/v1/worker/attempts/{request.attempt_id}/owner"
        if names.CA in base:
            variables[names.CA] = base[names.CA]
    if request.engine_needs is not None:
        variables[names.ENGINE_STOPS] = "1"
    if request.cache_dir is not None:
        variables[names.CACHE_DIR] = request.cache_dir
    if request.resume_from is not None:
        variables[names.RESUME_FROM] = request.resume_from
    if context.port is not None:
        # From a container, and on the node of a cluster, the server reaches a service from outside.
        is_outside = request.nodes[context.node].port or request.engine_needs is not None
        variables[names.SERVICE_HOST] = "0.0.0.0" if is_outside else "127.0.0.1"
        if launch.port_environment is not None:
            variables[launch.port_environment] = str(context.port)
    if context.environment is not None:
        programs = os.path.join(context.environment, "bin")
        variables["PATH"] = os.pathsep.join((programs, variables.get("PATH", os.defpath)))
        variables["VIRTUAL_ENV"] = context.environment
    # References are resolved in those of the job's variables that nothing above has overridden.
    own = {name: value for name, value in context.secrets.items() if variables.get(name) == value}
    named = {name: _REFERENCE.sub(functools.partial(_referred, variables), own[name]) for name in own}
    return variables | {name: context.workspace.place(value) for name, value in named.items()}


def _referred(variables: Mapping[str, str], reference: re.Match[str]) -> str:
    """The replacement of `$(NAME)`: itself if there is no such variable. `$$(NAME)` becomes `$(NAME)`."""
    return reference[0][1:] if reference[1] else variables.get(reference[2], reference[0])


def prepared_environment(context: NodeContext) -> str | None:
    """The environment that a preparing step has left for the ranks, or None."""
    with acting_as(context.user):
        document = read_document(context.home / PREPARED / ENVIRONMENT_FILE)
    return str(document["path"]) if document is not None else None


def step_environment(step: LaunchStep, secrets: Secrets) -> dict[str, str]:
    """A step's own variables and secrets, and the tokens passed on with the job if it gets them."""
    sealed = {variable: secrets.tokens[secret_named(reference)] for variable, reference in step.secrets.items()}
    own = {**step.environment, **sealed}
    if not step.tokens:
        return own
    return {names.TOKENS[name]: value for name, value in secrets.tokens.items() if name in names.TOKENS} | own


def start_rank(
    step: LaunchStep, rank: int, context: NodeContext, secrets: Secrets, rendezvous: tuple[str, int] | None
) -> tuple[int, int | None]:
    """Start one process of a step that writes to the node's log files; returns its pid, or raises StartError.

    A program that leads into a container gets its variables through a descriptor, which is returned too: its answer, if
    it fails, will be in there.
    """
    # A container has the environment of its image, not of this machine.
    base = {} if step.through else os.environ
    variables = rank_environment(context, rank, base=base, rendezvous=rendezvous, guarded=step.guarded)
    variables |= step_environment(step, secrets)
    argv = [context.workspace.place(word) for word in step.argv]
    if step.from_inputs:
        argv[0] = os.fspath(context.home / INPUTS / argv[0])
    if step.python:
        argv.insert(0, context.python)
    if step.through:
        argv[:0] = step.through
    worker, user = os.getpid(), context.user
    # exec resets caught signals; ignored ones would stay ignored.
    ignored = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_IGN]

    def become_rank() -> None:
        # After the change of the user, which makes the kernel forget it.
        die_with_parent(worker, KILL_LED if step.through else signal.SIGKILL)
        if user is not None:
            # Root of a container leaves root's files on this machine, and could make them setuid.
            set_no_new_privs()
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    directory = _opened_directory(context.working_directory, step.name, rank, user)
    out = open_own(context.log(step.name, rank, "out"), user)
    err = open_own(context.log(step.name, rank, "err"), user)
    lead = in_memory(variables) if step.through else None
    if step.through:
        variables = {**os.environ, **{name: variables[name] for name in (names.ATTEMPT_ID, names.NODE)}}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if lead is None else lead,
            stdout=out,
            stderr=err,
            cwd=f"/proc/self/fd/{directory}",
            env=variables,
            start_new_session=True,
            preexec_fn=become_rank,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=user.groups if user else None,
            umask=PRIVATE_UMASK if user else -1,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if lead is not None:
            os.close(lead)
        raise StartError(_verdict_on_start(error, argv[0], step.name, rank, user)) from error
    finally:
        for descriptor in (directory, out, err):
            os.close(descriptor)
    # The worker reaps all its children itself; this keeps `subprocess` from waiting for one of them.
    process.returncode = 0
    return process.pid, lead


def _opened_directory(path: str, step: str, rank: int, user: User | None) -> int:
    """Open the working directory as the user: by name, a link put there meanwhile could lead where only root may go."""
    try:
        with acting_as(user):
            return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        whose = f" by uid {user.uid}, as whom jobs of this account run" if user else ""
        message = f"working directory {path} cannot be entered{whose}: {error.strerror}"
        end = ProcessEnd(rank=rank, exit_code=None)
        raise StartError(Verdict(reason=Reason.BAD_INPUT, message=message, end=end, step=step)) from error


def _verdict_on_start(error: Exception, command: str, step: str, rank: int, user: User | None) -> Verdict:
    number = error.errno if isinstance(error, OSError) else None
    whose = f" by uid {user.uid}, as whom jobs of this account run" if user else ""
    reason = Reason.COMMAND_NOT_FOUND
    exit_code: int | None = None
    match number:
        case errno.ENOENT:
            exit_code, problem = _EXIT_NOT_FOUND, "command not found, or its interpreter is missing"
        case errno.ENOEXEC:
            exit_code, problem = _EXIT_NOT_EXECUTABLE, "cannot be executed (a script needs a first line with #!)"
        case errno.EACCES | errno.EPERM | errno.ENOTDIR | errno.EISDIR:
            exit_code, problem = _EXIT_NOT_EXECUTABLE, f"cannot be executed{whose}: {os.strerror(number)}"
        case errno.ENOMEM:
            reason, problem = Reason.OUT_OF_MEMORY, "no memory to start it"
        case errno.EAGAIN:
            reason, problem = Reason.ENGINE_UNAVAILABLE, "the machine allows no further process"
        case _:
            reason, problem = Reason.BAD_INPUT, f"cannot be started: {error}"
    end = ProcessEnd(rank=rank, exit_code=exit_code)
    return Verdict(reason=reason, message=f"{command}: {problem}", end=end, step=step)


def find_rendezvous(
    request: AttemptRequest, directory: RunDirectory, node: int, *, wait: Callable[[], None]
) -> tuple[str, int]:
    """Where the ranks of all nodes meet: node 0 decides and writes it down, the others wait for that."""
    if node == 0:
        place = (request.nodes[0].address, free_port())
        directory.put_document(RENDEZVOUS, {"host": place[0], "port": place[1]})
        return place
    while (document := directory.document(RENDEZVOUS)) is None:
        wait()
    return str(document["host"]), int(document["port"])
