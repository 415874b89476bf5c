"""Job classes with PyTorch: a model with its optimizer, alone and on two ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported by the first operation on a DTensor: once here, instead of in every rank
from forked_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainmaster.jobs import ExecutionSpec, RestoreableJob, job, runner
from trainmaster.jobs.checkpoint_reader import InexactResumeError
from trainmaster.jobs.runner import RunError, RunRequest
from trainmaster.jobs.spec import Cluster
from trainmaster.protocol.reasons import EXIT_STOPPED


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    steps: int = 6
    lr: float = 0.05


@job("test/fit")
class Fit(RestoreableJob[FitConfig]):
    """Fits a layer to noise, with dropout, so that every generator counts.

    The gradient is by hand: a process whose autograd has run cannot be forked into ranks.
    """

    def __init__(self, spec: ExecutionSpec, config: Any = None) -> None:
        super().__init__(spec, config)
        torch.manual_seed(3)
        self.step = 0
        self.net = layer()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.config.lr)

    @property
    def done(self) -> bool:
        return self.step >= self.config.steps

    @property
    def tree(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def run(self) -> None:
        while self.step < self.config.steps:
            self.step += 1
            inputs = torch.nn.functional.dropout(torch.randn(16, 4))
            with torch.no_grad():
                error = self.net(inputs) - 1
            self.net.weight.grad = 2 * error.mT @ inputs / 16
            self.net.bias.grad = 2 * error.mean(0)
            self.optimizer.step()
            self.log({"loss": error.square().mean().item()}, step=self.step)
            self.after_step()
            if self.checkpoint_due(self.step, every=2):
                self.save()
            self.exit_if_stopped()

    def after_step(self) -> None:
        """For tests to put something in."""

    def save(self) -> None:
        self.save_tree_and_metadata(f"steps/{self.step}", self.tree, {"step": self.step})
        self.register(f"steps/{self.step}")

    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        if not self.is_own(rel_path):
            # Another's weights alone: the template has no optimizer.
            tree, _ = self.get_tree_and_metadata_from_path(rel_path, {"net": self.net.state_dict()}, partial=True)
            self.net.load_state_dict(tree["net"])
            return
        template = {"net": self.net.state_dict(), "optimizer": _grown(self.optimizer)}
        tree, metadata = self.get_tree_and_metadata_from_path(rel_path, template)
        self.net.load_state_dict(tree["net"])
        self.optimizer.load_state_dict(tree["optimizer"])
        self.step = metadata["step"]


def layer() -> torch.nn.Linear:
    return torch.nn.Linear(4, 3)


def _grown(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state as it is after a step, for a template."""
    before = [[parameter.detach().clone() for parameter in group["params"]] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for group, saved in zip(optimizer.param_groups, before, strict=True):
            for parameter, value in zip(group["params"], saved, strict=True):
                parameter.copy_(value)
    return optimizer.state_dict()


def bits(job: Fit) -> list[str]:
    """The weights and the optimizer's moments, to the bit."""
    tensors = [*job.net.state_dict().values()]
    for state in job.optimizer.state_dict()["state"].values():
        tensors += [state["exp_avg"], state["exp_avg_sq"]]
    return [tensor.numpy().tobytes().hex() for tensor in tensors]


def stopped_at(step: int, job: Fit) -> Fit:
    job.after_step = lambda: job.step == step and os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment]
    with pytest.raises(SystemExit) as stopped:
        job()
    assert stopped.value.code == EXIT_STOPPED
    return job


def test_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = Fit.local(tmp_path / "whole", "fit")
    whole()
    first = stopped_at(3, Fit.local(tmp_path / "cut", "fit"))
    torch.manual_seed(99)
    second, config = Fit.from_checkpoint("latest", first.spec, resume=True)
    assert (second.step, config) == (3, FitConfig())
    second()
    assert bits(second) == bits(whole)


def test_another_jobs_weights_begin_a_job_of_its_own(tmp_path: Path) -> None:
    first = Fit.local(tmp_path, "first")
    first()
    spec = ExecutionSpec.local(tmp_path, "second")
    second, config = Fit.from_checkpoint_path("general/default/first/steps/6", spec, {"lr": 0.5})
    assert (second.spec.path, second.step, config) == ("general/default/second", 0, FitConfig(lr=0.5))
    assert all(map(torch.equal, second.net.state_dict().values(), first.net.state_dict().values()))
    assert second.optimizer.state_dict()["state"] == {}
    second()
    assert Fit.checkpoints(spec) == ["steps/2", "steps/4", "steps/6"]


def test_partial_load_into_a_template_of_the_weights_alone(tmp_path: Path) -> None:
    fit = Fit.local(tmp_path, "fit")
    fit()
    net = layer()
    tree, metadata = fit.get_tree_and_metadata("latest", {"net": net.state_dict()}, partial=True)
    net.load_state_dict(tree["net"])
    assert all(map(torch.equal, net.state_dict().values(), fit.net.state_dict().values()))
    assert metadata == {"step": 6}


# -- two ranks --


def test_done_is_what_process_0_says(tmp_path: Path) -> None:
    def work(rank: int) -> bool:
        job = Fit.local(tmp_path, "fit")
        job.step = 6 if rank == 0 else 0
        ran = []
        job.run = lambda: ran.append(True)  # type: ignore[method-assign]
        job()
        return bool(ran)

    assert run_ranks(2, work, tmp_path / "ranks") == [False, False]


