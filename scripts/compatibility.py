"""Writes `docs/reference/compatibility.md`: what public clients can ask for, and what becomes of it here.

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

import fireworks_methods

from trainmaster.server.doors.tinker.router import ROUTES, AnsweredBy, DoorRoute

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
ENVIRONMENTS = ("tinker-0.24.1", "tinker-0.25.0", "tinker")
"""The oldest first; the last has the latest version."""
FUTURE = "POST /retrieve_future"
WORKS = (AnsweredBy.SERVER, AnsweredBy.TRAINER)
COPIES = {
    "SamplingClient.from_sampler_handle": "sends no request itself; the copy samples like the original, in any process",
    "SamplingClient.get_sampler_handle": "sends no request itself; a client can also be pickled",
}
"""Methods that are good for nothing unless a server takes what is asked by their results."""
REFUSED_ARGUMENTS = {
    "ServiceClient.create_lora_training_client": {"optimizer": "dimuon"},
    "ServiceClient.create_sampling_client": {"record_stability_info": "record_stability_info"},
    "ServiceClient.create_training_client_from_state": {"optimizer": "dimuon"},
    "SamplingClient.sample": {
        "target_prompt_logprobs": "target_prompt_logprobs",
        "prompt_alt_tokens_k": "prompt_alt_tokens_k",
        "prompt_logprobs_last_n": "prompt_logprobs_last_n",
        "image": "image",
    },
    "TrainingClient.forward": {"image": "image"},
    "TrainingClient.forward_backward": {"image": "image", "stable_reinforce": "stable_reinforce"},
    "TrainingClient.optim_step": {"DimuonParams": "dimuon"},
    "TrainingClient.save_weights_and_get_sampling_client": {"record_stability_info": "record_stability_info"},
}
"""Arguments, or kinds of them, that methods which work do not take; and the name by which the error calls each."""

INTRODUCTION = """\
# Compatibility with the public clients

This page lists the requests and methods of the public clients, and whether they work with a Trainmaster server. The
first two sections are about [`tinker`](../guides/tinker.md), the last one about [`fireworks-ai`](#fireworks-ai).

`make docs` generates the page from the installed clients and the routes of the server. A test fails if a client can
send a request that no route answers.
"""
REQUESTS = """
## Requests

The table has every path below `/api/v1` that a client can request:

- *works*: answered by the *server*, with or without a running trainer, or by the *trainer* that has the model or the
  sampler;
- *refused*: fails with the given reason, in the future if there is one, else with a status that clients do not retry;
- *not used*: clients send the request only if the server tells them to, which this server does not. It is refused, too.

A test sends each request once to a running server and trainer.
"""
METHODS = """
## Methods

The table has the public methods of the clients, without their `_async` variants, and the requests that each sends. A
method that needs a refused request is *refused*, and its error says why. *No request* means that the method works
within the client.

The column *without* names arguments that a working method refuses here; the error names them. The only optimizer is
AdamW, inputs are tokens and not images, and the data for `stable_reinforce` is not recorded.
"""


def reflect(environment: str, script: str = "reflect_client.py") -> dict[str, Any]:
    """What the client of an environment can ask for."""
    python = ROOT / ".venvs" / environment / "bin" / "python"
    found = subprocess.run([python, ROOT / "scripts" / script], check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def reflect_fireworks() -> dict[str, Any]:
    """What `fireworks-ai` offers."""
    return reflect("fireworks", "reflect_fireworks.py")


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


def page(clients: Sequence[Mapping[str, Any]], fireworks: Mapping[str, Any]) -> str:
    """The page about some `tinker` clients, the oldest first, and about `fireworks-ai`."""
    versions = [str(client["version"]) for client in clients]
    requests = sorted({each for client in clients for each in client["requests"]}, key=_by_path)
    lines = [INTRODUCTION, f"The versions of `tinker` are {', '.join(versions)}.", REQUESTS]
    lines += [_counted("requests", clients[-1], {request: kind_of(request) for request in clients[-1]["requests"]}), ""]
    lines += [f"| request | {' | '.join(versions)} | here | by | |", "|---" * (len(versions) + 4) + "|"]
    for request in requests:
        route = route_of(request)
        marks = ["yes" if request in client["requests"] else "" for client in clients]
        by, note = (route.by if route.by in WORKS else "", route.note) if route else ("", "")
        lines.append(f"| `{request}` | {' | '.join(marks)} | {kind_of(request)} | {by} | {note} |")
    lines.append(METHODS)
    fates = {method: fate_of(found, method)[0] for method, found in clients[-1]["methods"].items()}
    lines += [_counted("methods", clients[-1], fates), ""]
    lines += [f"| method | {' | '.join(versions)} | here | without | requests | |", "|---" * (len(versions) + 5) + "|"]
    for method in sorted({each for client in clients for each in client["methods"]}, key=_by_class):
        marks = ["yes" if method in client["methods"] else "" for client in clients]
        made = next(client["methods"][method] for client in reversed(clients) if method in client["methods"])
        shown = ", ".join(f"`{request}`" for request in made)
        fate, why = fate_of(made, method)
        without = ", ".join(f"`{argument}`" for argument in REFUSED_ARGUMENTS.get(method, ()))
        lines.append(f"| `{method}` | {' | '.join(marks)} | {' | '.join((fate, without, shown, why))} |")
    lines += fireworks_methods.lines(fireworks)
    return "\n".join(lines) + "\n"


def kind_of(request: str) -> str:
    """What becomes of a request: it works, is refused, or is not used."""
    route = route_of(request)
    if route is None:
        return "unanswered"
    return "works" if route.by in WORKS else "not used" if route.by is AnsweredBy.UNUSED else "refused"


def fate_of(requests: Sequence[str], method: str = "") -> tuple[str, str]:
    """What becomes of a method that leads to these requests, and why."""
    if method in COPIES:
        return "works", COPIES[method]
    if not requests:
        return "no request", ""
    made = [request for request in requests if request != FUTURE]
    refused = [route for request in made if (route := route_of(request)) is not None and route.by is AnsweredBy.REFUSED]
    if refused:
        return "refused", "; ".join(route.note for route in refused)
    unused = [route for request in made if (route := route_of(request)) is not None and route.by is AnsweredBy.UNUSED]
    return "works", unused[0].note if len(unused) == len(made) else ""


def _counted(what: str, client: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    counts = Counter(kinds.values())
    said = {"works": "work", "refused": "are refused", "not used": "are not used", "no request": "send no request"}
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
    text = page(clients, reflect_fireworks())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.stderr.write("docs/reference/compatibility.md is out of date: run scripts/compatibility.py\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
