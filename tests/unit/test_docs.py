"""The documentation says what is there: links, commands, options, routes, fields, and pages made from the code."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from trainmaster.backends import capabilities_of
from trainmaster.cli.app import app as command_line
from trainmaster.plain_yaml import parse_yaml
from trainmaster.server.app import create_app
from trainmaster.server.assembly import ensure_key
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.clusters import Clusters
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.coordinator.data_checks import DataChecks
from trainmaster.server.coordinator.explain import Explainer
from trainmaster.server.coordinator.launch import JobSecrets
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.training.hyperparameters import hyperparameters_of
from trainmaster.server.core.training.types import TrainingType
from trainmaster.server.http.context import ApiContext
from trainmaster.server.settings.encryption import Sealer
from trainmaster.server.settings.settings import Settings
from trainmaster.server.storage import ARTIFACTS, BLOBS, RUNS, Roots
from trainmaster.server.store.database import Database

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
TRAINING_PAGES = sorted((DOCS / "guides" / "training").glob("*.md"))
EXAMPLES = {"sft": "sft", "lora": "lora", "full-finetune": "full_finetune", "continued-pretrain": "pretrain"}
"""Page of a training type -> the example that it shows."""

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
JOB_FILE = re.compile(r"^```yaml job\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[\s`/$(])(?:trainmaster|tm) ([a-z][a-z-]*)")
ROUTE = re.compile(r"`(GET|HEAD|POST|PUT|PATCH|DELETE) (/[^\s`?]*)[^`]*`")

commands: dict[str, Any] = typer.main.get_command(command_line).commands  # type: ignore[attr-defined]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that a forge makes of a page's headings."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """The targets of a page's links within the repository."""
    return [target for target in LINK.findall(FENCED.sub("", page.read_text())) if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(linked), f"{target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_pages_name_exist(page: Path) -> None:
    named = {name for code in CODE.findall(page.read_text()) for name in COMMAND.findall(code)}
    assert named <= set(commands), f"there are no commands {sorted(named - set(commands))}"


def test_every_page_is_linked_from_the_readme_or_the_index() -> None:
    linked = {(start.parent / target).resolve() for start in (ROOT / "README.md", INDEX) for target in links(start)}
    assert INDEX in linked
    assert set(PAGES) - {ROOT / "README.md"} <= linked


def test_every_command_is_described() -> None:
    described = set(re.findall(r"^\| `trainmaster ([a-z]+)", (DOCS / "reference" / "cli.md").read_text(), re.MULTILINE))
    assert described == set(commands)


def test_options_that_the_command_page_names_exist() -> None:
    for row in re.finditer(r"^\| `trainmaster ([a-z]+).*$", (DOCS / "reference" / "cli.md").read_text(), re.MULTILINE):
        assert set(re.findall(r"--[a-z-]+", row[0])) <= options(row[1]), f"`trainmaster {row[1]}` has not all of these"


@pytest.mark.parametrize("page", TRAINING_PAGES, ids=name_of)
def test_job_files_of_training_pages_are_accepted(page: Path) -> None:
    blocks = job_files(page)
    assert blocks
    for document in blocks:
        parse_submit(shipped(document))


@pytest.mark.parametrize("page", EXAMPLES)
def test_training_pages_show_the_examples(page: str) -> None:
    example = ROOT / "examples" / f"{EXAMPLES[page]}.yaml"
    text = (DOCS / "guides" / "training" / f"{page}.md").read_text()
    assert f"`examples/{example.name}`" in text
    assert job_files(DOCS / "guides" / "training" / f"{page}.md")[0] == parse_yaml(example.read_text(), example.name)


@pytest.mark.parametrize("page", EXAMPLES)
def test_hyperparameters_that_training_pages_name_have_these_defaults(page: str) -> None:
    table = hyperparameters_of(TrainingType(page.upper().replace("-", "_")))
    text = (DOCS / "guides" / "training" / f"{page}.md").read_text().partition("## Hyperparameters that matter")[2]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", text.partition("## The result")[0], re.MULTILINE)
    assert rows
    for cell, defaults in rows:
        names = re.findall(r"`(\w+)`", cell)
        said = defaults.replace("`", "").split(", ")
        for name, default in zip(names, said if len(said) == len(names) else said * len(names), strict=True):
            known = table[name].default_for(TrainingType(page.upper().replace("-", "_")))
            assert table[name].read(default) == known if known is not None else default == "none", name


def test_every_setting_of_the_server_is_described() -> None:
    described = set(re.findall(r"--[a-z-]+", (DOCS / "guides" / "operations.md").read_text()))
    assert options("serve") <= described


def test_routes_of_the_rest_page_are_those_of_the_server(openapi: dict[str, Any]) -> None:
    described = set(ROUTE.findall((DOCS / "reference" / "rest.md").read_text()))
    served = {(method.upper(), path) for path, methods in openapi["paths"].items() for method in methods}
    assert described == served


def test_every_field_of_a_job_is_described(openapi: dict[str, Any]) -> None:
    described = set(re.findall(r"`(\w+)`", (DOCS / "reference" / "rest.md").read_text()))
    assert set(openapi["components"]["schemas"]["JobResource"]["properties"]) <= described


def test_pages_made_from_the_code_are_current() -> None:
    check = [sys.executable, ROOT / "scripts" / "make_docs.py", "--check"]
    subprocess.run(check, check=True)


def job_files(page: Path) -> list[dict[str, Any]]:
    """The job files that a page shows."""
    return [parse_yaml(block, page.name) for block in JOB_FILE.findall(page.read_text())]


def shipped(document: dict[str, Any]) -> dict[str, Any]:
    """A job as it is submitted, with the files beside it: those that it names without a slash or a scheme before."""
    training = document["training_config"]
    named = [training["base_model"]["model_id"], training.get("framework", {}).get("custom_script_path")]
    named += [source["path"] for source in document["data_config"]["sources"]]
    files = [{"path": path, "sha256": "0" * 64} for path in named if path and "://" not in path]
    return {**document, "workload": {"kind": "trainer", "files": files}}


def options(command: str) -> set[str]:
    """The options of a command, and of those that are below it, without --help."""
    found = commands[command]
    parameters = [one for each in (found, *getattr(found, "commands", {}).values()) for one in each.params]
    named = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    return {option for option in named if option.startswith("--")} - {"--help"}


@pytest.fixture
def openapi(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a server says of itself."""
    database = Database.open(f"sqlite:///{tmp_path / 'store.db'}")
    try:
        ensure_key(database, tmp_path / "api-key")
        sealer = Sealer(bytes(32))
        vault = JobSecrets(sealer)
        roots = Roots({name: tmp_path / name for name in (RUNS, ARTIFACTS, BLOBS)})
        settings = Settings(data_dir=tmp_path)
        context = ApiContext(
            settings=settings,
            data_checks=DataChecks(settings),
            database=database,
            commands=Commands(
                database,
                admission=Admission(backends={"local": capabilities_of("local")}, default_backend="local"),
                vault=vault,
                hint=lambda subject: None,
            ),
            explainer=Explainer(database),
            vault=vault,
            clusters=Clusters(database, sealer),
            worker_package=Path,
            subscriptions=Subscriptions(database, sealer, private_addresses=True),
            roots=roots,
            collector=Collector(database, roots, RetentionPolicy()),
        )
        yield asyncio.run(fetch_openapi(context, (tmp_path / "api-key").read_text().strip()))
    finally:
        database.close()


async def fetch_openapi(context: ApiContext, key: str) -> dict[str, Any]:
    transport = httpx.ASGITransport(create_app(context))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", headers={"X-API-Key": key}) as http:
        answer = await http.get("/openapi.json")
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document
