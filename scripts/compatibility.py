"""Writes `docs/compatibility.md`: what the public `tinker` clients can ask for, and what becomes of it here.

The requests are read off the installed clients, each in its environment under `.venvs` (`make setup-dev`); who answers
is read off the routes. `--check` writes nothing and fails when the page is not up to date.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmaster.api.routes.tinker import ROUTES
from trainmaster.api.tinker.routing import By, DoorRoute

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
ENVIRONMENTS = ("tinker-0.24.1", "tinker-0.25.0", "tinker")
"""The oldest first; the last has the latest version."""
FUTURE = "POST /retrieve_future"
WORKS = (By.SERVER, By.TRAINER)

INTRODUCTION = """\
# What the public Tinker clients can do here

This page is made by `scripts/compatibility.py` from the source of the installed clients and from the routes of the root
door ([tinker.md](tinker.md)). A test fails when a client can ask for something that has no answer.
"""
REQUESTS = """
## Requests

Every path below `/api/v1` that a client can ask for, and what becomes of it here:

- *works*, by the *server*, whether a trainer runs or not, or by the *trainer* that has the model or the sampler;
- *refused*, with the reason that is told, through the future where there is one, and else with a status that clients do
  not take for a fault of the moment;
- *not used*: clients ask for it only where the server tells them to, which this one does not. It is refused likewise.

A test asks for each of them once, of a server and a trainer that run.
"""
METHODS = """
## Methods

The public methods of the clients, without their `_async` twins, with the requests that each leads to. A method that
needs a refused request is *refused*, and its error says why. One that *asks nothing* is the client's own affair.
"""


def reflect(environment: str) -> dict[str, Any]:
    """What the client of an environment can ask for."""
    python = ROOT / ".venvs" / environment / "bin" / "python"
    found = subprocess.run([python, ROOT / "scripts" / "reflect_client.py"], check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def route_of(request: str) -> DoorRoute | None:
    """The route that answers a request; None when there is none."""
    method, _, path = request.partition(" ")
    for route in ROUTES:
        # A client fills in `weights/name` where the routes have two parts.
        pattern = re.sub(r"\\\{\w+\\\}", r"[^/]+", re.escape(route.path).replace(r"\{place\}/\{name\}", r"\{\}"))
        pattern = pattern.replace(r"\{\}", r"[^/]+")
        if route.method == method and re.fullmatch(pattern, path.replace("{}", "x")):
            return route
    return None


def unanswered(clients: Iterable[Mapping[str, Any]]) -> list[str]:
    """The requests that clients can make and that lead nowhere."""
    return sorted({request for client in clients for request in client["requests"] if route_of(request) is None})


def page(clients: Sequence[Mapping[str, Any]]) -> str:
    """The page about some clients, the oldest first."""
    versions = [str(client["version"]) for client in clients]
    requests = sorted({each for client in clients for each in client["requests"]}, key=_by_path)
    lines = [INTRODUCTION, f"The clients are {', '.join(versions)}.", REQUESTS]
    lines += [_counted("requests", clients[-1], {request: kind_of(request) for request in clients[-1]["requests"]}), ""]
    lines += [f"| request | {' | '.join(versions)} | here | by | |", "|---" * (len(versions) + 4) + "|"]
    for request in requests:
        route = route_of(request)
        marks = ["yes" if request in client["requests"] else "" for client in clients]
        by, note = (route.by if route.by in WORKS else "", route.note) if route else ("", "")
        lines.append(f"| `{request}` | {' | '.join(marks)} | {kind_of(request)} | {by} | {note} |")
    lines.append(METHODS)
    fates = {method: fate_of(found)[0] for method, found in clients[-1]["methods"].items()}
    lines += [_counted("methods", clients[-1], fates), ""]
    lines += [f"| method | {' | '.join(versions)} | here | requests | |", "|---" * (len(versions) + 4) + "|"]
    for method in sorted({each for client in clients for each in client["methods"]}, key=_by_class):
        marks = ["yes" if method in client["methods"] else "" for client in clients]
        made = next(client["methods"][method] for client in reversed(clients) if method in client["methods"])
        shown = ", ".join(f"`{request}`" for request in made)
        lines.append(
            f"| `{method}` | {' | '.join(marks)} | {' | '.join((fate_of(made)[0], shown, fate_of(made)[1]))} |"
        )
    return "\n".join(lines) + "\n"


def kind_of(request: str) -> str:
    """What becomes of a request: it works, is refused, or is not used."""
    route = route_of(request)
    if route is None:
        return "unanswered"
    return "works" if route.by in WORKS else "not used" if route.by is By.UNUSED else "refused"


def fate_of(requests: Sequence[str]) -> tuple[str, str]:
    """What becomes of a method that leads to these requests, and why."""
    if not requests:
        return "asks nothing", ""
    made = [request for request in requests if request != FUTURE]
    refused = [route for request in made if (route := route_of(request)) is not None and route.by is By.REFUSED]
    if refused:
        return "refused", "; ".join(route.note for route in refused)
    unused = [route for request in made if (route := route_of(request)) is not None and route.by is By.UNUSED]
    return "works", unused[0].note if len(unused) == len(made) else ""


def _counted(what: str, client: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    counts = Counter(kinds.values())
    said = {"works": "work", "refused": "are refused", "not used": "are not used", "asks nothing": "ask nothing"}
    told = ", ".join(f"{counts[kind]} {words}" for kind, words in said.items() if counts[kind])
    return f"Of the {len(kinds)} {what} of {client['version']}, {told}."


def _by_path(request: str) -> tuple[str, str]:
    method, _, path = request.partition(" ")
    return path, method


def _by_class(method: str) -> tuple[int, str]:
    order = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
    return order.index(method.partition(".")[0]), method


def main() -> int:
    """Write the page, or check it."""
    clients = [reflect(environment) for environment in ENVIRONMENTS]
    if missing := unanswered(clients):
        sys.stderr.write(f"nothing answers {', '.join(missing)}\n")
        return 1
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(clients))
    elif not PAGE.exists() or PAGE.read_text() != page(clients):
        sys.stderr.write("docs/compatibility.md is out of date: run scripts/compatibility.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
