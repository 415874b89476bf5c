"""`workload.packages`: what a job's Python needs beyond what it has, and the step that sees to it.

Requirements are checked for their shape alone, and conservatively: what they mean is for the installer to say. No
option of its command line passes for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from trainmaster.protocol.launch import Step
from trainmaster.server.core.fields import Matches

ENVIRONMENT = Step(
    name="environment",
    # Whatever the job ships: without -P, a file of that name would be imported in the module's place.
    argv=("-P", "-m", "trainmaster.worker.environments"),
    python=True,
)
"""Makes or finds the environment that the last step runs in."""

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
_EXTRAS = rf"(?: ?\[ ?{_NAME}(?: ?, ?{_NAME})* ?\])?"
_CLAUSE = r"(?:===?|~=|!=|[<>]=?) ?[A-Za-z0-9.*+!_-]+"
_VERSIONS = rf"(?: ?{_CLAUSE}(?: ?, ?{_CLAUSE})*)?"
_URL = r"(?:[a-z]+\+)?(?:https?|ssh|file)://[^\s;]+"
_MARKER = r"""(?: ?;[ A-Za-z0-9_.,<>=!~()'"*+-]+)?"""
_REQUIREMENT = rf"{_NAME}{_EXTRAS}(?:{_VERSIONS}| ?@ ?{_URL}){_MARKER}|{_URL}"
_CREDENTIALS = re.compile(r"https?://[^/\s]*@")


def _without_credentials(value: str) -> str:
    if _CREDENTIALS.search(value):
        raise PydanticCustomError(
            "rule",
            "must not hold a user or a password, as it is shown with the job; give the whole URL in the variable "
            "PIP_INDEX_URL or PIP_EXTRA_INDEX_URL of workload.environment, whose values are sealed",
        )
    return value


Requirement = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=1024),
    Matches(
        _REQUIREMENT,
        "is no requirement: write name, name[extra]>=1.0,<2, name @ https://..., or a URL, in one line and without "
        "options",
    ),
    AfterValidator(_without_credentials),
]
IndexUrl = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=1024),
    Matches(r"(?:https?://[^/\s]\S*|file:///\S*)", "must be an http, https or file URL"),
    AfterValidator(_without_credentials),
]
Requirements = Annotated[tuple[Requirement, ...], Field(max_length=512)]
IndexUrls = Annotated[tuple[IndexUrl, ...], Field(max_length=16)]


def packages_text(packages: Sequence[str], index_urls: Sequence[str]) -> str:
    """The input file of the step."""
    return json.dumps({"packages": list(packages), "index_urls": list(index_urls)}, indent=2) + "\n"
