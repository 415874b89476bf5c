"""The `trainer_service` workload: its arguments and its launch; and what becomes of checkpoints that users ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from job_factory import NOW, new_job, observation, training

from trainmaster.protocol.launch import Launch, Lifetime
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.observations import observe
from trainmaster.server.core.reports import Liveness, NodeObservation
from trainmaster.server.core.retention import delete_checkpoint, expire_at, overdue_checkpoints, publish
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.workloads.trainer_service import read_arguments


def launched(gpus: int = 0, nodes: int = 1, **workload: Any) -> Launch:
    document = {
        "name": "n",
        "workload": {"kind": "trainer_service", "base_model": "m", "model_path": "/m", **workload},
        "resource_config": {"gpu_count": gpus, "node_count": nodes},
    }
    return compile_job(parse_submit(document)).launch


def told(**workload: Any) -> Any:
    return json.loads(launched(**workload).inputs["service.json"])


def test_trainer_serves_until_it_is_stopped_and_saves_when_asked() -> None:
    launch = launched()
    assert (launch.lifetime, launch.port_environment, launch.can_save) == (Lifetime.SERVICE, "PORT", True)
    assert launch.steps[-1].argv == ("-P", "-m", "trainmaster.trainer_service")
    assert launch.readiness is not None
    assert (launch.readiness.path, launch.readiness.first_node_only) == ("/api/v1/healthz", True)


def test_one_process_runs_on_each_gpu() -> None:
    assert launched(gpus=8, nodes=2).ranks_per_node == 4
    assert launched(ranks_per_node=2).ranks_per_node == 2
    with pytest.raises(SpecError, match="ranks_per_node"):
        launched(gpus=2, ranks_per_node=4)


def test_mode_follows_from_what_is_asked_for() -> None:
    assert told()["mode"] == "full"
    assert told(lora_rank=8)["mode"] == "lora"
    assert told(lora_rank=8, forward_only=True)["mode"] == "forward_only"
    assert told(lora_rank=8, extra_args=["--forward-only"])["mode"] == "forward_only"


def test_arguments_are_told_to_the_service() -> None:
    arguments = ["--precision", "bfloat16", "--max-adapters=4", "--keep-results-s", "1.5"]
    found = told(gradient_accumulation_steps=2, extra_args=[*arguments, "--gradient-accumulation-steps", "3"])
    assert (found["precision"], found["max_adapters"], found["keep_results_s"]) == ("bfloat16", 4, 1.5)
    assert found["gradient_accumulation_steps"] == 3
    assert told()["sampling_share"] == 0.5
    assert told(sampling_share=0.25)["sampling_share"] == 0.25
    assert told(sampling_share=0.25, extra_args=["--sampling-share", "0.75"])["sampling_share"] == 0.75


@pytest.mark.parametrize(
    ("arguments", "index", "said"),
    [
        (["--forward-onli"], 0, "did you mean '--forward-only'"),
        (["forward-only"], 0, "unknown argument"),
        (["--precision", "int3"], 0, "must be one of"),
        (["--forward-only", "--max-adapters"], 1, "needs a value"),
        (["--forward-only=yes"], 0, "takes no value"),
        (["--max-adapters", "0"], 0, "whole number"),
        (["--keep-results-s", "nan"], 0, "number of seconds"),
        (["--sampling-share", "1"], 0, "below 1"),
        (["--sampling-share=half"], 0, "below 1"),
        (["--forward-only", "--forward-only"], 1, "twice"),
    ],
)
def test_unknown_argument_is_refused(arguments: list[str], index: int, said: str) -> None:
    with pytest.raises(RefusedError) as caught:
        launched(extra_args=arguments)
    [problem] = caught.value.problems
    assert problem.field == f"workload.extra_args[{index}]"
    assert said in problem.message


def test_value_that_looks_like_an_argument_is_a_value() -> None:
    assert read_arguments(["--precision", "--forward-only"])[0] == {}


def test_fp8_is_for_base_models_that_are_not_trained() -> None:
    assert told(lora_rank=8, precision="fp8")["precision"] == "fp8"
    assert told(forward_only=True, precision="fp8")["precision"] == "fp8"
    assert told(lora_rank=8, extra_args=["--precision=fp8"])["precision"] == "fp8"
    for full in ({"precision": "fp8"}, {"extra_args": ["--precision", "fp8"]}):
        with pytest.raises(SpecError, match="set lora_rank, or use bfloat16"):
            launched(**full)
    told(precision="fp8", extra_args=["--precision", "bfloat16"])


# -- checkpoints that users ask for --


def saved(job: Job, checkpoint_id: str, **fields: Any) -> Change:
    record = {"type": "checkpoint", "checkpoint_id": checkpoint_id, "root": "r", "path": checkpoint_id, **fields}
    seen = NodeObservation(liveness=Liveness.ALIVE, records=[record])
    change = observe(job, observation(job, seen), now=NOW)
    assert change is not None
    return change


def test_named_checkpoint_is_kept_with_what_is_said_of_it() -> None:
    job = training(new_job(service=True))
    said = {"model_id": "s:train:0", "lora_rank": 8, "expires_at": NOW + 60, "nested": {"a": [1, "b", None]}}
    change = saved(job, "c", kind="sampler", name="step-4", attributes=said)
    [checkpoint] = change.checkpoints
    assert (checkpoint.kind, checkpoint.name, checkpoint.expires_at) == ("sampler", "step-4", NOW + 60)
    assert checkpoint.attributes == said
    # It is its user's, and not what the job goes on from.
    assert change.job.latest_checkpoint_id is None
    assert saved(job, "d").job.latest_checkpoint_id == "d"
    assert saved(job, "e", kind="nonsense", name="x").checkpoints[0].kind == ""


def test_what_is_said_of_a_checkpoint_is_made_fit_to_keep() -> None:
    job = training(new_job(service=True))
    said = {"a": float("nan"), "b": "\0x\ud800", "c": object, "d": 10**40, "\0": 1}
    [checkpoint] = saved(job, "c", kind="training", name="n\0", attributes=said).checkpoints
    assert checkpoint.attributes == {"a": None, "b": "x?", "c": None, "d": None, "": 1}
    assert checkpoint.name == "n"
    huge = {"a": ["x" * 2000] * 100}
    assert saved(job, "d", kind="training", name="n", attributes=huge).checkpoints[0].attributes == {}


def test_checkpoint_may_take_the_place_of_others() -> None:
    job = training(new_job(service=True))
    change = saved(job, "c2", kind="training", name="n", attributes={"replaces": ["c1", "c2"]})
    assert change.replaced == ("c1",)
    assert saved(job, "c3", attributes={"replaces": ["c1"]}).replaced == ()


def test_named_checkpoint_can_go_while_its_trainer_runs() -> None:
    job = training(new_job(service=True))
    change = saved(job, "c", kind="training", name="n")
    [checkpoint] = change.checkpoints
    assert delete_checkpoint(change.job, checkpoint, others=[], users=(), now=NOW) is not None


def test_expiry_and_publication_are_recorded_once() -> None:
    job = training(new_job(service=True))
    change = saved(job, "c", kind="training", name="n")
    [checkpoint] = change.checkpoints
    expires = expire_at(change.job, checkpoint, NOW + 5, now=NOW)
    assert expires is not None
    assert "5 s" in expires.events[0].message
    assert expire_at(change.job, checkpoint, None, now=NOW) is None
    published = publish(change.job, checkpoint, public=True, now=NOW)
    assert published is not None
    assert published.events[0].type == "checkpoint_published"
    assert publish(change.job, checkpoint, public=False, now=NOW) is None


def test_overdue_checkpoint_stays_while_it_is_needed() -> None:
    job = training(new_job(service=True))
    made = [
        saved(job, name, kind="training", name=name, attributes={"expires_at": NOW}).checkpoints[0] for name in "abc"
    ]
    later = overdue_checkpoints(made, in_use={"b"}, now=NOW + 1)
    assert [each.checkpoint_id for each in later] == ["a", "c"]
    assert overdue_checkpoints(made, in_use=(), now=NOW) == []
