"""One rank of a trainer service: `python -P -m trainmaster.trainer_service`. Rank 0 serves, the others follow it."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainmaster.jobs import report
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.trainer_requests import SERVICE_FILE
from trainmaster.trainer_service.channel import ChannelClosedError, EngineChannel, pair
from trainmaster.trainer_service.configuration import Configuration, ServiceConfigurationError
from trainmaster.trainer_service.messages import allow_many_descriptors

if TYPE_CHECKING:
    from trainmaster.engine.engine import Engine

FRONT_LEAVES_WITHIN_S = 10.0
"""The front tells those who still ask how it ended, and goes."""


def main() -> NoReturn:
    share_cores()
    faulthandler.enable()
    try:
        inputs = Path(os.environ[environment.INPUTS_DIR])
    except KeyError as error:
        raise SystemExit(f"this is a step of a job, and runs in no other place: {error} is not set") from None
    try:
        configuration = Configuration.read(inputs / SERVICE_FILE)
    except ServiceConfigurationError as error:
        report.fail(Reason.BAD_INPUT, str(error))
    if report.rank() == 0:
        _lead(configuration)
    _follow(configuration)


def share_cores() -> None:
    """Set the number of threads, and how they wait; has to come before torch is imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The ranks of a node share its cores, where the job books none.
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    # Threads that wait for one another by spinning make each other crawl where a core has other work too.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _lead(configuration: Configuration) -> NoReturn:
    allow_many_descriptors()
    # First of all: whoever asks meanwhile hears that it is not ready, and no refused connection.
    front, channel = _start_front(configuration)
    # Only now: seconds of imports.
    from trainmaster.engine.parallel import ProcessRanks
    from trainmaster.engine.sampler import Sampler
    from trainmaster.trainer_service.process import ServiceControl, TrainerService
    from trainmaster.trainer_service.reports import FatalError

    engine = _engine(configuration)
    sampler = Sampler(
        engine.base,
        configuration.model_path,
        context_length=engine.max_context_length,
        tempered_logprobs=configuration.tempered_logprobs,
    )
    control = ServiceControl(report.reporter)
    with control.signals():
        service = TrainerService(
            configuration, engine=engine, sampler=sampler, channel=channel, reporter=report.reporter, control=control
        )
        try:
            service.run()
        except ChannelClosedError:
            raise SystemExit(f"the front process ended with {_wait(front)}, and nobody can be answered") from None
        except FatalError as error:
            raise SystemExit(f"the service cannot continue: {error}") from error
    if isinstance(engine.ranks, ProcessRanks):
        engine.ranks.leave()
    channel.close()
    _wait(front)
    report.exit_stopped()


def _follow(configuration: Configuration) -> NoReturn:
    # Rank 0 hears them, too, and needs the others for what it has to do then.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine = _engine(configuration)
    from trainmaster.engine.parallel import ProcessRanks

    assert isinstance(engine.ranks, ProcessRanks)
    engine.ranks.follow(engine)
    report.exit_stopped()


def _engine(configuration: Configuration) -> Engine:
    import torch

    from trainmaster.engine.engine import Engine
    from trainmaster.engine.parallel import join
    from trainmaster.engine.types import Blame, EngineError

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    fp8, precision = configuration.precision == "fp8", configuration.precision
    if precision in ("auto", "fp8"):
        precision = "bfloat16" if cuda else "float32"
    try:
        return Engine(
            configuration.model_path,
            device=device,
            dtype=getattr(torch, precision),
            fp8=fp8,
            max_context_length=configuration.max_context_length,
            process=join(device),
            gradient_accumulation_steps=configuration.gradient_accumulation_steps,
        )
    except EngineError as error:
        if error.blame is Blame.USER:
            report.fail(Reason.BAD_INPUT, str(error))
        raise


def _start_front(configuration: Configuration) -> tuple[subprocess.Popen[bytes], EngineChannel]:
    ours, theirs = pair()
    port = os.environ.get("PORT")
    if port is None:
        raise SystemExit("PORT is not set: a trainer service is started by a worker that chooses one")
    argv = [sys.executable, "-P", "-m", "trainmaster.trainer_service.front", "--port", port]
    argv += ["--channel", str(theirs.fileno()), "--keep-results-s", str(configuration.keep_results_s)]
    front = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    theirs.close()
    return front, EngineChannel(ours)


def _wait(front: subprocess.Popen[bytes]) -> str:
    try:
        return f"exit code {front.wait(FRONT_LEAVES_WITHIN_S)}"
    except subprocess.TimeoutExpired:
        front.kill()
        return "nothing, and was killed"


if __name__ == "__main__":
    main()
