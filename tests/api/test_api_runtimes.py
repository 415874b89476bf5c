"""Training runtimes that lie beside the server, as clients get them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from api_world import Api, Served, World

from patience import PATIENCE_S
from trainmaster.server.coordinator.operator_files import load_runtimes
from trainmaster.server.core.accounts import KeyScope

RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: {kind}
metadata: {{name: {name}}}
spec: {{mlPolicy: {{numNodes: 2}}, of: [our, own]}}
"""


def text(name: str, kind: str = "TrainingRuntime") -> str:
    return RUNTIME.format(name=name, kind=kind)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside") / "runtimes"


@pytest.fixture(scope="module")
def served(world: World, place: Path) -> Iterator[Served]:
    with Served.serve(world.context(runtimes=functools.partial(load_runtimes, place))) as served:
        yield served


@pytest.fixture(autouse=True)
def directory(place: Path) -> Path:
    """Where the server looks, empty."""
    place.mkdir(exist_ok=True)
    for path in place.iterdir():
        path.unlink()
    return place


def test_directory_that_is_not_there_has_no_runtimes(api: Api, directory: Path) -> None:
    directory.rmdir()
    assert api.call("GET", "/v1/runtimes") == {"runtimes": [], "problems": []}


def test_file_counts_as_soon_as_it_is_there_and_is_handed_out_as_it_is(api: Api, directory: Path) -> None:
    assert api.call("GET", "/v1/runtimes")["runtimes"] == []
    (directory / "b.yml").write_text(text("b"))
    (directory / "a.yaml").write_text(text("a2", "ClusterTrainingRuntime") + "---\n" + text("a1") + "---\n")
    (directory / "kustomization.yaml").write_text("kind: Kustomization\n")
    (directory / "notes.txt").write_text("nothing")
    answer = api.call("GET", "/v1/runtimes")
    assert [(each["name"], each["file"]) for each in answer["runtimes"]] == [
        ("a2", "a.yaml"),
        ("a1", "a.yaml"),
        ("b", "b.yml"),
    ]
    assert answer["problems"] == []
    shown = api.call("GET", "/v1/runtimes/a2")
    assert shown == answer["runtimes"][0]
    assert (shown["kind"], shown["document"]["spec"]) == (
        "ClusterTrainingRuntime",
        {"mlPolicy": {"numNodes": 2}, "of": ["our", "own"]},
    )


def test_runtime_that_is_not_there_is_404_and_told_of_broken_files(api: Api, directory: Path) -> None:
    assert api.call("GET", "/v1/runtimes/a", 404)["message"] == "there is no runtime a on this server"
    (directory / "a.yaml").write_text("a: [")
    assert "; a.yaml cannot be used: a.yaml, line 1" in api.call("GET", "/v1/runtimes/a", 404)["message"]
    api.call("GET", "/v1/runtimes/%00", 422)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "bad.yaml, line 1"),
        (b"\xff\xfe\xfa", "utf-8"),
        (b"- a\n", "document 1: kind: must be ClusterTrainingRuntime or TrainingRuntime"),
        (b"kind: TrainingRuntime\n", "document 1: metadata.name: is required"),
        (b"kind: TrainingRuntime\nmetadata: {name: [1]}\n", "document 1: metadata.name: is required"),
        (b"kind: TrainingRuntime\nmetadata: {name: a}\nspec: .inf\n", "document 1: cannot be written as JSON"),
        (b"kind: TrainingRuntime\nmetadata: {name: a}\nspec: &x [*x]\n", "document 1: cannot be written as JSON"),
        (text("good").encode(), "document 1: metadata.name: another.yaml has a good already"),
        # unit/trainer/test_runtimes.py has this, too.
        pytest.param(b"[" * 20_000, "nested too deeply", marks=pytest.mark.long),
    ],
)
def test_broken_file_is_told_beside_the_good_ones(api: Api, directory: Path, content: bytes, message: str) -> None:
    (directory / "another.yaml").write_text(text("good"))
    (directory / "bad.yaml").write_bytes(content)
    answer = api.call("GET", "/v1/runtimes")
    assert [each["name"] for each in answer["runtimes"]] == ["good"]
    (problem,) = answer["problems"]
    assert problem["file"] == "bad.yaml"
    assert message in problem["message"]


def test_key_without_the_scope_sees_none(api: Api, served: Served) -> None:
    key = api.world.key(api.account_id, KeyScope.MANAGE)
    with httpx.Client(
        base_url=served.url, headers={"Authorization": f"Bearer {key}"}, timeout=PATIENCE_S, verify=False
    ) as http:
        assert http.get("/v1/runtimes").status_code == 403
        assert http.get("/v1/runtimes/a").status_code == 403
    api.call("GET", "/v1/runtimes?nme=a", 422)
