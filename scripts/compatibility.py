"""Writes `docs/compatibility.md`: what the public `tinker` clients can ask for, and what becomes of it here.

The requests are read off the installed clients, each in its environment under `.venvs` (`make setup-dev`); who answers
is read off the routes. `--check` writes nothing and fails when the page is not up to date.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
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

INTRODUCTION = """\
# What the public Tinker clients can do here

This page is made by `scripts/compatibility.py` from the source of the installed clients and from the routes of the root
door ([tinker.md](tinker.md)). A test fails when a client can ask for something that has no answer.
"""
REQUESTS = """
## Requests

Every path below `/api/v1` that a client can ask for. *server*: answered whether a trainer runs or not. *trainer*:
passed on to the trainer that has the model or the sampler. *refused*: answered with the reason. *unused*: clients ask
for it only where the server tells them to, which this one does not.
"""
METHODS = """
## Methods

The public methods of the clients, without their `_async` twins, with the requests that each leads to.
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
    lines = [INTRODUCTION, f"The clients are {', '.join(versions)}.", REQUESTS]
    lines += [f"| request | {' | '.join(versions)} | by | |", "|---" * (len(versions) + 3) + "|"]
    for request in sorted({each for client in clients for each in client["requests"]}, key=_by_path):
        route = route_of(request)
        marks = ["yes" if request in client["requests"] else "" for client in clients]
        by, note = (route.by, route.note) if route else ("nobody", "")
        lines.append(f"| `{request}` | {' | '.join(marks)} | {by} | {note} |")
    lines += [METHODS, f"| method | {' | '.join(versions)} | works | requests |", "|---" * (len(versions) + 3) + "|"]
    for method in sorted({each for client in clients for each in client["methods"]}, key=_by_class):
        marks = ["yes" if method in client["methods"] else "" for client in clients]
        requests = next(client["methods"][method] for client in reversed(clients) if method in client["methods"])
        shown = ", ".join(f"`{request}`" for request in requests)
        lines.append(f"| `{method}` | {' | '.join(marks)} | {works(requests)} | {shown} |")
    return "\n".join(lines) + "\n"


def works(requests: Iterable[str]) -> str:
    """Whether a method that makes these requests works here."""
    routes = [route_of(request) for request in requests if request != FUTURE]
    if not routes:
        return "asks nothing"
    return "refused" if all(route is None or route.by in (By.REFUSED, By.UNUSED) for route in routes) else "yes"


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
