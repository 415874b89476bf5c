"""docs/reference/fields.md: every field of every request, its effect, and the test that shows it.

`python tests/fields/page.py` writes it.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from field_tables import fields_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fields.md"
TABLES = {
    "job": "A job: `POST /v1/jobs`, and the job file",
    "trainer_job": "A trainer: `TrainerJobConfig` of the Fireworks door, as its client sends it",
    "trainer_client": "`TrainerClient`: its trainers, initializers, configurations and options",
    "tinker": "Requests of `tinker`: operations",
}
"""Table -> its title."""

INTRODUCTION = """\
# Every field, its effect, and the test that shows it

This page is made from the tables in `tests/fields` by `make docs`. Its tests fail when a field has no row, when
changing a field changes nothing, or when the test that a row names is not there. Types and defaults are in
[job-fields.md](job-fields.md); the fields of a `TrainerJobConfig` by their names in Python are in
[fireworks.md](../guides/fireworks.md#fields-of-a-trainer).
"""


def page() -> str:
    """The page, as it should be."""
    lines = [INTRODUCTION]
    for table, title in TABLES.items():
        lines += [f"## {title}", ""]
        for part, fields in groupby(fields_of(table), key=lambda field: field.part):
            lines += [f"### {part}", "", "| field | effect | test |", "|---|---|---|"]
            lines += [f"| `{field.name}` | {field.effect} | `{field.test.partition('::')[2]}` |" for field in fields]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
