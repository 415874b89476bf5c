"""Which package may import which: the arrows of docs/architecture.md."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainmaster

ROOT = Path(trainmaster.__file__).parent
PYDANTIC = {"pydantic", "pydantic_core", "annotated_types"}

OURS: dict[str, set[str]] = {
    "protocol": set(),
    "worker": {"protocol"},
    "jobs": {"protocol", "plain_yaml"},
    "core": {"protocol"},
    "scheduling": {"core", "protocol"},
    "store": {"core", "protocol", "failpoints", "telemetry"},
    "backends": {"core", "protocol"},
    "coordinator": {
        "scheduling",
        "store",
        "backends",
        "core",
        "protocol",
        "storage",
        "settings",
        "configuration",
        "sealing",
        "failpoints",
        "telemetry",
        "plain_yaml",
    },
    "api": {
        "coordinator",
        "scheduling",
        "store",
        "core",
        "protocol",
        "storage",
        "settings",
        "sealing",
        "logs",
        "telemetry",
    },
    "trainers": {"jobs", "protocol", "core"},
    "engine": set(),
    "service": {"engine", "jobs", "protocol"},
    "sdk": {"protocol"},
    "trainer": {"sdk", "protocol", "plain_yaml"},
    "cli": {"sdk", "protocol", "plain_yaml"},
    "plain_yaml": set(),
    "settings": {"protocol"},
    "configuration": {"core", "protocol", "settings", "failpoints"},
    "sealing": {"core", "settings"},
    "storage": {"protocol"},
    "failpoints": set(),
    "telemetry": set(),
    "logs": {"settings"},
    "listening": {"core", "settings"},
    "connections": set(),
}
"""Package -> packages of ours that it may import, beside itself."""

THEIRS: dict[str, set[str]] = {
    "protocol": set(),
    "worker": set(),
    "jobs": {"numpy", "ml_dtypes", "obstore", "pyarrow", "torch", "jax", "orbax", "trackio", "wandb", *PYDANTIC},
    "core": PYDANTIC,
    "scheduling": set(),
    "store": {"sqlalchemy", "alembic", "psycopg"},
    "backends": {"docker", "pynvml", "requests"},
    "coordinator": {"sqlalchemy", "httpx"},
    "api": {"fastapi", "prometheus_client", "starlette", "httpx", "sqlalchemy", "zstandard", *PYDANTIC},
    "trainers": {
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
    "engine": {"numpy", "safetensors", "tokenizers", "torch"},
    "service": {"cryptography", "google", "numpy", "starlette", "torch", "uvicorn", "zstandard"},
    "sdk": {"httpx"},
    "trainer": {"httpx", "rich", "kubeflow", *PYDANTIC},
    "cli": {"typer", "rich", "yaml", "pynvml"},
    "plain_yaml": {"yaml"},
    "settings": set(),
    "configuration": set(),
    "sealing": {"cryptography"},
    "storage": set(),
    "failpoints": set(),
    "telemetry": set(),
    "logs": set(),
    "listening": set(),
    "connections": {"uvicorn"},
}
"""Package -> what it may import beside the standard library."""

CLI_SERVES = {("cli", "server"), ("cli", "settings"), ("cli", "configuration")}
"""`trainmaster serve` is the one command that is the server; `trainmaster config` shows its settings."""
CLI_SIMULATES = {
    (Path("cli") / name, target)
    for name in ("commands/simulate.py", "recording.py", "simulating.py")
    for target in ("scheduling", "core")
}
"""`trainmaster simulate` runs the scheduler itself, without a server."""
CLI_BEGINS = {(Path("cli/jobtemplate.py"), "core")}
"""`trainmaster init` writes job files from the tables that check them."""
CLI_RUNS = {(Path("cli/commands/run.py"), "jobs"), (Path("cli/commands/checkpoints.py"), "jobs")}
"""`run` runs a job class in its own process; `checkpoints verify` reads checkpoints wherever they lie."""

CLI_SHOWS_RUNTIMES = {(Path("cli/commands/runtimes.py"), "trainer")}
"""`trainmaster runtimes` lists what a `TrainerClient` of this machine would."""

SERVER_READS_MODELS = {(Path("coordinator/base_models.py"), "engine")}
"""What a trainer cannot hold is refused before one starts; `engine.config` reads that off a file, without torch."""


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            module = node.module or ""
            if module == "trainmaster":
                yield from (f"trainmaster.{alias.name}" for alias in node.names)
            else:
                yield module


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if package in OURS:
            found.append((package, path))
    return found


@pytest.mark.parametrize(
    ("package", "path"), modules(), ids=lambda value: str(value) if isinstance(value, str) else value.stem
)
def test_module_imports_follow_the_arrows(package: str, path: Path) -> None:
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "trainmaster":
            target = rest.partition(".")[0]
            known = target in OURS or (ROOT / f"{target}.py").exists() or (ROOT / target).is_dir()
            exceptions = CLI_SIMULATES | CLI_BEGINS | CLI_RUNS | CLI_SHOWS_RUNTIMES | SERVER_READS_MODELS
            excepted = (package, target) in CLI_SERVES or (path.relative_to(ROOT), target) in exceptions
            if target and known and not excepted:
                assert target == package or target in OURS[package], f"{path.name}: {package} may not import {name}"
        else:
            allowed = top in sys.stdlib_module_names or top in THEIRS[package]
            assert allowed, f"{path.name}: {package} may not import {name}"


def test_every_package_has_its_arrows() -> None:
    packages = {path.name.removesuffix(".py") for path in ROOT.iterdir() if path.name.endswith(".py") or path.is_dir()}
    assert packages - {"__pycache__", "__init__", "__main__", "server", "py.typed"} <= set(OURS)
