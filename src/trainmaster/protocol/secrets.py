"""The secrets of a job: how they are named, how documents refer to them, and the values as a worker is given them.

Documents hold references. Values travel in memory alone: from the server to a worker, from a worker to its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HUB_TOKEN = "hub_token"
"""For the upload to the Hugging Face Hub."""
SCAIDRIVE_TOKEN = "scaidrive_token"
SCAIATLAS_TOKEN = "scaiatlas_token"
FORWARDED_TOKENS = (SCAIDRIVE_TOKEN, SCAIATLAS_TOKEN)
"""The caller's own, passed on with a request; forgotten when the job ends."""

_VARIABLE = "env."
"""Begins the name of a secret that is a variable of the job's processes. No other name has a dot."""
_REFERENCE = "secret:"


def variable_secret(variable: str) -> str:
    """The name of the secret that holds a variable's value."""
    return f"{_VARIABLE}{variable}"


def reference_to(name: str) -> str:
    """What stands in a document where a secret's value is meant."""
    return f"{_REFERENCE}{name}"


def secret_named(reference: str) -> str:
    """The name of the secret that a document refers to."""
    return reference.removeprefix(_REFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """The values that one attempt is given. They are never written, shown or logged."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of every process of the job."""
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For what prepares the job and brings its results away, by the secret's name; the user's processes do not see
    them."""

    @staticmethod
    def of(values: Mapping[str, str]) -> Secrets:
        """The values by their secrets' names, sorted by what they are for."""
        variables = {name for name in values if name.startswith(_VARIABLE)}
        return Secrets(
            environment={name.removeprefix(_VARIABLE): values[name] for name in variables},
            tokens={name: value for name, value in values.items() if name not in variables},
        )

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> Secrets:
        """The values of a plain form."""
        return Secrets(environment=document.get("environment", {}), tokens=document.get("tokens", {}))

    def to_json(self) -> dict[str, dict[str, str]]:
        """The plain form, for a socket or a connection, and for nothing that is kept."""
        return {"environment": dict(self.environment), "tokens": dict(self.tokens)}

    def __bool__(self) -> bool:
        return bool(self.environment or self.tokens)


NO_SECRETS = Secrets()
