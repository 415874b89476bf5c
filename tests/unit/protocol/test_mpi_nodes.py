"""Commands for other nodes of a job of MPI: handed on to whom they are for, and nobody else's are run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_S
from trainmaster.protocol import function_runner, mpi_nodes

LEAD = "import sys\nfrom trainmaster.protocol.mpi_nodes import lead\nsys.exit(lead(sys.argv[1:], ['program']))"
NONCE = b'{"nonce": "%s"}\n' % (b"1" * 32)
FOLLOW = "from trainmaster.protocol.mpi_nodes import follow\nfollow()"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where the nodes meet."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks of a job of two nodes have."""
    (tmp_path / "token").write_text("of this attempt")
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "TRAINMASTER_TOKEN_FILE": str(tmp_path / "token"),
    }.items():
        monkeypatch.setenv(name, value)


def started(code: str, *arguments: str, node: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, "NODE_RANK": node},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_launcher_s_commands_run_on_the_node_that_it_names(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener.close()
    monkeypatch.chdir(tmp_path)
    launcher = (
        'echo "$@" > asked; for node in 0 1; do '
        '$PRTE_MCA_plm_ssh_agent node-$node "echo on; echo \\$NODE_RANK > ran-$node"; done; '
        "while [ ! -s ran-1 ]; do sleep 0.01; done; exit 3"
    )
    follower = started(FOLLOW, node="1")
    leader = started(LEAD, "sh", "-c", launcher, "sh", node="0")
    assert (leader.wait(PATIENCE_S), follower.wait(PATIENCE_S)) == (3, 0)
    assert [(tmp_path / f"ran-{node}").read_text() for node in range(2)] == ["0\n", "1\n"]
    assert (tmp_path / "asked").read_text() == "--host node-0:2,node-1:2 --map-by ppr:2:node program\n"
    assert [process.communicate()[1] for process in (leader, follower)] == ["", ""]


@pytest.mark.parametrize(
    ("failure", "code", "told"),
    [("1 / 0", 1, "ZeroDivisionError"), ("sys.exit(7)", 7, ""), ("sys.exit('why')", 1, "why"), ("sys.exit()", 0, "")],
)
def test_process_of_mpi_that_fails_ends_without_farewell(failure: str, code: int, told: str) -> None:
    ending = (
        "import atexit, sys\nfrom trainmaster.protocol.function_runner import end_at_once\n"
        "atexit.register(print, 'farewell', file=sys.stderr)\n"
        f"try: {failure}\nexcept BaseException as error:\n    end_at_once(error)\n    raise"
    )
    process = started(ending, node="0")
    said = process.communicate()[1]
    assert process.returncode == code
    assert told in said
    assert ("farewell" in said) == (code == 0)


def test_node_whose_leader_is_gone_says_so(listener: socket.socket) -> None:
    def hang_up() -> None:
        connection, _ = listener.accept()
        connection.sendall(NONCE)
        connection.recv(4096)
        connection.close()

    threading.Thread(target=hang_up).start()
    with pytest.raises(ConnectionError, match="node 0, which has the launcher of MPI, is gone"):
        mpi_nodes.follow()


def test_node_runs_nothing_for_who_has_not_the_token(tmp_path: Path, listener: socket.socket) -> None:
    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(NONCE)
            connection.recv(4096)
            order = {"command": f"touch {tmp_path}/ran", "proof": "0" * 64}
            connection.sendall(json.dumps(order).encode() + b"\n")

    threading.Thread(target=pretend).start()
    with pytest.raises(ConnectionError, match="does not belong to this job"):
        mpi_nodes.follow()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("greeting", "order"), [("{nonce} {command} #", "{command} # node"), ("{nonce}", "{command}")])
