"""Training shapes, and what a trainer that is asked for becomes."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.server.core.errors import NotFoundError, RefusedError, SpecError
from trainmaster.server.core.shapes import ChosenShape, Reference, Shape, Shapes, ShapeVersion
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.core.trainer_request import WantedTrainer, accelerator, by_hand, choose_shape, on_shape

WANTED = WantedTrainer(job_id="j", base_model="m")


def shape(name: str, *versions: ShapeVersion) -> Shape:
    return Shape(name=name, versions=versions or (version(),))


def version(name: str = "1", **fields: Any) -> ShapeVersion:
    return ShapeVersion(**{"version": name, "max_context_length": 100, **fields})


def test_every_server_has_a_shape_for_the_cpu_and_one_for_a_gpu() -> None:
    assert [each.name for each in Shapes()] == ["cpu", "one-gpu"]
    assert Shapes().get("cpu").versions[-1].accelerator_count == 0
    assert Shapes().get("one-gpu").versions[-1].accelerator_count == 1


def test_written_shape_takes_the_place_of_a_built_in_one() -> None:
    assert Shapes([shape("cpu", version(cpu_cores=4))]).get("cpu").versions[0].cpu_cores == 4


def test_trainer_on_the_cpu_books_cores_only_where_an_operator_says_so() -> None:
    cpu = Reference.read("accounts/a/trainingShapes/cpu")
    for shapes, booked in ((Shapes(), None), (Shapes([shape("cpu", version(cpu_cores=4))]), 4)):
        made = on_shape(WANTED, shapes.named(cpu), account_id="a")
        assert (made.resource_config.gpu_count, made.resource_config.cpu_cores) == (0, booked)


def test_latest_is_the_last_that_is_validated_and_can_be_run() -> None:
    split = version("3", sharding={"tensor_parallelism": 2})
    shapes = Shapes([shape("s", version("1"), version("2"), split, version("4", validated=False))])
    assert shapes.version("s", "latest").version == "2"
    assert shapes.named(Reference.read("accounts/a/trainingShapes/s")).version.version == "2"
    assert shapes.named(Reference.read("accounts/a/trainingShapes/s/versions/4")).version.version == "4"
    none = Shapes([shape("n", version("1", validated=False))])
    with pytest.raises(NotFoundError):
        none.version("n", "latest")


@pytest.mark.parametrize("text", ["s", "accounts/a/trainingShapes", "accounts/a/trainingShapes/s/versions/", "a/b/c/d"])
def test_reference_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        Reference.read(text)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"name": "s", "versions": []}, "versions"),
        ({"name": "S", "versions": [{"version": 1, "max_context_length": 1}]}, "name"),
        ({"name": "s", "versions": [{"version": "latest", "max_context_length": 1}]}, "versions[0].version"),
        ({"name": "s", "versions": [{"version": 1, "max_context_length": 1}] * 2}, "versions[1].version"),
        ({"name": "s", "versions": [{"version": 1}]}, "versions[0].max_context_length"),
        ({"name": "s", "versions": [{"version": 1, "max_context_length": 1, "gpu": 1}]}, "versions[0].gpu"),
    ],
)
def test_wrong_shape_is_refused_by_its_field(document: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(Shape, document)
    assert field in [problem.field for problem in caught.value.problems]


def test_smallest_shape_that_is_good_enough_is_chosen() -> None:
    shapes = Shapes(
        [
            shape("eight", version(accelerator_count=8, max_context_length=10**6)),
            shape("for-m", version(accelerator_count=1, max_context_length=32768, base_models=("m",))),
            shape("far", version(accelerator_count=1, max_context_length=10, region="us-1")),
        ]
    )

    def chosen(**fields: Any) -> str | None:
        gpus = fields.pop("gpus", True)
        found = choose_shape(WantedTrainer(**{"job_id": "j", "base_model": "other", **fields}), shapes, gpus=gpus)
        return found.shape if found else None

    assert chosen() == "far"
    assert chosen(region="eu-1") == "one-gpu"
    assert chosen(max_context_length=20) == "one-gpu"
    assert chosen(max_context_length=20, base_model="m") == "for-m"
    assert chosen(max_context_length=10**5) == "eight"
    assert chosen(max_context_length=10**7) is None
    assert chosen(gpus=False) == "cpu"


def test_accelerators_are_understood() -> None:
    assert accelerator("NVIDIA_H100_80GB") == ("H100", 76293)
    assert accelerator("NVIDIA_H200_141GB") == ("H200", 134468)
    assert accelerator("AMD_MI300X_192GB") == ("MI300X", 183105)
    assert accelerator("A100-80GB") == ("A100-80GB", None)


def test_hand_made_trainer_takes_a_gpu_where_there_is_one() -> None:
    assert by_hand(WANTED).resource_config.gpu_count is None
    typed = by_hand(WantedTrainer(job_id="j", base_model="m", accelerator_type="H100", node_count=2))
    assert (typed.resource_config.gpu_count, typed.resource_config.node_count) == (2, 2)


def test_replicas_have_nodes_of_their_own() -> None:
    wanted = WantedTrainer(job_id="j", base_model="m", replica_count=3)
    made = on_shape(wanted, ChosenShape(shape="s", version=version(accelerator_count=2, node_count=2)), account_id="a")
    assert (made.resource_config.node_count, made.resource_config.gpu_count) == (6, 12)


def test_shape_without_a_region_leaves_it_to_the_client() -> None:
    wanted = WantedTrainer(job_id="j", base_model="m", region="eu-1")
    made = on_shape(wanted, ChosenShape(shape="s", version=version()), account_id="a")
    assert made.scheduling_config.required_capabilities == ("region=eu-1",)
    with pytest.raises(RefusedError, match="region"):
        on_shape(wanted, ChosenShape(shape="s", version=version(region="us-1")), account_id="a")


def test_shape_for_other_models_is_refused() -> None:
    with pytest.raises(RefusedError, match="is not for m; it is for other"):
        on_shape(WANTED, ChosenShape(shape="s", version=version(base_models=("other",))), account_id="a")
