"""Which room may import which: the arrows of docs/explanation/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trainmaster

ROOT = Path(trainmaster.__file__).parent
PYDANTIC = {"pydantic", "pydantic_core", "annotated_types"}
SCHEMA = {*PYDANTIC, "typing_extensions"}

OURS: dict[str, set[str]] = {
    # libraries without a room
    "plain_yaml": set(),
    # what server, worker and job agree on
    "protocol": set(),
    # what server and client agree on; its enumerations are the core's
    "schema": {"server.core"},
    "worker": {"protocol"},
    # the control plane
    "server.core": {"protocol"},
    "server.scheduling": {"server.core", "protocol"},
    "server.failpoints": set(),
    "server.archive": {"server.core", "jobs", "protocol"},
    "server.storage": {"server.archive", "protocol"},
    "server.attempt_store": {"protocol"},
    "server.settings": {"server.core", "server.failpoints", "protocol"},
    "server.store": {"server.core", "server.settings", "server.failpoints", "protocol"},
    "backends": {"server.core", "protocol", "plain_yaml"},
    "server.coordinator": {
        "server.archive",
        "server.scheduling",
        "server.store",
        "server.core",
        "server.settings",
        "server.storage",
        "server.attempt_store",
        "server.failpoints",
        "backends",
        "protocol",
        "plain_yaml",
    },
    "server.http": {
        "schema",
        "server.archive",
        "server.coordinator",
        "server.scheduling",
        "server.store",
        "server.core",
        "server.settings",
        "server.storage",
        "server.attempt_store",
        "server.failpoints",
        "protocol",
    },
    "server.doors": {
        "server.http",
        "server.coordinator",
        "server.store",
        "server.core",
        "server.storage",
        "protocol",
    },
    "server.doors.tinker": {
        "server.doors",
        "server.http",
        "server.coordinator",
        "server.store",
        "server.core",
        "server.settings",
        "server.storage",
        "protocol",
    },
    "server.doors.fireworks": {
        "server.doors",
        "server.http",
        "server.coordinator",
        "server.store",
        "server.core",
        "server.storage",
        "protocol",
    },
    "server.app": {
        "server.doors",
        "server.doors.tinker",
        "server.doors.fireworks",
        "server.http",
        "server.core",
        "server.settings",
    },
    "server.assembly": {
        "server.app",
        "server.archive",
        "server.http",
        "server.coordinator",
        "server.store",
        "server.core",
        "server.settings",
        "server.storage",
        "server.failpoints",
        "backends",
        "protocol",
    },
    "server.process": {
        "server.assembly",
        "server.http",
        "server.coordinator",
        "server.store",
        "server.core",
        "server.settings",
        "server.storage",
        "server.failpoints",
        "backends",
        "protocol",
    },
    # what runs inside a job
    "jobs": {"protocol", "plain_yaml"},
    "training": {"engine", "jobs", "protocol", "schema", "server.core"},
    "engine": set(),
    "trainer_service": {"engine", "jobs", "protocol"},
    # what people call
    "client": {"schema", "protocol"},
    "trainer": {"client", "protocol", "plain_yaml"},
    "cli": {"client", "schema", "protocol", "plain_yaml"},
}
"""Room -> rooms that it may import, beside itself."""

THEIRS: dict[str, set[str]] = {
    "plain_yaml": {"yaml"},
    "protocol": set(),
    "schema": {"typing_extensions"},
    "worker": set(),
    "server.core": PYDANTIC,
    "server.scheduling": set(),
    "server.failpoints": set(),
    "server.archive": set(),
    "server.storage": set(),
    "server.settings": {"cryptography", "uvicorn"},
    "server.store": {"sqlalchemy", "alembic", "psycopg"},
    "backends": {*PYDANTIC, "docker", "httpx", "kubernetes", "pynvml", "requests", "yaml"},
    "server.coordinator": {"sqlalchemy", "httpx"},
    "server.http": {
        "fastapi",
        "httptools",
        "prometheus_client",
        "starlette",
        "httpx",
        "sqlalchemy",
        "zstandard",
        *SCHEMA,
    },
    "server.doors": {"fastapi", "starlette", "sqlalchemy", "zstandard"},
    "server.doors.tinker": {"fastapi", "starlette", "sqlalchemy", *PYDANTIC},
    "server.doors.fireworks": {"fastapi", "starlette", "sqlalchemy", *PYDANTIC},
    "server.app": {"fastapi", "starlette"},
    "server.assembly": {"sqlalchemy"},
    "server.process": {"uvicorn"},
    "jobs": {"numpy", "ml_dtypes", "obstore", "pyarrow", "torch", "jax", "orbax", "trackio", "wandb", *PYDANTIC},
    "training": {
        "accelerate",
        "datasets",
        "httpx",
        "huggingface_hub",
        "numpy",
        "obstore",
        "peft",
        "pyarrow",
        "pyiceberg",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "trl",
        "yaml",
    },
    "engine": {"numpy", "safetensors", "tokenizers", "torch", "triton"},
    "trainer_service": {"cryptography", "google", "numpy", "starlette", "torch", "uvicorn", "zstandard", *PYDANTIC},
    "client": {"httpx"},
    "trainer": {"httpx", "rich", "kubeflow", *PYDANTIC},
    "cli": {"typer", "rich", "pynvml"},
}
"""Room -> what it may import beside the standard library."""

EXCEPTIONS: dict[str, set[str]] = {
    "cli/commands/server.py": {"server.process", "server.settings"},
    # `trainmaster simulate` runs the scheduler itself, without a server.
    "cli/commands/simulate.py": {"server.scheduling", "server.core"},
    # `trainmaster init` writes job files from the tables that check them.
    "cli/job_template.py": {"server.core"},
    # `run` runs a job class in its own process; `checkpoints verify` reads checkpoints wherever they are.
    "cli/commands/submit.py": {"jobs"},
    "cli/commands/results.py": {"jobs"},
    # `trainmaster runtimes` lists what a `TrainerClient` on this machine would.
    "cli/commands/cluster.py": {"trainer"},
    # The server refuses a base model that a trainer cannot hold; `engine.config` reads its file, without torch.
    "server/coordinator/base_models.py": {"engine"},
    # What starts a worker on a node goes there as text.
    "backends/cluster/worker_start.py": {"worker"},
}
"""Module -> rooms that it alone may import."""


def room_of(dotted: str) -> str:
    """The room of `server.core.job` is `server.core`, that of `jobs.reporter` is `jobs`."""
    return max((room for room in OURS if f"{dotted}.".startswith(f"{room}.")), key=len, default="")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            module = node.module or ""
            if module.partition(".")[0] == "trainmaster":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def modules() -> list[tuple[str, Path]]:
    paths = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]
    return [(room, path) for path in paths if (room := room_of(".".join(path.with_suffix("").parts)))]


@pytest.mark.parametrize(("room", "path"), modules(), ids=str)
def test_module_imports_follow_the_arrows(room: str, path: Path) -> None:
    allowed = {room, *OURS[room], *EXCEPTIONS.get(path.as_posix(), ())}
    for name in imports_of(ROOT / path):
        top, _, rest = name.partition(".")
        if top == "trainmaster":
            target = room_of(rest)
            assert target in allowed or not target, f"{path}: {room} may not import {name}"
        else:
            assert top in sys.stdlib_module_names or top in THEIRS[room], f"{path}: {room} may not import {name}"


def test_arrows_form_no_cycle() -> None:
    left = {room: set(targets) for room, targets in OURS.items()}
    while free := {room for room, targets in left.items() if not targets}:
        left = {room: targets - free for room, targets in left.items() if room not in free}
    assert left == {}


def test_every_module_is_in_a_room() -> None:
    outside = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")} - {str(path) for _, path in modules()}
    assert outside == {"__init__.py", "__main__.py", "server/__init__.py"}


def test_every_exception_is_used() -> None:
    for name, rooms in EXCEPTIONS.items():
        path = ROOT / name
        used = {room_of(each.partition(".")[2]) for each in imports_of(path) if each.startswith("trainmaster.")}
        assert rooms <= used, f"{name} does not import {sorted(rooms - used)} any more"


def test_no_import_closes_a_cycle() -> None:
    """Neither an import for types alone nor one inside a function may hide that two modules need each other."""
    dotted = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for _, path in modules()}

    def imported(path: Path) -> set[str]:
        names = (name.removeprefix("trainmaster.") for name in imports_of(ROOT / path))
        return {name if name in dotted else name.rpartition(".")[0] for name in names} & dotted.keys()

    # Raises CycleError, which names the modules.
    TopologicalSorter({name: imported(path) for name, path in dotted.items()}).prepare()
