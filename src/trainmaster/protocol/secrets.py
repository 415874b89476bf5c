"""The secrets of a job: their names, references to them in documents, and the values that a worker gets.

Documents hold references. Values exist in memory only: from the server to a worker, from a worker to its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainmaster.protocol.documents import JsonRecord

HUB_TOKEN = "hub_token"
"""For uploads to the Hugging Face Hub."""
SCAIDRIVE_TOKEN = "scaidrive_token"
SCAIATLAS_TOKEN = "scaiatlas_token"
"""The caller's own tokens, passed on with a request; forgotten when the job ends."""

_VARIABLE = "env."
"""Prefix of the secrets that are variables of the job's processes. No other secret has a dot in its name."""
_REFERENCE = "secret:"


def variable_secret(variable: str) -> str:
    return f"{_VARIABLE}{variable}"


def reference_to(name: str) -> str:
    """Stands in a document in place of a secret's value."""
    return f"{_REFERENCE}{name}"


def secret_named(reference: str) -> str:
    return reference.removeprefix(_REFERENCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets(JsonRecord):
    """The values for one attempt. Never shown or logged, and never in a file on disk."""

    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of every process of the job."""
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    """By secret name, for the steps that prepare the job and upload its results; user code does not see them."""

    @staticmethod
    def of(values: Mapping[str, str]) -> Secrets:
        """Sort values by secret name into variables and tokens."""
        variables = {name for name in values if name.startswith(_VARIABLE)}
        return Secrets(
            environment={name.removeprefix(_VARIABLE): values[name] for name in variables},
            tokens={name: value for name, value in values.items() if name not in variables},
        )

    def __bool__(self) -> bool:
        return bool(self.environment or self.tokens)


NO_SECRETS = Secrets()
