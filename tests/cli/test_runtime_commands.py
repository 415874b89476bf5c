"""`trainmaster runtimes`, over a server with a file of its operator's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from cli_server import Server
from typer.testing import Result

from trainmaster.client import Client, NotFoundError
from trainmaster.plain_yaml import parse_yaml

Tm = Callable[..., Result]


@pytest.fixture(autouse=True)
def _files(connected: Server, tm: Tm) -> Iterator[None]:
    """A runtime that began as the file of a built-in one, and a file with a slip."""
    directory = connected.directory / "runtimes"
    directory.mkdir(exist_ok=True)
    begun = tm("runtimes", "torch-distributed").stdout
    (directory / "ours.yaml").write_text(begun.replace("name: torch-distributed", "name: ours"))
    (directory / "slip.yaml").write_text("kind: [")
    yield
    for path in directory.iterdir():
        path.unlink()


def test_list_has_those_of_the_server_and_the_built_in_ones(tm: Tm) -> None:
    told = tm("runtimes")
    assert told.exit_code == 0
    rows = {line.split()[0]: line.split() for line in told.stdout.splitlines()}
    assert rows["ours"][:3] == ["ours", "torch", "CustomTrainer"]
    assert rows["ours"][-2:] == ["server's", "ours.yaml"]
    assert rows["trainmaster-lora"][1:3] == ["transformers", "BuiltinTrainer"]
    listed = {each["name"]: each for each in json.loads(tm("runtimes", "--json").stdout)}
    assert set(listed) == set(rows) - {"RUNTIME"}
    assert (listed["trainmaster-lora"]["training_type"], listed["ours"]["ranks_per_node"]) == ("LORA", None)


def test_one_is_shown_as_a_file_to_begin_with(tm: Tm) -> None:
    document = parse_yaml(tm("runtimes", "ours").stdout, "ours")
    assert document["metadata"]["name"] == "ours"
    assert json.loads(tm("runtimes", "ours", "--json").stdout) == document


def test_unknown_name_is_told_which_there_are(tm: Tm) -> None:
    told = tm("runtimes", "torhc")
    assert told.exit_code == 1
    assert "there is no runtime named 'torhc'; there are: ours, " in told.stderr


def test_client_gets_the_server_s_own(client: Client) -> None:
    answer = client.runtimes.list()
    assert [each["name"] for each in answer["runtimes"]] == ["ours"]
    assert [each["file"] for each in answer["problems"]] == ["slip.yaml"]
    assert client.runtimes.get("ours")["document"]["kind"] == "ClusterTrainingRuntime"
    with pytest.raises(NotFoundError, match=r"there is no runtime mpi on this server; slip.yaml cannot be used"):
        client.runtimes.get("mpi")
