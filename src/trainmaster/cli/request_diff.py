"""How the requests of jobs differ, field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.client.clone import request_of

DIGEST_SHOWN = 12
"""Of a file's sha256, enough to tell two apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field that jobs have different values of; None where a job does not have it."""

    field: str
    values: list[Any]


def differences(jobs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Every field of the requests in which the jobs differ. Names are left out: they are how jobs are told apart."""
    flat = [fields_of(job) for job in jobs]
    names = dict.fromkeys(name for fields in flat for name in fields if name != "name")
    found = (Difference(field=name, values=[fields.get(name) for fields in flat]) for name in names)
    return [each for each in found if any(value != each.values[0] for value in each.values)]


def fields_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a job's request that has a value, by its dotted path; a shipped file by its digest."""
    return dict(_flat(request_of(job), ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if value in (None, {}, []):
        return
    match value:
        case {"path": str(name), "sha256": str(digest)}:
            yield path, f"{name} {digest[:DIGEST_SHOWN]}"
        case dict():
            for name, each in value.items():
                yield from _flat(each, f"{path}.{name}" if path else name)
        case list() if all(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                key = each.get("path") if "sha256" in each else index
                yield from _flat(each, f"{path}[{key}]")
        case _:
            yield path, value