def test_what_a_node_proves_to_a_stranger_orders_no_other_to_run_anything(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, greeting: str, order: str
) -> None:
    """Two nodes reach one who has not the token: what the first proves is shown to the second as an order."""
    command = f"touch {tmp_path}/ran"
    # Named as the command is, and so proving that name: the most that it could be made to prove.
    monkeypatch.setenv("NODE_RANK", command)

    def be_between() -> None:
        first, _ = listener.accept()
        second, _ = listener.accept()
        with first, second, first.makefile("rw") as asked, second.makefile("rw") as victim:
            victim.write(NONCE.decode())
            victim.flush()
            wanted = json.loads(victim.readline())["nonce"]
            asked.write(json.dumps({"nonce": greeting.format(nonce=wanted, command=command)}) + "\n")
            asked.flush()
            proof = json.loads(asked.readline() or "{}").get("proof")
            victim.write(json.dumps({"command": order.format(command=command), "proof": str(proof)}) + "\n")
            victim.flush()
            victim.readline()

    threading.Thread(target=be_between, daemon=True).start()
    refused: list[str] = []

    def follow() -> None:
        with pytest.raises(ConnectionError) as caught:
            mpi_nodes.follow()
        refused.append(str(caught.value))

    nodes = [threading.Thread(target=follow, daemon=True) for _ in range(2)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join(PATIENCE_S)
    assert any("does not belong to this job" in said for said in refused)
    assert len(refused) == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("said", [b'{"nonce": "1"}', b'{"nonce": "%s node"}' % (b"1" * 32), b"[]", b"\xff", b""])
def test_node_proves_nothing_to_who_does_not_greet_it(
    listener: socket.socket, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_nodes, "_HANDSHAKE_S", 0.5)
    heard: list[bytes] = []

    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(said + b"\n" if said else b"")
            heard.append(connection.recv(4096))

    stranger = threading.Thread(target=greet, daemon=True)
    stranger.start()
    with pytest.raises(ConnectionError, match="does not belong to this job"):
        mpi_nodes.follow()
    stranger.join(PATIENCE_S)
    assert heard == [b""]


def test_port_that_is_taken_is_not_told_of_the_launcher(listener: socket.socket, tmp_path: Path) -> None:
    for module, name in ((function_runner, function_runner.RUNNER_FILE), (mpi_nodes, function_runner.MPI_FILE)):
        (tmp_path / name).write_text(Path(str(module.__file__)).read_text())
    taken = str(listener.getsockname()[1])
    for launcher, port, told in (
        ("sh -c true", taken, f"the nodes cannot meet at port {taken} of node 0: Address already in use"),
        (
            "no-such-mpirun",
            "0",
            "no-such-mpirun, which starts the processes of MPI, cannot be run here: No such",
        ),
    ):
        done = subprocess.run(
            [sys.executable, tmp_path / function_runner.RUNNER_FILE],
            env={**os.environ, "NODE_RANK": "0", "MPI_LAUNCHER": launcher, "MASTER_PORT": port},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stderr[: len(told)]) == (1, told)
    assert 'packages_to_install=["openmpi"]' in done.stderr


@pytest.mark.parametrize(
    "said",
    [
        {"agent": "1", "command": "true", "proof": "0" * 64},
        {"node": "1", "nonce": "n", "proof": "0" * 64},
        {"command": "true"},
        ["nonsense"],
        None,
        "[" * 100_000,
    ],
    ids=lambda said: repr(said)[:40],
)
def test_stranger_is_hung_up_on_and_the_launcher_goes_on(listener: socket.socket, said: Any) -> None:
    place = listener.getsockname()
    listener.close()
    leader = started(LEAD, "sh", "-c", "read line", "sh", node="0")
    connection = None
    while connection is None:
        try:
            connection = socket.create_connection(place, timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert leader.poll() is None
    with connection, connection.makefile("rw") as lines:
        assert "nonce" in json.loads(lines.readline())
        lines.write((said if isinstance(said, str) else json.dumps(said)) + "\n")
        lines.flush()
        assert lines.readline() == ""
    leader.kill()
    leader.communicate()