def test_stop_of_one_rank_stops_all_after_a_common_save(tmp_path: Path) -> None:
    def work(rank: int) -> list[int]:
        job = Fit.local(tmp_path, "fit")
        if rank == 1:
            job.after_step = lambda: job.step == 3 and os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment]
        try:
            job()
        except SystemExit as stopped:
            return [job.step, int(stopped.code or 0)]
        return [job.step, 0]

    assert run_ranks(2, work, tmp_path / "ranks") == [[3, EXIT_STOPPED]] * 2
    assert Fit.latest(ExecutionSpec.local(tmp_path, "fit")) == "steps/3"


def test_ranks_resume_each_with_its_own_generators(tmp_path: Path) -> None:
    def train(root: Path, rank: int, *, stop: bool) -> list[str]:
        job = Fit.local(root, "fit")
        if Fit.latest(job.spec) is not None:
            job, _ = Fit.from_checkpoint("latest", job.spec, resume=True)
        else:
            torch.manual_seed(10 + rank)
        if stop:
            job.after_step = lambda: job.step == 3 and os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment]
        try:
            job()
        except SystemExit:
            assert stop
        return [torch.get_rng_state().numpy().tobytes().hex()]

    whole = run_ranks(2, lambda rank: train(tmp_path / "whole", rank, stop=False), tmp_path / "a")
    run_ranks(2, lambda rank: train(tmp_path / "cut", rank, stop=True), tmp_path / "b")
    cut = run_ranks(2, lambda rank: train(tmp_path / "cut", rank, stop=False), tmp_path / "c")
    assert whole == cut
    assert whole[0] != whole[1]


def test_runner_decides_once_for_all_ranks(tmp_path: Path) -> None:
    def run(*overrides: str) -> str:
        request = RunRequest(target="test/fit", name="fit", overrides=overrides)
        try:
            runner.run(request, _cluster(tmp_path))
        except RunError as error:
            return str(error)
        return "ran"

    assert run_ranks(2, lambda _: run("steps=2"), tmp_path / "a") == ["ran", "ran"]
    assert run_ranks(2, lambda _: run("steps=2"), tmp_path / "b") == ["ran", "ran"]
    refused = run_ranks(2, lambda _: run("steps=4"), tmp_path / "c")
    assert refused[0] == refused[1]
    assert "steps: 2 -> 4" in refused[0]


def test_damaged_latest_gives_way_on_every_rank(tmp_path: Path) -> None:
    from walking import flip_a_byte

    def run(rank: int) -> str:
        request = RunRequest(target="test/fit", name="fit", overrides=("steps=4",))
        runner.run(request, _cluster(tmp_path))
        return "ran"

    run_ranks(2, run, tmp_path / "a")
    flip_a_byte(tmp_path / "checkpoints/general/default/fit/steps/4")
    assert run_ranks(2, run, tmp_path / "b") == ["ran", "ran"]
    assert Fit.checkpoints(ExecutionSpec.local(tmp_path, "fit")) == ["steps/2", "steps/4"]


def test_another_number_of_ranks_is_refused_unless_it_may_be_elastic(tmp_path: Path) -> None:
    def run(name: str, **fields: Any) -> str:
        try:
            runner.run(RunRequest(target="test/fit", name=name, overrides=("steps=2",), **fields), _cluster(tmp_path))
        except RunError as error:
            return str(error)
        return "ran"

    run_ranks(2, lambda _: run("fit"), tmp_path / "a")
    (refused,) = run_ranks(1, lambda _: run("fit"), tmp_path / "b")
    assert "was saved by 2 processes" in refused
    assert "--elastic" in refused
    assert run_ranks(1, lambda _: run("fit", elastic=True), tmp_path / "d") == ["ran"]
    assert run_ranks(3, lambda _: run("fit", elastic=True), tmp_path / "e") == ["ran"] * 3
    assert run_ranks(1, lambda _: run("alone", restore="general/default/fit/steps/2"), tmp_path / "c") == ["ran"]


class ShardedFit(Fit):
    """Weights that are sharded over all ranks: four rows, of which each has some."""

    def __init__(self, spec: ExecutionSpec, config: Any = None) -> None:
        super().__init__(spec, config)
        mesh = init_device_mesh("cpu", (self.process.count,))
        self.weights = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])

    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        tree, metadata = self.get_tree_and_metadata_from_path(rel_path, {"weights": self.weights})
        self.weights, self.step = tree["weights"], metadata["step"]


@pytest.mark.parametrize("readers", [1, 3])
def test_checkpoint_of_two_ranks_is_sharded_anew_over_another_number(tmp_path: Path, readers: int) -> None:
    whole = torch.arange(8.0).reshape(4, 2)

    def save(_rank: int) -> None:
        job = ShardedFit.local(tmp_path, "fit")
        job.weights = distribute_tensor(whole, job.weights.device_mesh, [Shard(0)])
        job.save_tree_and_metadata("a", {"weights": job.weights}, {"step": 1})
        job.register("a")
        job._settle()

    def resume(_rank: int) -> list[Any]:
        spec = ExecutionSpec.local(tmp_path, "fit")
        with pytest.raises(InexactResumeError, match="saved by 2 processes"):
            ShardedFit.from_checkpoint("latest", spec, resume=True)
        job, _ = ShardedFit.from_checkpoint("latest", spec, resume=True, elastic=True)
        return [job.step, list(job.weights.to_local().shape), job.weights.full_tensor().tolist()]

    run_ranks(2, save, tmp_path / "save")
    found = run_ranks(readers, resume, tmp_path / "resume")
    assert [[step, values] for step, _, values in found] == [[1, whole.tolist()]] * readers
    assert sum(shape[0] for _, shape, _ in found) == 4


def _cluster(root: Path) -> Cluster:
    return Cluster(root=str(root))
